"""The launcher's resources on one host of a job: control plane, endpoints, output, signals and shutdown."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from hetero.cache.folders import sweep_memory
from hetero.cluster import ClusterSpec, Platform
from hetero.config import LaunchOptions, Timings, framework_of
from hetero.control import security
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.membership import Membership
from hetero.control.rank.variables import HOST_VARIABLE, TLS_VARIABLE
from hetero.control.status import Cause, HostState
from hetero.errors import ExitCode, HeteroError, first_line
from hetero.launch import placement
from hetero.launch.addresses import Addresses
from hetero.launch.auto_endpoints.trainer_endpoints import TrainerEndpoints
from hetero.launch.control_plane import make_hub
from hetero.launch.data_services import HostFacts, find_service
from hetero.launch.job_token import job_token
from hetero.launch.ranks.frameworks import RANK_FRAMEWORKS
from hetero.launch.ranks.starter import RankStarter
from hetero.launch.reporting.summary import JobHistory, output_folder, write_metrics, write_report
from hetero.launch.reporting.timeline import Timeline
from hetero.launch.watchdog import Watchdog
from hetero.metrics.hosts import HostSampler
from hetero.metrics.reading import shard_waits_s, slowest_shards
from hetero.pool.pool import EndpointPool
from hetero.report.model import JoinedFacts
from hetero.system import logs
from hetero.system.line_relay import LineRelay
from hetero.system.process import adopt_descendants, allow_descriptors, end_descendants, reap_adopted
from hetero.system.stop_signals import SHIELD_VARIABLE
from hetero.system.waits import END_TIMEOUT_S, WaitLog
from hetero.system.workdir import private_folder
from hetero.wire.channels import without_proxy
from hetero.wire.tls import Tls

__all__ = ["WORK_DIR_VARIABLE", "JobEndsError", "LaunchedHost", "RestartError", "StoppedEarlyError", "cause_of"]

logger = logging.getLogger(__name__)

WORK_DIR_VARIABLE = "HETERO_WORK_DIR"
"""Environment variable with the parent of the launcher's private folder. `hetero simulate` removes this parent even if
the launcher is killed."""

_TICK_S = 0.2
_SHORT_S = 86_400.0
"""If a certificate expires within this number of seconds, a warning is logged."""


class JobEndsError(Exception):
    """The root cause of the job's failure is known. The exception interrupts the work of this host."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause)
        self.cause = cause


class RestartError(Exception):
    """The trainer group restarts. The exception interrupts this host's work with its current ranks, which end now."""


class StoppedEarlyError(Exception):
    """This host was asked to stop before it had joined the job."""


class LaunchedHost:
    """The resources of a host of either role, as a context manager that releases all of them.

    Use it on the main thread, because signals arrive there, and because a child process with a parent-death signal
    ends when the thread that started it ends.

    Args:
        options: Resolved options.
        cluster: The cluster, which contains this host.
        platform: The platform that runs the job.
        environ: Environment of this process.
        starter: Starts the ranks of this host, if it is a trainer host.

    Raises:
        AuthenticationError: If the token or certificate is unreadable or invalid, or if a required token is missing.
        ConfigError: If the folder for temporary files cannot keep files private to this user.
        PortError: If the control port cannot be bound.
        ClusterError: If the name of this host is not resolved within the start timeout.
        ResourcesError: If this process is not allowed to open enough files.
        StoppedEarlyError: If this host was asked to stop while it was waiting.
    """

    def __init__(
        self,
        options: LaunchOptions,
        cluster: ClusterSpec,
        *,
        platform: Platform,
        environ: Mapping[str, str],
        starter: RankStarter,
    ) -> None:
        num_gpus = placement.count_gpus(platform)
        placed = placement.plan(options, cluster, num_gpus=num_gpus, num_given=starter.num_existing_ranks)
        self.plan = placement.HostPlan(
            options=options,
            cluster=cluster,
            platform=platform,
            placement=placed,
            timings=Timings.from_options(options, environ, kill_after_s=platform.kill_after_s),
            job_id=platform.job_id(cluster),
        )
        self.starter = starter
        # With a fixed hash seed, a set of texts has the same order in all endpoints, so all of them compute the same
        # batch. With `SHIELD_VARIABLE`, child processes ignore the platform's SIGTERM. Only this launcher acts on the
        # signal.
        self.child_environment = {"HETERO_JOB_ID": self.plan.job_id, "PYTHONHASHSEED": "0", SHIELD_VARIABLE: "1"}
        # The ranks connect to each other directly, and gRPC would use a proxy that the environment names.
        if RANK_FRAMEWORKS[framework_of(options)].uses_grpc:
            self.child_environment |= without_proxy(environ)
        self.interrupted_s: float | None = None
        """Time of the request to stop this host, in monotonic seconds. None before such a request."""
        # A host that starts without endpoints need not wait for them.
        self.endpoints_were_ready = placed.servers.num_at_start == 0
        """Whether all endpoints that this host starts at first have served at the same time at least once."""
        self.generation = 0
        """Number of restarts of the trainer group that this host has handled."""
        self._timeline = Timeline()
        self._num_signals = 0
        """Number of signals that have asked this host to stop."""
        # A host that joins may listen at another port than the launchers of the job.
        job_port = options.port if options.join is None else int(options.join.rpartition(":")[2])
        self.addresses = Addresses(job_port, self.plan.timings, self._check_stop)
        if platform.own_address:
            self.addresses.set(self.plan.name, platform.own_address)
        self._wait_log = WaitLog(self.plan.timings.patience_s)
        # If `_set_up` raises, this context releases what `_set_up` has acquired.
        with contextlib.ExitStack() as stack:
            self._set_up(stack, environ)
            self._stack = stack.pop_all()

    def _set_up(self, stack: contextlib.ExitStack, environ: Mapping[str, str]) -> None:
        """Acquire the resources of this host in order. Register on ``stack`` how each one is released at the end."""
        # `signal.signal` returns the previous handler, which the stack restores at the end.
        for number in (*self.plan.platform.stop_signals, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
        allow_descriptors(placement.needed_descriptors(len(self.plan.cluster.hosts)))
        self.run_dir = stack.enter_context(private_folder("hetero-launch-", parent=environ.get(WORK_DIR_VARIABLE)))
        self.relay = LineRelay(logs.relay_line)
        stack.callback(self.relay.close)
        token = job_token(environ, Path.cwd(), is_required=self.plan.options.require_token)
        token_path = None
        if token is not None:
            descriptor, token_path = security.token_memfd(token)
            stack.callback(os.close, descriptor)
            self.child_environment[security.TOKEN_FILE_VARIABLE] = token_path
        tls = self._load_tls()
        self.address = self.addresses.of(self.plan.name)
        hub = make_hub(self.plan, address=self.address, resolve=self.addresses.launcher_of, token=token, tls=tls)
        self.hub = stack.enter_context(hub)
        self.watchdog = stack.enter_context(Watchdog(self.plan.timings.lease_s, status=self._status_if_stuck))
        # The stack calls the callback that was registered last first. So `sweep_memory` runs after `end_descendants`,
        # which ends the processes that use the memory.
        stack.callback(sweep_memory)
        # At the end, kill the processes that the script has left behind. The launcher has stopped its own children by
        # then. The watchdog still runs, because this process may block while it inspects a stuck process.
        adopt_descendants()
        stack.callback(end_descendants, on_poll=self.watchdog.tick)
        self._sampler = stack.enter_context(
            HostSampler(
                self.plan.name,
                scope=self.plan.placement.usage_scope,
                # The processes of mpirun's ranks are not below this process, so their CPU time is not known.
                starts_all=not self.plan.placement.are_ranks_given,
                interval_s=self.plan.options.usage_interval_s,
            )
        )
        self.pool = self._make_pool(token_path) if self.plan.placement.servers.number else None
        self.trainer_endpoints = self._make_trainer_endpoints()

    def __enter__(self) -> LaunchedHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _load_tls(self) -> Tls | None:
        """Return this host's TLS settings. None without TLS. Log a warning if the certificate expires soon."""
        if self.plan.options.tls_dir is None:
            return None
        tls = Tls(self.plan.options.tls_dir, self.plan.name)
        self.child_environment |= {TLS_VARIABLE: str(tls.directory), HOST_VARIABLE: self.plan.name}
        remaining_s = tls.expires_epoch_s - time.time()
        if remaining_s < _SHORT_S:
            logger.warning("the certificate expires in %.1f h, and later connections will fail", remaining_s / 3600)
        return tls

    def _make_pool(self, token_path: str | None) -> EndpointPool:
        """Return the pool of the servers that the data service of this job runs on this host."""
        facts = HostFacts(
            options=self.plan.options,
            servers=self.plan.placement.servers,
            name=self.plan.name,
            address=self.address,
            address_of=self.addresses.known,
            is_trainer=self.plan.placement.num_ranks > 0,
            token_path=token_path,
            job_id=self.plan.job_id,
            environment=self.child_environment,
            timings=self.plan.timings,
        )
        service = find_service(self.plan.options.data_service)
        return service.make_pool(facts, on_change=self._on_endpoints, on_line=self.relay.line)

    def _make_trainer_endpoints(self) -> TrainerEndpoints | None:
        """Return what changes the number of endpoints on this trainer host. None if the number is fixed."""
        servers = self.plan.placement.servers
        if self.pool is None or not servers.may_number_change:
            return None
        return TrainerEndpoints(
            self.pool,
            host=self.plan.name,
            trainer_hosts=self.plan.trainer_hosts,
            num_ranks=self.plan.placement.num_ranks,
            max_endpoints=servers.number,
            slots_per_endpoint=servers.num_slots,
            publish=lambda number: self.hub.update(trainer_endpoints=number),
        )

    def _status_if_stuck(self) -> int:
        """Return the exit status with which the watchdog ends this launcher if the main loop is stuck."""
        decided = self.hub.decided
        return int(ExitCode.INTERNAL if decided is None else decided.exit_code)

    def _check_stop(self) -> None:
        """End a wait of `Addresses` by raising, if a signal has asked this host to stop."""
        if self._num_signals:
            raise StoppedEarlyError

    def _on_endpoints(self, records: tuple[EndpointRecord, ...]) -> None:
        """Publish the endpoints of this host that serve now. The pool calls this after each change."""
        if len(records) == self.plan.placement.servers.number:
            self.endpoints_were_ready = True
        self.hub.update(endpoints=records)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1

    # While the job runs

    @property
    def was_stopped(self) -> bool:
        """Whether this host or the whole job was asked to stop."""
        with self.hub.membership() as membership:
            return self.interrupted_s is not None or membership.stop_requested

    @property
    def output_folder(self) -> Path:
        """Folder for the output files of this host."""
        return output_folder(self.plan.options, self.plan.platform.folders, self.plan.name).absolute()

    def tick(self, waiting_for: str | Callable[[Membership], str] = "") -> None:
        """Wait a moment, publish this host's status and handle what has happened in the job.

        Args:
            waiting_for: Text that says what this host waits for, or a function that returns the text. The text is
                logged about every ten seconds, unless it is empty.

        Raises:
            JobEndsError: If the root cause of the job's failure is known, on this or another host.
            RestartError: If the trainer group restarts and this host belongs to it.
        """
        # Publish what has changed on this host, and read what the other hosts have reported.
        self.hub.wait(_TICK_S)
        reap_adopted()
        self.starter.poll()
        self.publish()
        self._follow()
        with self.hub.membership() as membership:
            decided = membership.own.decided
            endpoints = membership.endpoints()
            awaited = waiting_for if isinstance(waiting_for, str) else waiting_for(membership)
            # A function that starts or ends endpoints. It is called below.
            change_endpoints = None if self.trainer_endpoints is None else self.trainer_endpoints.read(membership)
            # Without the dispatcher of tf.data.service, the ranks of this host get no batches.
            is_to_stop = self._num_signals > 0 or self._loses_dispatcher(membership)
            if self.plan.is_first_trainer:
                self._timeline.follow(membership, time.monotonic() - self.plan.started_s)
        # Act on these reports and on signals, without the lock of the membership, because these calls may block.
        if decided is not None:
            raise JobEndsError(decided)
        if is_to_stop:
            self._request_stop()
        # Workers of tf.data.service learn the address of their dispatcher from these records.
        if self.pool is not None:
            self.pool.follow(endpoints)
        # A host that stops must not start endpoints.
        if change_endpoints is not None and not is_to_stop:
            change_endpoints()
        # If the endpoints have never served, the job must show why. If the pool fails later, endpoints of other hosts
        # compute the batches. If no endpoint of any host is left, the ranks fail after their data timeout.
        if self.pool is not None and self.pool.failure is not None and not self.endpoints_were_ready:
            self.fail(cause_of(self.pool.failure, self.plan.name))
        self._wait_log.show(awaited)

    def _follow(self) -> None:
        """If the arbiter has restarted the trainer group since the last call, adopt and log the new generation.

        A trainer host then ends its work with its current ranks. A data host continues to serve.

        Raises:
            RestartError: If the trainer group restarts and this host has ranks.
        """
        with self.hub.membership() as membership:
            own = membership.own
        # Ignore a restart if the root cause is decided, because the job then ends.
        if own.generation == self.generation or own.decided is not None:
            return
        self.generation = own.generation
        # This host has adopted the generation from the status of another host, which may lack the reason.
        reason = "an unknown reason" if own.restarted_for is None else own.restarted_for.first_line
        limit = self.plan.options.job_restarts
        logger.warning("restart %d of at most %d of the trainer group, because of %s", self.generation, limit, reason)
        if self.plan.placement.num_ranks:
            raise RestartError

    def publish(self, **changes: object) -> None:
        """Update this host's status with its current measurements and with ``changes``.

        Raises:
            RestartError: If ``changes`` sets a state other than ``FAILED``, and the ranks of this host belong to an
                earlier generation.
        """
        self.watchdog.tick()
        counters = collections.Counter(
            {"authentication failures": self.hub.auth_failures, "log lines dropped": logs.dropped_lines()}
        )
        # Only one host counts the restarts of the group, because the report adds up the counters of all hosts.
        if self.plan.is_first_trainer:
            counters["job restarts"] = self.generation
        if self.pool is not None:
            counters.update(self.pool.counters())
        usage = dataclasses.replace(self._sampler.usage(), **self._endpoints_usage())
        usage_json = usage.to_json()
        sets_state = changes.get("state") not in (None, HostState.FAILED)
        with self.hub.membership() as membership:
            # The trainer group restarts, and this host has not handled that yet. A state of its old ranks, such as
            # DONE, would then count for the new ranks. FAILED counts in any case, because it ends the host.
            is_outdated = (
                sets_state and self.plan.placement.num_ranks > 0 and membership.own.generation != self.generation
            )
            if not is_outdated:
                # Add the counters of the ranks of earlier generations, which have ended.
                counters.update(membership.past_ranks.counters)
                ticks = membership.own.ticks + 1
                membership.update(usage_json=usage_json, counters=dict(counters), ticks=ticks, **changes)
        if is_outdated:
            self._follow()

    def _endpoints_usage(self) -> dict[str, Any]:
        """Return the fields of this host's `HostUsage` that the endpoints report."""
        if self.pool is None:
            return {}
        statistics, memory = self.pool.statistics(), self.pool.memory()
        private_bytes, shared_bytes = (None, None) if memory is None else memory
        return {
            "endpoints_private_bytes": private_bytes,
            "endpoints_shared_bytes": shared_bytes,
            "endpoints_busy_s": statistics.get("busy_s"),
            "endpoints_wait_s": statistics.get("wait_s"),
            "shard_waits_s": slowest_shards(shard_waits_s(statistics)),
            "endpoint_slots": self.plan.placement.servers.number * self.plan.placement.servers.num_slots,
            "batches_computed": int(statistics["num_batches"]) if "num_batches" in statistics else None,
        }

    def fail_because(self, summary: str, exit_code: ExitCode) -> NoReturn:
        """Report a failure that the launcher of this host has found, and wait for the decision. See `fail`."""
        self.fail(Cause(host=self.plan.name, summary=summary, exit_code=exit_code))

    def fail(self, cause: Cause) -> NoReturn:
        """Report a failure of this host and wait for the arbiter's decision.

        If the arbiter does not decide within the length of a lease plus five seconds, ``cause`` is the root cause. If
        this host has joined the running job, its failure does not end the job. This host then waits only two
        heartbeats, until the other hosts know of the failure.

        Raises:
            JobEndsError: With the root cause.
            RestartError: If the trainer group restarts.
        """
        # The failure of a rank counts only for the generation of this rank.
        self.hub.fail(cause, generation=self.generation if cause.of_rank else None)
        timings = self.plan.timings
        has_joined = self.plan.options.join is not None
        patience_s = 2 * timings.heartbeat_s if has_joined else timings.lease_s + END_TIMEOUT_S
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s:
            # Do only a part of `tick`, because `tick` may call this method again.
            self.wait()
            reap_adopted()
            self._follow()
            with self.hub.membership() as membership:
                decided = membership.own.decided
            if decided is not None:
                raise JobEndsError(decided)
        raise JobEndsError(cause)

    def _loses_dispatcher(self, membership: Membership) -> bool:
        """Return whether this host's ranks need the dispatcher, and the dispatcher's host was asked to stop."""
        dispatcher_host = self.plan.placement.servers.dispatcher_host
        return bool(dispatcher_host and self.plan.placement.num_ranks) and membership.was_asked_to_stop(dispatcher_host)

    def _request_stop(self) -> None:
        """Ask the whole job to stop, once. Fail after a second signal, or if ranks overrun the stop grace."""
        now_s, grace_s = time.monotonic(), self.plan.timings.stop_grace_s
        if self.interrupted_s is None:
            self.interrupted_s = now_s
            logger.warning("asked to stop: ranks end after their current step, then every host stops")
            self.hub.update(stop_requested=True)
        elif self._num_signals > 1:
            # Do not wait for the arbiter's decision, because a second signal must end this host at once.
            summary = "stopped by a second signal"
            raise JobEndsError(Cause(host=self.plan.name, summary=summary, exit_code=ExitCode.SHUTDOWN_OVERRAN))
        elif self.plan.placement.num_ranks and now_s - self.interrupted_s > grace_s:
            summary = f"the ranks did not end within {grace_s:.0f} s of the request to stop"
            self.fail_because(summary, ExitCode.SHUTDOWN_OVERRAN)

    # At the end of the job

    def farewell(self) -> None:
        """Wait until every living peer has received this host's final state, for at most five seconds.

        A peer with another token or protocol, or of another job, does not count as living. If the job failed because of
        such a peer, this method waits the whole time, because the peer learns of the failure only when it connects to
        this host. The peer tries again about a second after a failed connection.
        """
        deadline_s = time.monotonic() + END_TIMEOUT_S
        codes_of_refused_peers = (ExitCode.AUTHENTICATION, ExitCode.DISAGREEMENT, ExitCode.PORT)
        while time.monotonic() < deadline_s:
            with self.hub.membership() as membership:
                decided = membership.own.decided
                was_peer_refused = decided is not None and decided.exit_code in codes_of_refused_peers
                if membership.final_delivered and not was_peer_refused:
                    return
            self.wait()

    def wait(self) -> None:
        """Wait a moment for news, and publish this host's status."""
        self.hub.wait(_TICK_S)
        self.publish()

    def report(self, cause: Cause | None = None) -> None:
        """Write the metrics of this host. On the first trainer host, write the job's report too.

        A profile run writes no report, because its steps differ from the steps of the job.
        """
        with self.hub.membership() as membership:
            # Data hosts that joined and have left again count too, if they have sent a status.
            statuses_of_left_hosts = [host.status for host in membership.joined_hosts.left if host.status is not None]
            statuses, own = membership.statuses() + statuses_of_left_hosts, membership.own
        # Without an output folder, and outside of a platform, the metrics of a host would not be read.
        if self.plan.options.output_dir is not None or self.plan.platform.folders.root.is_dir():
            write_metrics(self.output_folder, self.plan.cluster, own)
        if not self.plan.is_first_trainer or self.plan.options.profile:
            return
        history = JobHistory(
            decisions=() if self.trainer_endpoints is None else tuple(self.trainer_endpoints.decisions),
            joined_hosts=tuple(self._joined_hosts()),
            timeline=tuple(self._timeline.events),
        )
        exit_code = self.plan.options.stopped_code if self.was_stopped else int(ExitCode.OK)
        exit_code = exit_code if cause is None else int(cause.exit_code)
        write_report(self.plan, statuses, history, cause=cause, exit_code=exit_code, folder=self.output_folder)

    def _joined_hosts(self) -> list[JoinedFacts]:
        """Return the data hosts that have joined the running job, including those that have left again."""
        with self.hub.membership() as membership:
            hosts, now_s = membership.joined_hosts, time.monotonic()
            stays = [(host.joined, host.present_s) for host in hosts.left]
            stays += [(joined, hosts.present_s(host, now_s)) for host, joined in hosts.present.items()]
        return [
            JoinedFacts(host=joined.host, group=joined.group, instance_type=joined.instance_type, present_s=present_s)
            for joined, present_s in stays
        ]


def cause_of(error: HeteroError, host: str) -> Cause:
    """Return the `Cause` for an error of ``host``."""
    return Cause(host=host, summary=first_line(error), detail=str(error), exit_code=error.exit_code)
