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
from typing import Any

from hetero.cluster import Role
from hetero.cluster.groups import StatedGroup, group_document, parse_stated_group
from hetero.cluster.roles import assign_roles
from hetero.config import LaunchOptions
from hetero.control.security import Token
from hetero.errors import CapacityError, ClusterError, ConfigError, ExitCode
from hetero.ray.job_host import JobHost, JobHostOrder
from hetero.render.request import resources_of
from hetero.system.logs import write_line
from hetero.system.scripts import script_words

__all__ = ["ElasticGroup", "parse_group", "run"]

logger = logging.getLogger(__name__)

_POLL_S = 2.0
_PATIENCE_S = 10.0
_STOP_S = 90.0
"""Longest time from a request to stop until the driver gives up the launchers."""
_FOREVER_S = 1e8
_MAX_FAILURES = 3
"""No more data hosts are added after so many of them have failed."""
_SHRINK_POLLS = 15
"""A data host leaves after so many polls in a row in which the job wanted fewer."""
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
    with _connection(ray), _Job(ray, options, groups, roles) as job:
        return job.run()


class _Job:
    """A job in progress."""

    def __init__(self, ray: Any, options: LaunchOptions, groups: Sequence[ElasticGroup], roles: Sequence[Role]) -> None:
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
        self._codes: dict[str, int] = {}
        self._waits: dict[str, Any] = {}
        """For each host, the reference to the exit code of its launcher."""
        self._placement: Any = None
        self._num_signals = 0
        self._too_many = 0

    def __enter__(self) -> _Job:
        self._before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        references = [actor.clean_up.remote() for actor in self._hosts.values()]
        if references:
            self._ray.wait(references, num_returns=len(references), timeout=_POLL_S)
        for actor in self._hosts.values():
            self._ray.kill(actor)
        if self._placement is not None:
            self._ray.util.remove_placement_group(self._placement)

    def run(self) -> int:
        """Place the hosts, follow them to the end, and return the exit code of the job."""
        if not self._place():
            return 128 + signal.SIGTERM
        cluster = {
            "instance_groups": [
                group_document(group.stated.name, group.stated.instance_type, self._names(group))
                for group in self._groups
            ]
        }
        for name in list(self._hosts):
            order = self._order(name, ["--cluster-file", "{folder}/cluster.json"], cluster)
            self._ray.get(self._hosts[name].start.remote(order))
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
        found = self._ray.get([actor.address.remote() for actor in self._hosts.values()])
        self._addresses = dict(zip(self._hosts, found, strict=True))
        return True

    def _actor(self, group: ElasticGroup, **options: Any) -> Any:
        resources = _bundle(group)
        actor = self._ray.remote(JobHost).options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_concurrency=8, **options
        )
        return actor.remote()

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
        """Wait for the launchers, and let the number of data hosts follow the demand."""
        trainers = [name for name in self._hosts if self._roles[self._group_of[name].stated.name] is Role.TRAINER]
        stop_at_s: float | None = None
        while True:
            for name, actor in self._hosts.items():
                if name not in self._codes:
                    self._codes.update(self._end_of(name, actor))
            if all(name in self._codes for name in trainers):
                break
            if self._num_signals and stop_at_s is None:
                stop_at_s = time.monotonic() + _STOP_S
                self._tell_all_to_stop()
            if stop_at_s is not None and (time.monotonic() > stop_at_s or self._num_signals > 1):
                _say("the launchers did not end in time; ending them")
                return int(ExitCode.SHUTDOWN_OVERRAN)
            if stop_at_s is None:
                self._scale(trainers[0])
            time.sleep(_POLL_S / 4)
        code = self._codes[trainers[0]]
        self._bring_home(trainers[0])
        return code

    def _end_of(self, name: str, actor: Any) -> dict[str, int]:
        """Return the exit code of a launcher that has ended, or nothing while it runs."""
        if name not in self._waits:
            self._waits[name] = actor.wait.remote(_FOREVER_S)
        ready, _ = self._ray.wait([self._waits[name]], timeout=0)  # an actor that Ray has not placed yet is not lost
        if not ready:
            return {}
        try:
            code = self._ray.get(self._waits.pop(name))
        except self._ray.exceptions.RayError as error:
            _say(f"host {name} was lost: {str(error).splitlines()[0]}")
            return {name: int(ExitCode.ORPHANED)}
        if code is not None:
            _say(f"the launcher of {name} ended with {code}")
        return {} if code is None else {name: code if code >= 0 else 128 - code}

    def _tell_all_to_stop(self) -> None:
        _say("asked to stop: asking every launcher to stop")
        for name, actor in self._hosts.items():
            if name not in self._codes:
                actor.stop.remote()

    def _scale(self, first_trainer: str) -> None:
        """Add a data host where the job could use one more, and let one leave where it has had too many for a while."""
        elastic = next((group for group in self._groups if group.max_hosts > group.stated.count), None)
        if elastic is None or 0 in self._codes.values():  # data hosts end with 0 as soon as the training has ended
            return
        added = [name for name, group in self._group_of.items() if group is elastic][elastic.stated.count :]
        if sum(self._codes.get(name, 0) not in (0, 128 + signal.SIGTERM) for name in added) >= _MAX_FAILURES:
            return  # more of them would fail too
        try:
            wanted = self._ray.get(self._hosts[first_trainer].wanted.remote(), timeout=_POLL_S)
        except self._ray.exceptions.RayError:
            return  # the loss of the host is noticed by its exit code
        present = [name for name, group in self._group_of.items() if group is elastic and name not in self._codes]
        if wanted.get("wanted_data_hosts_low", 0) > len(present) and len(present) < elastic.max_hosts:
            self._add(elastic, first_trainer)
        is_too_many = bool(wanted) and wanted["wanted_data_hosts_high"] < len(present) > elastic.stated.count
        self._too_many = self._too_many + 1 if is_too_many else 0
        if self._too_many > _SHRINK_POLLS:
            self._too_many = 0
            _say(f"the job wants at most {wanted['wanted_data_hosts_high']} data hosts; {present[-1]} leaves")
            self._hosts[present[-1]].stop.remote()

    def _add(self, group: ElasticGroup, first_trainer: str) -> None:
        name = f"{group.stated.name}-{len(self._names(group))}"
        _say(f"the job could use another data host; asking Ray for {name}")
        self._group_of[name] = group
        self._hosts[name] = self._actor(group)
        port = str(self._options.port)
        where = ["--join", f"{first_trainer}:{port}", "--join-group", group.stated.name, "--port", "{port}"]
        self._hosts[name].start.remote(self._order(name, where, {}))

    def _bring_home(self, first_trainer: str) -> None:
        folder = self._options.output_dir or Path("runs") / self._id
        try:
            files = self._ray.get(self._hosts[first_trainer].results.remote(), timeout=_STOP_S)
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).write_bytes(content)
        except (OSError, self._ray.exceptions.RayError) as error:
            _say(f"the report could not be brought to {folder}: {error}")
            return
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
def _connection(ray: Any) -> Iterator[None]:
    """Connect to the Ray cluster, and disconnect at the end if this process was not connected before."""
    if ray.is_initialized():
        yield
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
        yield
    finally:
        ray.shutdown()


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
