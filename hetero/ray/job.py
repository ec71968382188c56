"""``hetero launch --platform ray``: a job on a Ray cluster, from a driver anywhere.

The driver asks Ray for a placement group with one bundle per host, and starts a launcher in each. Ray places and, with
an autoscaler, adds nodes. Everything else is as on any cluster: the launchers exchange heartbeats, and batches go over
hetero's own connections.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hetero.cluster import Role
from hetero.cluster.groups import StatedGroup, group_document, parse_stated_group
from hetero.cluster.roles import assign_roles
from hetero.config import LaunchOptions
from hetero.control.security import Token
from hetero.errors import CapacityError, ClusterError, ConfigError, ExitCode, HeteroError
from hetero.ray.head import HeadWatch
from hetero.ray.job_host import Demand, JobHost, JobHostOrder
from hetero.ray.scaling import Bounds, Scaler
from hetero.render.request import resources_of
from hetero.system.logs import write_line
from hetero.system.scripts import script_words

__all__ = ["ElasticGroup", "Job", "parse_group", "run"]

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_PATIENCE_S = 10.0
_STOP_S = 90.0
"""Longest time from a request to stop until the driver gives up the launchers."""
_END_S = 10.0
"""Longest time from the end of the trainers' launchers until the driver ends the others."""
_MAX_FAILURES = 3
"""No more data hosts are added after so many of them have failed."""
_CODES = {
    "ActorUnschedulableError": ExitCode.CAPACITY,
    "AuthenticationError": ExitCode.AUTHENTICATION,
    "ObjectStoreFullError": ExitCode.RESOURCES,
    "OutOfDiskError": ExitCode.RESOURCES,
    "OutOfMemoryError": ExitCode.RESOURCES,
    "RayTaskError": ExitCode.INTERNAL,
    "RuntimeEnvSetupError": ExitCode.USAGE,
}
"""Exit codes by the name of Ray's error. Every other error means that the host was lost."""
_BOUNDS = re.compile(r"(.+:)([0-9]+)\.\.([0-9]+)")
_NOT_PASSED = (
    "script",
    "script_args",
    "module",
    "platform",
    "cluster_file",
    "host",
    "join",
    "output_dir",
    "ray_groups",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticGroup:
    """A group of the job."""

    stated: StatedGroup
    """With the number of hosts at the start."""
    max_hosts: int
    """Largest number of hosts. More than the number at the start only in a data group."""


def parse_group(text: str) -> ElasticGroup:
    """Parse ``NAME=RESOURCES:COUNT`` or ``NAME=RESOURCES:MIN..MAX``, for example ``data=CPU:16:2..8``.

    Raises:
        ConfigError: If the text is malformed.
    """
    bounds = _BOUNDS.fullmatch(text)
    stated = parse_stated_group(text if bounds is None else bounds[1] + bounds[2])
    resources = resources_of(stated)
    if not (resources.cpus or resources.gpus):
        raise ConfigError(
            f"--group {text!r:.80}: Ray does not know the type {stated.instance_type!r:.60}\n"
            f"  to do: state what a host needs, for example {stated.name}=CPU:16:{stated.count}"
        )
    max_hosts = stated.count if bounds is None else int(bounds[3])
    if max_hosts < stated.count:
        raise ConfigError(f"--group {text!r:.80}: found {stated.count}..{max_hosts}; expected the smaller number first")
    return ElasticGroup(stated=stated, max_hosts=max_hosts)


def run(options: LaunchOptions) -> int:
    """Run the job and return its exit code.

    Raises:
        ConfigError: If Ray is not installed, or the groups are malformed.
        CapacityError: If the Ray cluster cannot place the job within the start timeout.
        ClusterError: If there is no Ray cluster.
    """
    groups = [parse_group(text) for text in options.ray_groups]
    if not groups:
        raise ConfigError(
            "--platform ray needs the groups of the job, for example --group trainer=GPU:8:1 --group data=CPU:16:2..8"
        )
    roles = assign_roles(
        [(group.stated.name, group.stated.instance_type) for group in groups], options.roles, "--group"
    )
    fixed = [group for group, role in zip(groups, roles, strict=True) if role is Role.TRAINER]
    if any(group.max_hosts > group.stated.count for group in fixed):
        raise ConfigError("--group: only a data group can have MIN..MAX hosts, because the number of ranks is fixed")
    ray = _ray()
    with _connection(ray) as head_address, Job(ray, options, groups, roles, head_address) as job:
        return job.run()


class Job:
    """A job in progress. Use it as a context manager, in the main thread.

    Args:
        ray: The module, connected to a cluster.
        options: Options of the job.
        groups: Groups of the job.
        roles: Role of each group.
        head_address: ``ADDRESS:PORT`` of the head of the cluster. Empty: its loss is not watched for.
    """

    def __init__(
        self,
        ray: Any,
        options: LaunchOptions,
        groups: Sequence[ElasticGroup],
        roles: Sequence[Role],
        head_address: str = "",
    ) -> None:
        self._head_address = head_address
        self._ray = ray
        self._options = options
        self._groups = groups
        self._roles = dict(zip((group.stated.name for group in groups), roles, strict=True))
        self._token = Token.generate()
        self._id = f"ray-{secrets.token_hex(4)}"
        self._hosts: dict[str, Any] = {}
        """The actors, by the name of their host. Those of the description come first."""
        self._group_of: dict[str, ElasticGroup] = {}
        self._addresses: dict[str, str] = {}
        self._ends: dict[Any, str] = {}
        """Host whose launcher still runs, by Ray's reference to its exit code."""
        self._codes: dict[str, int] = {}
        """Exit codes of the hosts that have ended or were lost."""
        self._silent: set[str] = set()
        """Hosts that could not report why they ended: lost, or their launcher was killed."""
        self._leaving: set[str] = set()
        self._elastic = next((group for group in groups if group.max_hosts > group.stated.count), None)
        if self._elastic is not None:
            bounds = Bounds(min_hosts=self._elastic.stated.count, max_hosts=self._elastic.max_hosts)
            self._scaler = Scaler(bounds)
        self._placement: Any = None
        self._num_signals = 0

    def __enter__(self) -> Job:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        grace_s = 0.0 if self._num_signals > 1 else _END_S
        started = {*self._ends.values(), *self._codes}
        closed = [actor.close.remote(grace_s) for name, actor in self._hosts.items() if name in started]
        if closed:
            self._ray.wait(closed, num_returns=len(closed), timeout=grace_s + _POLL_S)
        for actor in self._hosts.values():
            self._ray.kill(actor)
        if self._placement is not None:
            self._ray.util.remove_placement_group(self._placement)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self) -> int:
        """Place the hosts, follow them to the end, and return the exit code of the job."""
        if not (self._place() and self._find_addresses()):
            return next(iter(self._codes.values()), 128 + signal.SIGTERM)
        cluster = {
            "instance_groups": [
                group_document(group.stated.name, group.stated.instance_type, self._names(group))
                for group in self._groups
            ]
        }
        for name in self._hosts:
            self._start(name, self._order(name, ["--cluster-file", "{folder}/cluster.json"], cluster))
        return self._follow()

    def _place(self) -> bool:
        """Wait until Ray has placed all hosts. Return False if the job was asked to stop."""
        bundles, names = [], []
        for group in self._groups:
            for number in range(group.stated.count):
                names.append(f"{group.stated.name}-{number}")
                self._group_of[names[-1]] = group
                bundles.append(_bundle(group))
        # One launcher per node, because all launchers of a description use the same port.
        self._placement = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        begin_s = shown_s = time.monotonic()
        while not self._placement.wait(1):
            now_s = time.monotonic()
            if self._num_signals:
                return False
            if now_s - begin_s > self._options.start_timeout_s:
                raise CapacityError(
                    f"Ray has not placed the job within {self._options.start_timeout_s:.0f} s\n"
                    f"  needed: {len(bundles)} nodes, with {', '.join(group.stated.text for group in self._groups)}\n"
                    f"  found: {_nodes(self._ray)}"
                )
            if now_s - shown_s > _PATIENCE_S:
                shown_s = now_s
                _say(f"waiting for Ray to place {len(bundles)} hosts on different nodes; found: {_nodes(self._ray)}")
        strategies = self._ray.util.scheduling_strategies
        for number, name in enumerate(names):
            where = strategies.PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=number)
            self._hosts[name] = self._actor(self._group_of[name], scheduling_strategy=where)
        return True

    def _find_addresses(self) -> bool:
        """Wait until all actors run. Return False if one was lost, or the job was asked to stop."""
        pending = {actor.address.remote(): name for name, actor in self._hosts.items()}
        deadline_s = time.monotonic() + self._options.start_timeout_s
        while pending:
            ready, _ = self._ray.wait(list(pending), timeout=_POLL_S)
            for reference in ready:
                name = pending.pop(reference)
                try:
                    self._addresses[name] = self._ray.get(reference, timeout=_PATIENCE_S)
                except self._ray.exceptions.RayError as error:
                    self._record_loss(name, error)
                    return False
            if self._num_signals:
                return False
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"Ray has not started the job within {self._options.start_timeout_s:.0f} s\n"
                    f"  found: no answer from {', '.join(pending.values())}\n"
                    "  to do: see `ray status`, and the logs of Ray on these nodes"
                )
        return True

    def _actor(self, group: ElasticGroup, **options: Any) -> Any:
        resources = _bundle(group)
        actor = self._ray.remote(JobHost).options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_concurrency=8, **options
        )
        return actor.remote()

    def _start(self, name: str, order: JobHostOrder) -> None:
        self._ends[self._hosts[name].run.remote(order)] = name

    def _order(self, name: str, where: Sequence[str], cluster: object) -> JobHostOrder:
        options = self._options
        group = self._group_of[name].stated
        gpus = resources_of(group).gpus
        arguments = ["launch", "--config", "{folder}/options.json", *where, "--host", name]
        arguments += ["--output-dir", "{folder}/output"]
        if gpus and options.nproc_per_node is None:
            arguments += ["--nproc-per-node", str(gpus)]
        return {
            "name": name,
            "arguments": [
                *arguments,
                *script_words(options.script, is_module=options.module),
                "--",
                *options.script_args,
            ],
            "options": _stated(options),
            "cluster": cluster,
            "hosts": self._addresses,
            "token": self._token.reveal(),
            "variables": {"HETERO_JOB_ID": self._id},
        }

    def _follow(self) -> int:
        """Wait for the launchers of the trainers, and let the number of data hosts follow the demand."""
        trainers = [name for name in self._hosts if self._roles[self._group_of[name].stated.name] is Role.TRAINER]
        demand = self._hosts[trainers[0]].demand.remote(0) if self._elastic else None
        stop_at_s: float | None = None
        head = HeadWatch(self._head_address, say=_say)
        while not all(name in self._codes for name in trainers):
            if loss := head.loss():
                _end_without_ray(loss)
            ready, _ = self._ray.wait([*self._ends, *([demand] if demand else [])], timeout=_POLL_S / 4)
            for reference in ready:
                if reference == demand:
                    demand = self._follow_demand(reference, trainers)
                else:
                    self._record_end(reference)
            if self._num_signals and stop_at_s is None:
                stop_at_s = time.monotonic() + _STOP_S
                demand = None
                self._tell_all_to_stop()
            if stop_at_s is not None and (time.monotonic() > stop_at_s or self._num_signals > 1):
                _say("the launchers did not end in time; ending them")
                return int(ExitCode.SHUTDOWN_OVERRAN)
        if trainers[0] in self._silent:
            _say(f"there is no report, because {trainers[0]} was lost")
        else:
            self._bring_home(trainers[0])
        return self._exit_code(trainers)

    def _record_end(self, reference: Any) -> None:
        name = self._ends.pop(reference)
        try:
            code = self._ray.get(reference, timeout=_PATIENCE_S)
        except self._ray.exceptions.RayError as error:
            self._record_loss(name, error)
            return
        _say(f"the launcher of {name} ended with {code}")
        self._codes[name] = code if code >= 0 else 128 - code
        if code < 0:
            self._silent.add(name)

    def _record_loss(self, name: str, error: Exception) -> None:
        self._silent.add(name)
        self._codes[name] = int(_exit_code_of(error))
        if name not in self._leaving:
            _say(f"host {name} was lost: {_summary(error)}")

    def _exit_code(self, trainers: Sequence[str]) -> int:
        """Return the code of the first trainer host that failed. All launchers report the cause of the job's end.

        The loss of a host or of a launcher is the code only if no launcher has reported one.
        """
        reported = [self._codes[name] for name in trainers if name not in self._silent]
        return next(filter(None, reported), 0) if reported else self._codes[trainers[0]]

    def _tell_all_to_stop(self) -> None:
        _say("asked to stop: asking every launcher to stop")
        for name in self._ends.values():
            self._hosts[name].stop.remote()

    def _follow_demand(self, reference: Any, trainers: Sequence[str]) -> Any:
        """Add data hosts, or let one leave, after an estimate. Return the reference to the next estimate, or None."""
        assert self._elastic is not None
        try:
            demand: Demand = self._ray.get(reference, timeout=_PATIENCE_S)
        except self._ray.exceptions.RayError:
            return None  # the end of the host is recorded elsewhere
        names = self._names(self._elastic)
        if any(name in self._codes for name in trainers) or 0 in (self._codes.get(name) for name in names):
            return None  # the job ends: its data hosts end with 0
        present = [name for name in names if name not in self._codes and name not in self._leaving]
        target = self._scaler.target(low=demand.low, high=demand.high, present=len(present))
        if target < len(present):
            _say(f"the job wants at most {demand.high} data hosts; {present[-1]} leaves")
            self._let_leave(present[-1])
        added = [name for name in names[self._elastic.stated.count :] if name not in self._leaving]
        num_failed = sum(self._codes.get(name, 0) not in (0, 128 + signal.SIGTERM) for name in added)
        for _ in range(target - len(present)):
            if num_failed >= _MAX_FAILURES:
                break  # more of them would fail too
            self._add(self._elastic, trainers[0])
        return self._hosts[trainers[0]].demand.remote(demand.number)

    def _let_leave(self, name: str) -> None:
        self._leaving.add(name)
        asked = self._hosts[name].stop.remote()
        if not self._ray.wait([asked], timeout=_POLL_S)[0]:
            self._ray.kill(self._hosts[name])  # Ray has not placed it yet, and need not

    def _add(self, group: ElasticGroup, first_trainer: str) -> None:
        name = f"{group.stated.name}-{len(self._names(group))}"
        _say(f"the job could use another data host; asking Ray for {name}")
        self._group_of[name] = group
        self._hosts[name] = self._actor(group)
        port = str(self._options.port)
        where = ["--join", f"{first_trainer}:{port}", "--join-group", group.stated.name, "--port", "{port}"]
        self._start(name, self._order(name, where, {}))

    def _bring_home(self, first_trainer: str) -> None:
        folder = self._options.output_dir or Path("runs") / self._id
        try:
            files = self._ray.get(self._hosts[first_trainer].results.remote(), timeout=_STOP_S)
            if files:
                folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
        except (OSError, self._ray.exceptions.RayError) as error:
            _say(f"the report could not be brought to {folder}: {error}")
            return
        if files:
            _say(f"report: {folder / 'report.md'}")

    def _names(self, group: ElasticGroup) -> list[str]:
        return [name for name, own in self._group_of.items() if own is group]

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._num_signals += 1


def _ray() -> Any:
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise ConfigError("--platform ray needs Ray; pip install 'hetero[ray]'") from error
    return ray


@contextmanager
def _connection(ray: Any) -> Iterator[str]:
    """Connect to the Ray cluster, and disconnect at the end if this process was not connected before.

    Yields:
        ``ADDRESS:PORT`` of the head. Empty if Ray Client is between, which notices the loss itself.
    """
    if ray.is_initialized():
        yield _head_address(ray)
        return
    in_ray_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # its runtime environment has the working directory
    environment = None if in_ray_job else {"working_dir": str(Path.cwd())}
    address = os.environ.get("RAY_ADDRESS", "auto")
    _say(f"connecting to the Ray cluster {address}")
    try:
        ray.init(address=address, runtime_env=environment, logging_level=logging.WARNING)
    except (ConnectionError, ray.exceptions.RaySystemError) as error:
        raise ClusterError(
            f"found no Ray cluster: {error}\n"
            "  to do: start one (ray start --head), set RAY_ADDRESS, or submit this command as a Ray job"
        ) from error
    try:
        yield _head_address(ray)
    except ray.exceptions.RayError as error:  # of a call that is not for one host
        raise ClusterError(f"the Ray cluster has failed: {_summary(error)}") from error
    finally:
        ray.shutdown()


def _head_address(ray: Any) -> str:
    return str(getattr(ray.get_runtime_context(), "gcs_address", ""))


def _end_without_ray(why: str) -> NoReturn:
    """End this process because the head was lost. Ray ends the actors by itself.

    A call to Ray would wait for the head until Ray ends this process, with an exit code of its own.
    """
    _say(f"error HET-{int(ExitCode.ORPHANED)}: {why}")
    os._exit(ExitCode.ORPHANED)


def _exit_code_of(error: Exception) -> ExitCode:
    """Return the exit code of a host whose actor did not answer. No other function translates Ray's errors to codes."""
    cause = getattr(error, "cause", None)  # what the actor's own code has raised
    if isinstance(cause, HeteroError):
        return cause.exit_code
    found = (_CODES[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in _CODES)
    return next(found, ExitCode.ORPHANED)


def _summary(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _bundle(group: ElasticGroup) -> dict[str, float]:
    resources = resources_of(group.stated)
    return {"CPU": resources.cpus or 1, **({"GPU": resources.gpus} if resources.gpus else {})}


def _stated(options: LaunchOptions) -> dict[str, object]:
    """Return the options that differ from their defaults, as a configuration file has them."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name in _NOT_PASSED or value == field.default:
            continue
        found[field.name] = (
            list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        )
    return found


def _nodes(ray: Any) -> str:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    shown = [
        " ".join(f"{name}:{resources[name]:g}" for name in ("CPU", "GPU") if name in resources) for resources in nodes
    ]
    return f"{len(nodes)} nodes ({', '.join(shown)})"


def _say(text: str) -> None:
    write_line(f"hetero: {text}")
