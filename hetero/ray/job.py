"""``hetero launch --platform ray``: a job on a Ray cluster, from a driver anywhere.

The driver asks Ray for a placement group with one bundle of resources per host, and starts a launcher in each bundle.
Ray chooses the node of each bundle. With an autoscaler, Ray also adds nodes. Everything else is as on any cluster: the
launchers exchange heartbeats, and batches go over hetero's own connections.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.cluster import Role
from hetero.cluster.groups import group_document
from hetero.cluster.rendering.request import resources_of
from hetero.cluster.roles import assign_roles
from hetero.config import LaunchOptions, to_flags
from hetero.control.security import Token
from hetero.errors import CapacityError, ConfigError, ExitCode
from hetero.ray.connection import connected, exit_code_of, import_ray, say, summary, wait_placed
from hetero.ray.groups import ElasticGroup, bundle_of, check_groups, parse_group
from hetero.ray.head import CHECK_S
from hetero.ray.job_host import ACTOR_VARIABLES, LEDGERS, RESULTS, Demand, JobHost, JobHostOrder, Results
from hetero.ray.scaling import Bounds, Scaler
from hetero.system.scripts import script_words
from hetero.system.waits import CALL_TIMEOUT_S, POLL_S

__all__ = ["Job", "run"]

_STOP_S = 90.0
"""Longest time from a request to stop until the driver gives up the launchers."""
_END_S = 10.0
"""Longest time from the end of the trainers' launchers until the driver ends the other launchers."""
_SHORT_LIFE_S = 60.0
"""A data host that ends earlier has failed. A data host that ends later was lost, as spot hosts are."""
_MAX_FAILURES = 3
"""After so many short lives in a row, no data host is added for `_PAUSE_S`."""
_PAUSE_S = 300.0
_LOST_CODES = (128 + signal.SIGTERM, ExitCode.ORPHANED)
"""Exit codes of launchers of data hosts that ended because of their node or its network."""
_PORTS = range(20_000, 30_000)
"""A job on Ray takes one of these ports, because another job may have a launcher on the same node. Ray's own processes
and the kernel use other ports by default."""


def run(options: LaunchOptions) -> int:
    """Run the job and return its exit code.

    Raises:
        ConfigError: If Ray is not installed, or the groups are malformed.
        CapacityError: If the Ray cluster cannot place the job within the start timeout.
        ClusterError: If the Ray cluster is missing.
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
    trainer_groups = [group for group, role in zip(groups, roles, strict=True) if role is Role.TRAINER]
    if any(group.max_hosts > group.stated.count for group in trainer_groups):
        raise ConfigError("--group: only a data group can have MIN..MAX hosts, because the number of ranks is fixed")
    # By default, Ray drops a log line of a host if another host has logged the same line with other numbers.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    ray = import_ray()
    with connected(ray) as head:
        with Job(ray, options, groups, roles) as job:
            # From now on, a loss of the head does not change the exit code.
            head.exit_code = job.run()
        return head.exit_code


@dataclass(slots=True, eq=False)
class _Host:
    """A host that the job has or had."""

    name: str
    group: ElasticGroup
    role: Role
    actor: Any = None
    """Ray's handle of the actor, a `JobHost`. None before the actor is made, and after a data host has ended."""
    bundle: int | None = None
    """Bundle of the placement group that the host uses. None for a host that was added when no bundle was free."""
    address: str = ""
    """Address of its node. Empty for a host that was added, which states its address when it joins."""
    placed_s: float | None = None
    """Time when the actor had been placed, in monotonic seconds. None before."""
    is_started: bool = False
    """Whether its launcher was asked to start."""
    exit_code: int | None = None
    """None until the host has ended or was lost."""
    could_not_report: bool = False
    """Whether the host could not report why it ended, because it was lost or a signal killed its launcher."""
    is_leaving: bool = False
    """Whether a data host was asked to leave, because the job needs fewer."""
    is_to_be_replaced: bool = False
    """Whether a data host was lost, and another host has not been asked for in its place yet."""

    @property
    def is_present(self) -> bool:
        """Whether the host has not ended and was not asked to leave."""
        return self.exit_code is None and not self.is_leaving


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
        # Take a random port, because another job may have a launcher with the default port on the same node.
        has_default_port = options.port == LaunchOptions(script=options.script).port
        self._port = secrets.choice(_PORTS) if has_default_port else options.port
        self._groups = groups
        self._roles = dict(zip((group.stated.name for group in groups), roles, strict=True))
        self._token = Token.generate()
        self._id = f"ray-{secrets.token_hex(4)}"
        self._hosts: list[_Host] = []
        """All hosts that the job ever had."""
        self._bundles: dict[str, list[int]] = {}
        """Bundles of the placement group, by name of their instance group."""
        self._pending: dict[Any, Callable[[Any], None]] = {}
        """The function to call with each pending answer of an actor, by Ray's reference to the answer."""
        self._num_short_lives = 0
        """Number of data hosts in a row that have ended shortly after their start."""
        self._paused_until_s = 0.0
        """Time until which no data host is added, in monotonic seconds."""
        self._elastic = next((group for group in groups if group.max_hosts > group.stated.count), None)
        """The group whose number of hosts may change, or None."""
        if self._elastic is not None:
            self._scaler = Scaler(Bounds(min_hosts=self._elastic.stated.count, max_hosts=self._elastic.max_hosts))
        self._placement: Any = None
        self._num_signals = 0

    def __enter__(self) -> Job:
        # `signal.signal` returns the earlier handler, which `__exit__` restores.
        self._handlers = {each: signal.signal(each, self._on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        """Give running launchers some time to end. Then end their actors, and give the resources back to Ray."""
        # At its end the stack calls these functions, the last one first, even if another one fails.
        with contextlib.ExitStack() as stack:
            for number, handler in self._handlers.items():
                stack.callback(signal.signal, number, handler)
            if self._placement is not None:
                stack.callback(self._ray.util.remove_placement_group, self._placement)
            living = [host for host in self._hosts if host.actor is not None]
            for host in living:
                stack.callback(self._ray.kill, host.actor)
            grace_s = 0.0 if self._num_signals > 1 else _END_S
            # A host that Ray has not placed, or that was lost, would not answer.
            closed = [
                host.actor.close.remote(grace_s)
                for host in living
                if host.is_started and host.placed_s is not None and not host.could_not_report
            ]
            if closed:
                self._ray.wait(closed, num_returns=len(closed), timeout=grace_s + CHECK_S)

    def run(self) -> int:
        """Place the hosts, follow them to the end, and return the exit code of the job."""
        # If a host was lost before all hosts were there, end with the code of this loss. If the job was asked to stop,
        # end with the code of a process that SIGTERM has ended.
        if not (self._place() and self._find_addresses()):
            codes = (host.exit_code for host in self._hosts if host.exit_code is not None)
            return self._code_of_command(next(codes, 128 + signal.SIGTERM))
        cluster = {
            "instance_groups": [
                group_document(
                    group.stated.name, group.stated.instance_type, [host.name for host in self._present(group)]
                )
                for group in self._groups
            ]
        }
        # The actor of each host puts the folder of its files in place of ``{folder}``.
        for host in self._hosts:
            self._start(host, self._order(host, ["--cluster-file", "{folder}/cluster.json"], cluster))
        return self._follow()

    def _place(self) -> bool:
        """Wait until Ray has placed all hosts. Return False if the job was asked to stop."""
        bundles: list[dict[str, float]] = []
        for group in self._groups:
            count = group.stated.count
            self._bundles[group.stated.name] = list(range(len(bundles), len(bundles) + count))
            bundles += [bundle_of(group)] * count
        # One launcher per node, because all launchers that start with the job listen on the same port, `_port`.
        self._placement = self._ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        needed = f"{len(bundles)} different nodes, with {', '.join(group.stated.text for group in self._groups)}"
        timeout_s = self._options.start_timeout_s
        is_placed = wait_placed(
            self._ray, self._placement, needed, timeout_s=timeout_s, must_stop=lambda: self._num_signals > 0
        )
        if not is_placed:
            return False
        for group in self._groups:
            for _ in range(group.stated.count):
                self._make_host(group)
        return True

    def _find_addresses(self) -> bool:
        """Wait until all actors run, and record their addresses. Return False after a loss or a request to stop."""
        # An actor answers this call when Ray has started it on its node.
        pending = {host.actor.address.remote(): host for host in self._hosts}
        deadline_s = time.monotonic() + self._options.start_timeout_s
        while pending:
            ready, _ = self._ray.wait(list(pending), timeout=CHECK_S)
            for reference in ready:
                host = pending.pop(reference)
                try:
                    host.address = self._ray.get(reference, timeout=CALL_TIMEOUT_S)
                    host.placed_s = time.monotonic()
                except self._ray.exceptions.RayError as error:
                    self._record_loss(host, error)
                    return False
            if self._num_signals:
                return False
            if time.monotonic() > deadline_s:
                raise CapacityError(
                    f"Ray has not started the job within {self._options.start_timeout_s:.0f} s\n"
                    f"  found: no answer from {', '.join(host.name for host in pending.values())}\n"
                    "  to do: see `ray status`, and the logs of Ray on these nodes"
                )
        return True

    def _make_host(self, group: ElasticGroup) -> _Host:
        """Ask Ray for a host, in a free bundle of its group if there is one, or else anywhere."""
        number = sum(host.group is group for host in self._hosts)
        host = _Host(f"{group.stated.name}-{number}", group, self._roles[group.stated.name])
        used_bundles = {other.bundle for other in self._hosts}
        free_bundles = (bundle for bundle in self._bundles[group.stated.name] if bundle not in used_bundles)
        host.bundle = next(free_bundles, None)
        self._hosts.append(host)
        resources = bundle_of(group)
        options: dict[str, Any] = {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            # Several methods run at the same time, because `run` lasts as long as the launcher, and `demand` waits too.
            "max_concurrency": 8,
            "runtime_env": {"env_vars": ACTOR_VARIABLES},
        }
        if host.bundle is not None:
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=host.bundle
            )
        host.actor = self._actors.options(**options).remote()
        return host

    def _start(self, host: _Host, order: JobHostOrder) -> None:
        host.is_started = True
        host.actor.guard.remote()
        self._pending[host.actor.run.remote(order)] = functools.partial(self._record_end, host)

    def _order(self, host: _Host, where: Sequence[str], cluster: object) -> JobHostOrder:
        """Return what an actor needs to run its launcher.

        The arguments may contain the texts ``{folder}`` and ``{port}``. Only the actor knows the folder of its files
        and a free port of its node, and puts them in place of these texts.

        Args:
            host: The host of the actor.
            where: Arguments that say how the launcher finds the other hosts.
            cluster: Description of the cluster for the file ``cluster.json``. Empty for a host that joins.
        """
        options = self._options
        gpus = resources_of(host.group.stated).gpus
        # Launchers do not get ``--sigterm-ok``, which is for the exit code of this command. With it, a data host that
        # leaves would end with 0, and `_is_ending` would take this for the end of the job.
        stated = dataclasses.replace(options, port=self._port, sigterm_ok=False, ray_groups=(), platform=None)
        if gpus and options.nproc_per_node is None:
            stated = dataclasses.replace(stated, nproc_per_node=gpus)
        arguments = ["launch", *to_flags(stated), *where, f"--host={host.name}", "--output-dir={folder}/output"]
        return {
            "name": host.name,
            "arguments": arguments,
            "script": [*script_words(options.script, is_module=options.module), "--", *options.script_args],
            "cluster": cluster,
            "hosts": {each.name: each.address for each in self._hosts if each.address},
            "token": self._token.reveal(),
            "variables": {"HETERO_JOB_ID": self._id},
        }

    def _follow(self) -> int:
        """Wait for the launchers of the trainers, and let the number of data hosts follow the demand."""
        self._ask_for_demand(after=0)
        give_up_at_s: float | None = None
        while any(host.exit_code is None for host in self._trainers):
            # This call waits for any answer: the end of a host, the next estimate, or the place of an added host.
            ready, _ = self._ray.wait(list(self._pending), timeout=POLL_S)
            for reference in ready:
                self._pending.pop(reference)(reference)
            if self._num_signals and give_up_at_s is None:
                give_up_at_s = time.monotonic() + _STOP_S
                say("asked to stop: asking every launcher to stop")
                for host in self._hosts:
                    if host.is_started and host.exit_code is None:
                        host.actor.stop.remote()
            if give_up_at_s is not None and (time.monotonic() > give_up_at_s or self._num_signals > 1):
                why = "a second signal" if self._num_signals > 1 else "the launchers did not end in time"
                say(f"{why}: ending the launchers")
                return int(ExitCode.SHUTDOWN_OVERRAN)
            self._replace_lost()
        self._fetch_results()
        return self._code_of_command(self._exit_code())

    def _code_of_command(self, code: int) -> int:
        """Return the exit code of the command. With ``--sigterm-ok``, a job that was asked to stop has succeeded."""
        return 0 if self._options.sigterm_ok and code == 128 + signal.SIGTERM else code

    @property
    def _is_ending(self) -> bool:
        """Whether the job ends: a trainer host has ended, a host has ended with 0, or the job was asked to stop."""
        has_trainer_ended = any(host.exit_code is not None for host in self._trainers)
        return bool(has_trainer_ended or any(host.exit_code == 0 for host in self._hosts) or self._num_signals)

    def _record_end(self, host: _Host, reference: Any) -> None:
        """Record how a launcher ended, or that its host was lost. Give back the resources of a data host."""
        try:
            code = self._ray.get(reference, timeout=CALL_TIMEOUT_S)
        except self._ray.exceptions.RayError as error:
            self._record_loss(host, error)
        else:
            say(f"the launcher of {host.name} ended with {code}")
            # A code below 0 is minus the number of the signal that killed the launcher. Shells show 128 plus it.
            host.exit_code = code if code >= 0 else 128 - code
            host.could_not_report = code < 0
        if host.role is Role.DATA:
            self._retire(host)

    def _record_loss(self, host: _Host, error: Exception) -> None:
        """Record that a host was lost, with the exit code for the error of its actor."""
        host.could_not_report = True
        host.exit_code = int(exit_code_of(error))
        if not host.is_leaving:
            say(f"host {host.name} was lost: {summary(error)}")

    def _retire(self, host: _Host) -> None:
        """Give back the resources of a data host that has ended. Record whether to replace it.

        A data host is replaced if its node or its network was lost. A data host whose launcher failed would fail again.
        """
        # Free the bundle at once, because a host that replaces this one uses it again.
        host.bundle = None
        # The launcher has ended or was lost, so `close` need not wait for it.
        self._pending[host.actor.close.remote(0.0)] = functools.partial(self._forget, host)
        if self._is_ending or host.is_leaving:
            return
        lived_s = 0.0 if host.placed_s is None else time.monotonic() - host.placed_s
        self._num_short_lives = 0 if lived_s >= _SHORT_LIFE_S else self._num_short_lives + 1
        if self._num_short_lives >= _MAX_FAILURES:
            self._paused_until_s = time.monotonic() + _PAUSE_S
            say(
                f"{self._num_short_lives} data hosts in a row have ended shortly after their start; no data host is "
                f"added for {_PAUSE_S:.0f} s"
            )
        host.is_to_be_replaced = host.could_not_report or host.exit_code in _LOST_CODES

    def _replace_lost(self) -> None:
        """Ask Ray for data hosts in place of data hosts that were lost."""
        for host in [host for host in self._hosts if host.is_to_be_replaced]:
            if not self._may_add:
                return
            host.is_to_be_replaced = False
            if len(self._present(host.group)) < host.group.stated.count and not self._is_ending:
                self._add(host.group, "in place of one that was lost")

    @property
    def _may_add(self) -> bool:
        """Whether data hosts may be added. Not for a while after several have ended shortly after their start."""
        return time.monotonic() >= self._paused_until_s

    def _forget(self, host: _Host, _: Any) -> None:
        """End the actor of a host whose files have been removed."""
        self._ray.kill(host.actor)
        host.actor = None

    def _exit_code(self) -> int:
        """Return the code of the first trainer host that failed, or 0.

        All launchers of a job end with the code of the root cause. A host that was lost lacks this code, so the code
        of its loss counts only if all trainer hosts were lost.
        """
        reported = [host.exit_code for host in self._trainers if not host.could_not_report]
        if not reported:
            return self._trainers[0].exit_code or 0
        return next((code for code in reported if code), 0)

    def _ask_for_demand(self, after: int) -> None:
        if self._elastic is not None:
            reference = self._trainers[0].actor.demand.remote(after)
            self._pending[reference] = functools.partial(self._follow_demand, self._elastic)

    def _follow_demand(self, group: ElasticGroup, reference: Any) -> None:
        """Add data hosts, or let one leave, after an estimate. Ask for the next estimate."""
        try:
            demand: Demand = self._ray.get(reference, timeout=CALL_TIMEOUT_S)
        except self._ray.exceptions.RayError:
            # `_record_end` records how this trainer host ended.
            return
        if self._is_ending:
            return
        present = self._present(group)
        # The estimate is for all data hosts of the job, so subtract the hosts of other data groups.
        others = sum(host.is_present and host.role is Role.DATA and host.group is not group for host in self._hosts)
        low, high = (max(0, end - others) for end in (demand.low, demand.high))
        target = self._scaler.target(low=low, high=high, present=len(present))
        if target < len(present):
            # Prefer a host without a bundle, because Ray keeps the CPUs of a bundle reserved even without a host.
            host = next((host for host in reversed(present) if host.bundle is None), present[-1])
            say(f"the job wants at most {demand.high} data hosts; {host.name} leaves")
            self._let_leave(host)
        if self._may_add:
            for _ in range(target - len(present)):
                self._add(group, "because the job could use it")
        # Ask only for newer estimates. Without this, one estimate was followed 15 times, and removed host after host.
        self._ask_for_demand(demand.number)

    def _let_leave(self, host: _Host) -> None:
        """Let a data host leave the job, because the job needs fewer."""
        host.is_leaving = True
        if host.placed_s is not None:
            host.actor.stop.remote()
        else:
            # Ray has not placed the host, so its actor would not answer.
            self._ray.kill(host.actor)

    def _add(self, group: ElasticGroup, why: str) -> None:
        """Ask Ray for another data host, and start its launcher, which joins the job."""
        host = self._make_host(group)
        say(f"asking Ray for {host.name}, {why}")
        self._pending[host.actor.address.remote()] = functools.partial(self._record_placed, host)
        # The actor of the host puts a free port of its node in place of the text {port}. See `_order`.
        where = [f"--join={self._trainers[0].name}:{self._port}", f"--join-group={group.stated.name}", "--port={port}"]
        self._start(host, self._order(host, where, cluster={}))

    def _record_placed(self, host: _Host, reference: Any) -> None:
        """Record when Ray has placed a data host that was added."""
        try:
            self._ray.get(reference, timeout=CALL_TIMEOUT_S)
        except self._ray.exceptions.RayError:
            # `_record_end` records the loss of the host.
            return
        host.placed_s = time.monotonic()

    def _fetch_results(self) -> None:
        """Write the results of the first trainer host and the ledgers of all trainer hosts to the output folder."""
        folder = self._options.output_dir or Path("runs") / self._id
        written: list[str] = []
        for host in self._trainers:
            patterns = RESULTS if host is self._trainers[0] else LEDGERS
            if host.could_not_report:
                say(f"{host.name} was lost, and with it its {'report' if patterns is RESULTS else 'ledger'}")
                continue
            try:
                found: Results = self._ray.get(host.actor.results.remote(patterns), timeout=_STOP_S)
                for name, content in found.files.items():
                    folder.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(content)
                    written.append(name)
            except (OSError, self._ray.exceptions.RayError) as error:
                say(f"the results of {host.name} could not be brought to {folder}: {error}")
            else:
                for path in found.too_large:
                    say(f"{path} of {host.name} is too large to be brought to {folder}, and is removed with the job")
        # A profile run has no report.
        report_name = next((name for name in ("report.md", "profile.md") if name in written), None)
        if report_name is not None:
            say(f"report: {folder / report_name}")

    @property
    def _trainers(self) -> list[_Host]:
        return [host for host in self._hosts if host.role is Role.TRAINER]

    def _present(self, group: ElasticGroup) -> list[_Host]:
        return [host for host in self._hosts if host.group is group and host.is_present]

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._num_signals += 1
