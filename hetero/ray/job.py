"""``hetero launch --platform ray``: a job on a Ray cluster, from a driver anywhere.

The driver asks Ray for a placement group with one bundle per host, and starts a launcher in each. Ray places and, with
an autoscaler, adds nodes. Everything else is as on any cluster: the launchers exchange heartbeats, and batches go over
hetero's own connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero.cluster import Role
from hetero.cluster.groups import group_document
from hetero.cluster.roles import assign_roles
from hetero.config import LaunchOptions, to_flags
from hetero.control.security import Token
from hetero.errors import CapacityError, ConfigError, ExitCode
from hetero.ray.connection import connected, exit_code_of, import_ray, nodes_of, say, summary
from hetero.ray.groups import ElasticGroup, bundle_of, check_groups, parse_group
from hetero.ray.job_host import ACTOR_VARIABLES, LEDGERS, RESULTS, Demand, JobHost, JobHostOrder, Results
from hetero.ray.scaling import Bounds, Scaler
from hetero.render.request import resources_of
from hetero.system.scripts import script_words

__all__ = ["Job", "run"]

_POLL_S = 2.0
_PATIENCE_S = 10.0
_STOP_S = 90.0
"""Longest time from a request to stop until the driver gives up the launchers."""
_END_S = 10.0
"""Longest time from the end of the trainers' launchers until the driver ends the others."""
_SHORT_LIFE_S = 60.0
"""A data host that ends earlier has failed. One that ends later was lost, as spot hosts are."""
_MAX_FAILURES = 3
"""After so many short lives in a row, no data host is added for `_PAUSE_S`."""
_PAUSE_S = 300.0
_TAKEN = (128 + signal.SIGTERM, ExitCode.ORPHANED)
"""Exit codes of launchers of data hosts that ended because of their node or its network."""
_PORTS = range(20_000, 30_000)
"""A job on Ray takes one of these ports, because another job may have a launcher on the same node. Ray's own processes
and the kernel use others by default."""


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
    check_groups(groups)
    roles = assign_roles(
        [(group.stated.name, group.stated.instance_type) for group in groups], options.roles, "--group"
    )
    fixed = [group for group, role in zip(groups, roles, strict=True) if role is Role.TRAINER]
    if any(group.max_hosts > group.stated.count for group in fixed):
        raise ConfigError("--group: only a data group can have MIN..MAX hosts, because the number of ranks is fixed")
    ray = import_ray()
    with connected(ray) as head:
        with Job(ray, options, groups, roles) as job:
            head.exit_code = job.run()
        return head.exit_code


class Job:
    """A job in progress. Use it as a context manager, in the main thread.

    Args:
        ray: The module, connected to a cluster.
        options: Options of the job.
        groups: Groups of the job.
        roles: Role of each group.
    """

    def __init__(self, ray: Any, options: LaunchOptions, groups: Sequence[ElasticGroup], roles: Sequence[Role]) -> None:
        self._ray = ray
        self._actors = ray.remote(JobHost)
        self._options = options
        has_default_port = options.port == LaunchOptions(script=options.script).port
        self._port = secrets.choice(_PORTS) if has_default_port else options.port
        self._groups = groups
        self._roles = dict(zip((group.stated.name for group in groups), roles, strict=True))
        self._token = Token.generate()
        self._id = f"ray-{secrets.token_hex(4)}"
        self._hosts: dict[str, Any] = {}
        """The actors, by the name of their host, without those of data hosts that have ended."""
        self._group_of: dict[str, ElasticGroup] = {}
        """Group of each host that the job ever had."""
        self._bundles: dict[str, int] = {}
        """Bundle of the placement group, by the name of the host that uses it."""
        self._free_bundles: dict[str, list[int]] = {group.stated.name: [] for group in groups}
        """Bundles of data hosts that have ended, by group."""
        self._addresses: dict[str, str] = {}
        self._waiting: dict[Any, Callable[[Any], None]] = {}
        """What is done with each answer of an actor that is still to come, by Ray's reference to it."""
        self._started: set[str] = set()
        self._placed_s: dict[str, float] = {}
        """Times when Ray had placed hosts. A host that Ray has not placed yet is not in it."""
        self._codes: dict[str, int] = {}
        """Exit codes of the hosts that have ended or were lost."""
        self._silent: set[str] = set()
        """Hosts that could not report why they ended: lost, or their launcher was killed."""
        self._leaving: set[str] = set()
        self._lost: list[ElasticGroup] = []
        """Group of each data host that was lost and is to be replaced."""
        self._num_short_lives = 0
        """Number of data hosts in a row that have ended shortly after their start."""
        self._paused_until_s = 0.0
        self._trainers: list[str] = []
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
        with contextlib.ExitStack() as stack:  # each is done although another one fails
            for number, handler in self._before.items():
                stack.callback(signal.signal, number, handler)
            if self._placement is not None:
                stack.callback(self._ray.util.remove_placement_group, self._placement)
            for actor in self._hosts.values():
                stack.callback(self._ray.kill, actor)
            grace_s = 0.0 if self._num_signals > 1 else _END_S
            # A host that Ray has not placed, or that was lost, would not answer.
            closable = (self._started & self._placed_s.keys() & self._hosts.keys()) - self._silent
            closed = [self._hosts[name].close.remote(grace_s) for name in closable]
            if closed:
                self._ray.wait(closed, num_returns=len(closed), timeout=grace_s + _POLL_S)

    def run(self) -> int:
        """Place the hosts, follow them to the end, and return the exit code of the job."""
        if not (self._place() and self._find_addresses()):
            return self._of_stop(next(iter(self._codes.values()), 128 + signal.SIGTERM))
        cluster = {
            "instance_groups": [
                group_document(group.stated.name, group.stated.instance_type, self._present(group))
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
                bundles.append(bundle_of(group))
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
                    f"  needed: {len(bundles)} different nodes, with "
                    f"{', '.join(group.stated.text for group in self._groups)}\n"
                    f"  found: {nodes_of(self._ray)}"
                )
            if now_s - shown_s > _PATIENCE_S:
                shown_s = now_s
                say(f"waiting for Ray to place {len(bundles)} hosts on different nodes; found: {nodes_of(self._ray)}")
        self._bundles = {name: number for number, name in enumerate(names)}
        for name in names:
            self._hosts[name] = self._actor(name)
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
                    self._placed_s[name] = time.monotonic()
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

    def _actor(self, name: str) -> Any:
        resources = bundle_of(self._group_of[name])
        options: dict[str, Any] = {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "max_concurrency": 8,
            "runtime_env": {"env_vars": ACTOR_VARIABLES},
        }
        if name in self._bundles:
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=self._bundles[name]
            )
        return self._actors.options(**options).remote()

    def _start(self, name: str, order: JobHostOrder) -> None:
        self._started.add(name)
        self._hosts[name].guard.remote()
        self._waiting[self._hosts[name].run.remote(order)] = functools.partial(self._record_end, name)

    def _order(self, name: str, where: Sequence[str], cluster: object) -> JobHostOrder:
        options = self._options
        group = self._group_of[name].stated
        gpus = resources_of(group).gpus
        # A data host that leaves ends with 143, whatever the option says. It is for the exit code of this command.
        stated = dataclasses.replace(options, port=self._port, sigterm_ok=False, ray_groups=(), platform=None)
        if gpus and options.nproc_per_node is None:
            stated = dataclasses.replace(stated, nproc_per_node=gpus)
        arguments = ["launch", *to_flags(stated), *where, f"--host={name}", "--output-dir={folder}/output"]
        return {
            "name": name,
            "arguments": arguments,
            "script": [*script_words(options.script, is_module=options.module), "--", *options.script_args],
            "cluster": cluster,
            "hosts": self._addresses,
            "token": self._token.reveal(),
            "variables": {"HETERO_JOB_ID": self._id},
        }

    def _follow(self) -> int:
        """Wait for the launchers of the trainers, and let the number of data hosts follow the demand."""
        self._trainers = [name for name in self._hosts if self._role(name) is Role.TRAINER]
        self._ask_for_demand(0)
        stop_at_s: float | None = None
        while not all(name in self._codes for name in self._trainers):
            ready, _ = self._ray.wait(list(self._waiting), timeout=_POLL_S / 4)
            for reference in ready:
                self._waiting.pop(reference)(reference)
            if self._num_signals and stop_at_s is None:
                stop_at_s = time.monotonic() + _STOP_S
                self._tell_all_to_stop()
            if stop_at_s is not None and (time.monotonic() > stop_at_s or self._num_signals > 1):
                why = "a second signal" if self._num_signals > 1 else "the launchers did not end in time"
                say(f"{why}: ending the launchers")
                return int(ExitCode.SHUTDOWN_OVERRAN)
            self._replace_lost()
        self._bring_home()
        return self._of_stop(self._exit_code())

    def _of_stop(self, code: int) -> int:
        """Return the exit code of the command. With ``--sigterm-ok``, a job that was asked to stop has succeeded."""
        return 0 if self._options.sigterm_ok and code == 128 + signal.SIGTERM else code

    @property
    def _is_ending(self) -> bool:
        """Whether the job ends. Its data hosts end with 0."""
        ended = any(code == 0 or name in self._trainers for name, code in self._codes.items())
        return bool(ended or self._num_signals)

    def _record_end(self, name: str, reference: Any) -> None:
        try:
            code = self._ray.get(reference, timeout=_PATIENCE_S)
        except self._ray.exceptions.RayError as error:
            self._record_loss(name, error)
        else:
            say(f"the launcher of {name} ended with {code}")
            self._codes[name] = code if code >= 0 else 128 - code
            if code < 0:
                self._silent.add(name)
        if self._role(name) is Role.DATA:
            self._retire(name)

    def _record_loss(self, name: str, error: Exception) -> None:
        self._silent.add(name)
        self._codes[name] = int(exit_code_of(error))
        if name not in self._leaving:
            say(f"host {name} was lost: {summary(error)}")

    def _retire(self, name: str) -> None:
        """Give back the resources of a data host that has ended. Note whether it is to be replaced."""
        group = self._group_of[name]
        if name in self._bundles:
            self._free_bundles[group.stated.name].append(self._bundles.pop(name))
        self._waiting[self._hosts[name].close.remote(0.0)] = functools.partial(self._forget, name)
        if self._is_ending or name in self._leaving:
            return
        lived_s = time.monotonic() - self._placed_s.get(name, time.monotonic())
        self._num_short_lives = 0 if lived_s >= _SHORT_LIFE_S else self._num_short_lives + 1
        if self._num_short_lives >= _MAX_FAILURES:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            say(
                f"{self._num_short_lives} data hosts in a row have ended shortly after their start; no data host is "
                f"added for {_PAUSE_S:.0f} s"
            )
        if name in self._silent or self._codes[name] in _TAKEN:
            self._lost.append(group)

    def _replace_lost(self) -> None:
        """Ask Ray for data hosts in place of those that were lost."""
        while self._lost and self._may_add:
            group = self._lost.pop(0)
            if len(self._present(group)) < group.stated.count and not self._is_ending:
                self._add(group, "in place of one that was lost")

    @property
    def _may_add(self) -> bool:
        return time.monotonic() >= self._paused_until_s

    def _forget(self, name: str, _: Any) -> None:
        self._ray.kill(self._hosts.pop(name))

    def _exit_code(self) -> int:
        """Return the code of the first trainer host that failed. All launchers report the cause of the job's end.

        The loss of a host or of a launcher is the code only if no launcher has reported one.
        """
        reported = [self._codes[name] for name in self._trainers if name not in self._silent]
        return next(filter(None, reported), 0) if reported else self._codes[self._trainers[0]]

    def _tell_all_to_stop(self) -> None:
        say("asked to stop: asking every launcher to stop")
        for name in self._started - self._codes.keys():
            self._hosts[name].stop.remote()

    def _ask_for_demand(self, after: int) -> None:
        if self._elastic is not None:
            reference = self._hosts[self._trainers[0]].demand.remote(after)
            self._waiting[reference] = functools.partial(self._follow_demand, self._elastic)

    def _follow_demand(self, group: ElasticGroup, reference: Any) -> None:
        """Add data hosts, or let one leave, after an estimate. Ask for the next estimate."""
        try:
            demand: Demand = self._ray.get(reference, timeout=_PATIENCE_S)
        except self._ray.exceptions.RayError:
            return  # the end of the host is recorded elsewhere
        if self._is_ending:
            return
        present = self._present(group)
        # The estimate is for all data hosts of the job.
        others = sum(len(self._present(other)) for other in self._groups if other is not group and self._is_data(other))
        low, high = (max(0, end - others) for end in (demand.low, demand.high))
        target = self._scaler.target(low=low, high=high, present=len(present))
        if target < len(present):
            # Ray keeps the CPUs of a bundle reserved, also without a host.
            name = next((name for name in reversed(present) if name not in self._bundles), present[-1])
            say(f"the job wants at most {demand.high} data hosts; {name} leaves")
            self._let_leave(name)
        if self._may_add:
            for _ in range(target - len(present)):
                self._add(group, "because the job could use it")
        self._ask_for_demand(demand.number)

    def _let_leave(self, name: str) -> None:
        self._leaving.add(name)
        if name in self._placed_s:
            self._hosts[name].stop.remote()
        else:
            self._ray.kill(self._hosts[name])

    def _add(self, group: ElasticGroup, why: str) -> None:
        """Ask Ray for another data host, in a free bundle if there is one, or else anywhere."""
        name = f"{group.stated.name}-{sum(own is group for own in self._group_of.values())}"
        say(f"asking Ray for {name}, {why}")
        self._group_of[name] = group
        if self._free_bundles[group.stated.name]:
            self._bundles[name] = self._free_bundles[group.stated.name].pop(0)
        self._hosts[name] = actor = self._actor(name)
        self._waiting[actor.address.remote()] = functools.partial(self._record_placed, name)
        address = f"{self._trainers[0]}:{self._port}"
        where = [f"--join={address}", f"--join-group={group.stated.name}", "--port={port}"]
        self._start(name, self._order(name, where, {}))

    def _record_placed(self, name: str, reference: Any) -> None:
        try:
            self._ray.get(reference, timeout=_PATIENCE_S)
        except self._ray.exceptions.RayError:
            return  # its loss is recorded with its end
        self._placed_s[name] = time.monotonic()

    def _bring_home(self) -> None:
        """Bring the results of the first trainer and the ledgers of all trainers to the output folder."""
        folder = self._options.output_dir or Path("runs") / self._id
        written: list[str] = []
        for name in self._trainers:
            patterns = RESULTS if name == self._trainers[0] else LEDGERS
            if name in self._silent:
                say(f"{name} was lost, and with it its {'report' if patterns is RESULTS else 'ledger'}")
                continue
            try:
                found: Results = self._ray.get(self._hosts[name].results.remote(patterns), timeout=_STOP_S)
                written += _write(found.files, folder)
            except (OSError, self._ray.exceptions.RayError) as error:
                say(f"the results of {name} could not be brought to {folder}: {error}")
            else:
                for path in found.too_large:
                    say(f"{path} of {name} is too large to be brought to {folder}, and is removed with the job")
        shown = next((name for name in ("report.md", "profile.md") if name in written), None)
        if shown is not None:
            say(f"report: {folder / shown}")

    def _is_data(self, group: ElasticGroup) -> bool:
        return self._roles[group.stated.name] is Role.DATA

    def _role(self, name: str) -> Role:
        return self._roles[self._group_of[name].stated.name]

    def _present(self, group: ElasticGroup) -> list[str]:
        """Return the hosts of a group that have not ended and were not asked to leave."""
        names = [name for name, own in self._group_of.items() if own is group]
        return [name for name in names if name not in self._codes and name not in self._leaving]

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._num_signals += 1


def _write(files: Mapping[str, bytes], folder: Path) -> list[str]:
    """Write files into a folder. Return their names."""
    if files:
        folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return list(files)
