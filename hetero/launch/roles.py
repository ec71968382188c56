"""The work of a host by role: data hosts serve batches, trainer hosts run ranks."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence

from hetero.audit.ledger import DIRECTORY_VARIABLE
from hetero.cluster import Role
from hetero.control.members.membership import Membership
from hetero.control.rank.variables import LAUNCHER_VARIABLE, REMOTE_VARIABLE
from hetero.control.status import HostState, RankReport
from hetero.errors import ExitCode
from hetero.launch.data_services import ServiceWatch, find_service
from hetero.launch.host import LaunchedHost, RestartError
from hetero.launch.ranks.ranks import free_port
from hetero.launch.ranks.starter import RanksOptions
from hetero.launch.reporting import progress
from hetero.launch.reporting.metric_lines import log_metrics, progress_metrics
from hetero.launch.reporting.profiling import JobProfile
from hetero.launch.wanted_hosts import WantedHosts, totals_of
from hetero.system.cgroups import usable_cpus
from hetero.wire.channels import join_address

__all__ = ["serve", "train"]

logger = logging.getLogger(__name__)


# Contract of the end of a job, from a rank's last step to the exit of every host. If this does not hold, it is a bug.
#
# A rank ends.
#   1. A rank that fails reports why and waits for the launcher's answer before its process ends. Its launcher answers
#      when the arbiter has the failure, after 2 s at the latest. Collectives of other ranks break only when the process
#      ends, so their errors reach the arbiter after their cause.
#   2. A report counts, except where the process crashed. Without a report, the exit status and the last lines of
#      output say what happened. Nothing else does.
#   3. If one rank of a host fails, the agent ends the others: a signal after 0.3 s, SIGKILL 5 s later.
#
# A job ends well.
#   4. A trainer host is DONE when all of its ranks have ended with 0 and nothing that they started runs. It then waits
#      until every trainer host is DONE. No clock bounds this wait. The lease of a host that falls silent ends it.
#   5. A data host serves until every trainer host is DONE. Then it is DRAINING, finishes what its endpoints have begun
#      (`abort_grace_s`), and is DONE. The host of a tf.data dispatcher first lets the workers end.
#   6. Each host stays until the peers that await its last status have it (`farewell`, 5 s). The first trainer host also
#      waits for the last figures of the data hosts, and then writes the report.
#
# A job fails.
#   7. Only the arbiter decides. It collects failures for a moment and chooses the root. Every host adopts its decision,
#      so every host has the same first line in its failure file, and the same exit code.
#   8. A host that has failed waits for the decision in `LaunchedHost.fail`, a lease and 5 s at most. After that, its
#      own failure is the root. A host that has joined waits two heartbeats, because its failure does not end the job.
#   9. Until its farewell, a host learns of the decision in every wait for others, because these waits call
#      `LaunchedHost.tick`, which raises it. The host then kills its ranks, publishes FAILED, writes the failure file,
#      and ends within 20 s. Otherwise the watchdog ends it.
#  10. If the arbiter restarts the trainer group instead, only the ranks end (`RestartError`). Data hosts go on.
#
# A host is asked to stop.
#  11. Ranks end after the same step and run the stop callbacks. If they have not ended within `stop_grace_s`, the job
#      fails. A second request fails it at once.
#  12. A stop callback that fails is a failure of the job, but only after the ranks of all hosts have ended, so that the
#      others can save. The last report of its rank has both `finished` and the failure, and its process ends with 0.
#      This wait ends at 0.9 of the grace, because at the end of the grace the job fails for another reason.
#  13. If only a data host is asked to stop, it leaves after `suspect_s`, and the others compute its batches.
#
# A host or a process disappears.
#  14. A trainer host that is silent for a lease fails the job. A data host that has served does not. A data host that
#      hears no trainer host for `orphan_s` ends alone.
#  15. Processes die with their parent: ranks with the agent, the agent and the endpoints with the launcher. A launcher
#      that ends by itself first kills all its descendants, also those that the script has started.


def serve(host: LaunchedHost) -> None:
    """Serve batches until every trainer host is done, or this host alone is asked to stop. Then shut this host down.

    Raises:
        JobEndsError: If the job fails, or if a trainer host is still missing after the start timeout.
    """
    deadline_s = time.monotonic() + host.plan.timings.start_timeout_s
    _check_starter(host, is_trainer=False)
    _start_endpoints(host, deadline_s)
    host.publish(state=HostState.SERVING)
    logger.info("serving with %s", "nothing" if host.pool is None else host.pool.describe())
    # The time limit is only for the start. Trainer hosts that restart later are missing for a while again.
    have_all_appeared = False
    while not _may_leave(host):
        with host.hub.membership() as membership:
            missing = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
        have_all_appeared = have_all_appeared or not missing
        if have_all_appeared:
            host.tick(lambda membership: _awaited_at_stop(host, membership))
        elif time.monotonic() > deadline_s:
            waited_s = host.plan.timings.start_timeout_s
            summary = f"trainer hosts did not appear within {waited_s:.0f} s: {_listed(missing)}"
            host.fail_because(summary, ExitCode.TRAINER_HOSTS_MISSING)
        else:
            host.tick(_listed(missing))
    host.publish(state=HostState.DRAINING)
    # The dispatcher of tf.data.service must end after the workers of the other data hosts.
    if host.plan.name == host.plan.placement.servers.dispatcher_host:
        # Lost hosts do not count here, because their workers are lost too.
        _await_data_hosts(host, host.plan.timings.abort_grace_s, host.tick)
    if host.pool is not None:
        host.pool.stop(host.plan.timings.abort_grace_s)
    # A profile run measures the samples after the endpoints have ended, because endpoints use CPU time.
    if host.plan.options.profile:
        JobProfile(host).serve()
    host.publish(state=HostState.DONE, endpoints=())
    host.farewell()
    host.report()


def train(host: LaunchedHost) -> None:
    """Run the ranks of this host, wait until the ranks of all hosts are done, and write the report.

    Raises:
        JobEndsError: If the job fails, or if a host is still missing after the start timeout.
    """
    _check_starter(host, is_trainer=True)
    _start_endpoints(host, time.monotonic() + host.plan.timings.start_timeout_s)
    profile = JobProfile(host) if host.plan.options.profile else None
    while not _train_generation(host, profile):
        pass
    if profile is not None:
        # The endpoints of this host would use CPU time during the measurement.
        if host.pool is not None:
            host.pool.stop(host.plan.timings.abort_grace_s)
        profile.finish()
    # Say farewell first, because peers wait for the last status, and endpoints may take seconds to end.
    host.farewell()
    if host.pool is not None:
        host.pool.stop(host.plan.timings.abort_grace_s)
    # Without this wait, reports of short jobs lacked the last figures, for example 9 batches computed of 44 received. A
    # profile run does not wait, because it writes no report.
    if host.plan.is_first_trainer and profile is None:
        # Data hosts give their endpoints the grace to end, and then send the status with the last counts. Do not use
        # `tick`, which would raise if a host fails now, because the ranks are done and the job has succeeded.
        timeout_s = host.plan.timings.abort_grace_s + 2 * host.plan.timings.heartbeat_s
        _await_data_hosts(host, timeout_s, host.wait)
    host.report()


def _train_generation(host: LaunchedHost, profile: JobProfile | None = None) -> bool:
    """Run this host's ranks until they finish or the trainer group restarts. Return whether they finished."""
    try:
        _wait_for_processes(host)
        # With torch, all ranks connect to the port of one host, and the other hosts need none.
        num_ports = host.starter.num_ports(host.plan.name, host.plan.trainer_hosts, host.plan.placement.num_ranks)
        port = free_port(num_ports) if num_ports else 0
        host.publish(state=HostState.WAIT_PEERS, rendezvous_port=port)
        if _wait_for_peers(host, time.monotonic() + host.plan.timings.start_timeout_s):
            host.publish(state=HostState.TRAINING)
            _run_ranks(host, profile)
        host.publish(state=HostState.DONE)
        # The endpoints of this host serve other hosts to the end. And until then, a failure may restart all ranks.
        while not _trainers_done(host):
            host.tick(lambda membership: _listed(membership.missing(Role.TRAINER, at_least=HostState.DONE)))
    except RestartError:
        return False
    return True


def _check_starter(host: LaunchedHost, *, is_trainer: bool) -> None:
    """Fail if ranks cannot be started on this host, or if mpirun made ranks on a data host."""
    obstacle = host.starter.obstacle(is_trainer=is_trainer, job_restarts=host.plan.options.job_restarts)
    if obstacle:
        host.fail_because(obstacle, ExitCode.USAGE)


def _start_endpoints(host: LaunchedHost, deadline_s: float) -> None:
    """Start the endpoints of this host, and wait until all of them serve. Fail if they do not before ``deadline_s``."""
    pool = host.pool
    if pool is None:
        return
    pool.start()
    while not host.endpoints_were_ready and not host.was_stopped:
        host.tick(lambda _: f"{pool.describe()} on this host")
        if time.monotonic() > deadline_s:
            summary = f"endpoints were not ready within {host.plan.timings.start_timeout_s:.0f} s"
            host.fail_because(summary, ExitCode.DATA_HOSTS_MISSING)


def _may_leave(host: LaunchedHost) -> bool:
    """Return whether every trainer host is done, or only this host was asked to stop. Then this data host may leave."""
    with host.hub.membership() as membership:
        is_done = membership.trainers_done
        job_stops = membership.stop_requested
    if is_done:
        logger.info("every trainer host is done")
        return True
    # If the whole job stops, this host must serve until the ranks have ended. So only a request for this host alone
    # counts.
    if host.interrupted_s is None or job_stops:
        return False
    # If no other host reports the request within `suspect_s`, it is for this host alone.
    if time.monotonic() - host.interrupted_s < host.plan.timings.suspect_s:
        return False
    logger.warning("only this host was asked to stop. It leaves the job, and the other hosts compute its batches")
    return True


def _await_data_hosts(host: LaunchedHost, timeout_s: float, wait: Callable[[], None]) -> None:
    """Wait until no other data host is at work. Hosts that have fallen silent do not count.

    Args:
        host: This host.
        timeout_s: Longest time to wait, in seconds.
        wait: Waits a moment. It is called again and again.
    """
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with host.hub.membership() as membership:
            if not membership.at_work(Role.DATA):
                return
        wait()


def _awaited_at_stop(host: LaunchedHost, membership: Membership) -> str:
    """Return the trainer hosts whose end a data host awaits after a request to stop, as text. Empty without one."""
    if host.interrupted_s is not None or membership.stop_requested:
        return f"the job's end on {_listed(membership.missing(Role.TRAINER, at_least=HostState.DONE))}"
    return ""


def _wait_for_peers(host: LaunchedHost, deadline_s: float) -> bool:
    """Wait for all other hosts. Return True when ranks can start, False if the job was asked to stop."""
    while True:
        with host.hub.membership() as membership:
            # Only the first generation waits for data hosts, because they may come and go later.
            data = [] if host.generation else membership.missing(Role.DATA, at_least=HostState.SERVING)
            trainers = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
            stop_requested = membership.stop_requested
            has_failure = membership.has_failure
        awaited = _listed(data + trainers)
        # Wait for the decision about a known failure. Otherwise a short job of hosts that disagree would end
        # successfully before the decision.
        if not awaited and has_failure:
            awaited = "the decision about a failure"
        # Wait for these names here, where the host continues to send heartbeats. When ranks were started first, the
        # host waited for a name without heartbeats, and the other hosts considered it stuck.
        unresolved = [
            name for name in host.starter.meeting_hosts(host.plan.trainer_hosts) if host.addresses.known(name) is None
        ]
        if not awaited and unresolved:
            awaited = f"the address of {', '.join(unresolved)}, where ranks meet"
        if stop_requested:
            # Other hosts must learn of the request before they see this host's DONE state, or they would start ranks.
            host.publish(stop_requested=True)
            return False
        if summary := host.starter.early_end():
            host.fail_because(summary, ExitCode.SCRIPT_FAILED)
        if not awaited:
            return True
        if time.monotonic() > deadline_s:
            code = ExitCode.DATA_HOSTS_MISSING if data else ExitCode.TRAINER_HOSTS_MISSING
            host.fail_because(f"still missing after {host.plan.timings.start_timeout_s:.0f} s: {awaited}", code)
        host.tick(awaited)


def _run_ranks(host: LaunchedHost, profile: JobProfile | None = None) -> None:
    """Start the ranks of this host, and follow them until they have ended. If they fail, fail this host.

    Return early if the job was asked to stop and the ranks would not end by themselves.
    """
    # Collect what the ranks need to know.
    environment = {
        **host.child_environment,
        LAUNCHER_VARIABLE: join_address(host.address, host.hub.rank_port),
        REMOTE_VARIABLE: str(int(host.plan.placement.remote)),
    }
    if host.plan.options.audit:
        environment[DIRECTORY_VARIABLE] = str(host.output_folder)
    with host.hub.membership() as membership:
        ports = {status.host: status.rendezvous_port for status in membership.statuses(Role.TRAINER)}
    plan = host.plan
    options = RanksOptions(
        script=plan.options.script,
        is_module=plan.options.module,
        script_args=plan.options.script_args,
        framework=plan.placement.framework,
        num_hosts=len(plan.trainer_hosts),
        host_index=plan.trainer_hosts.index(plan.name),
        meeting_points=_meeting_points(host, ports),
        num_ranks=plan.placement.num_ranks,
        num_cpus=usable_cpus(),
        num_gpus=plan.placement.num_gpus,
        environment=environment,
        generation=host.generation,
    )
    # Start the ranks and watch them until they have ended.
    progress_log = _ShownProgress(host)
    # Time when this loop first saw a request to stop. Infinite before that.
    stop_seen_s = math.inf
    # Some data services need a watch, because the ranks would not notice for a long time that the service is lost.
    service = find_service(plan.options.data_service)
    watch = service.watch(plan.name, plan.placement.servers, plan.timings) if plan.placement.data_service else None
    ranks = host.starter.start(options, host=plan.name, relay=host.relay, run_dir=host.run_dir)
    try:
        while (status := ranks.poll()) is None:
            host.tick(lambda membership: _awaited_ends(membership.own.ranks, options.num_ranks))
            if watch is not None:
                _check_service(host, watch)
            if host.was_stopped:
                stop_seen_s = min(stop_seen_s, time.monotonic())
            # Without this check, the ranks waited for the ranks of the other host until the grace was over, and the job
            # ended with HET-41.
            if _waits_for_missing_ranks(host):
                logger.warning(
                    "asked to stop before another trainer host started its ranks; ending the ranks of this host"
                )
                return
            if profile is not None:
                if profile.follow():
                    logger.warning("a rank did not end in time; ending the ranks of this host")
                    return
            elif host.plan.is_first_trainer:
                progress_log.show_if_due()
        with host.hub.membership() as membership:
            reported = {report.rank: report.failure for report in membership.own.ranks if report.failure}
        if status != 0:
            host.fail(ranks.cause(reported))
        # A rank that reports a failure and ends with 0 has finished, but one of its stop callbacks has failed. The job
        # fails only after the other ranks have saved. If the loop saw no request to stop, the request came later.
        if reported:
            _let_others_end(host, min(stop_seen_s, time.monotonic()))
            host.fail(next(iter(reported.values())))
    finally:
        ranks.kill()
    if host.plan.is_first_trainer and profile is None:
        # In a short job this is the first progress line.
        progress_log.show()
    logger.info("ranks are done")


def _check_service(host: LaunchedHost, watch: ServiceWatch) -> None:
    """Fail if the data service no longer serves the ranks of this host."""
    with host.hub.membership() as membership:
        records, reports = membership.endpoints(), membership.own.ranks
    cause = watch.check(records, reports)
    if cause is not None:
        host.fail(cause)


def _meeting_points(host: LaunchedHost, ports: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the address and first port of each host whose ranks listen for other ranks."""
    names = host.starter.meeting_hosts(host.plan.trainer_hosts, ports)
    if not names:
        summary = "mpirun put rank 0 on no trainer host; make it start hetero on all trainer hosts"
        host.fail_because(summary, ExitCode.USAGE)
    return [(host.addresses.of(name), ports[name]) for name in names]


def _wait_for_processes(host: LaunchedHost) -> None:
    """Wait until all processes that must exist before the ranks start have connected."""
    deadline_s = time.monotonic() + host.plan.timings.start_timeout_s
    while awaited := host.starter.waits_for():
        host.tick(awaited)
        if time.monotonic() > deadline_s:
            summary = f"still missing after {host.plan.timings.start_timeout_s:.0f} s: {awaited}"
            host.fail_because(summary, ExitCode.TRAINER_HOSTS_MISSING)


def _waits_for_missing_ranks(host: LaunchedHost) -> bool:
    """Return whether this host's ranks wait for ranks that another host will not start.

    This happens if a request to stop arrives when this host has started its ranks and another trainer host has not.
    Ranks that have begun a step do not wait for others.
    """
    with host.hub.membership() as membership:
        other_hosts = [status for status in membership.statuses(Role.TRAINER) if status.host != host.plan.name]
        # A host that learned of the request before it had started ranks is DONE at once, without reports of ranks.
        is_without_ranks = any(status.state is HostState.DONE and not status.ranks for status in other_hosts)
        has_begun = any(report.steps_started for report in membership.own.ranks)
        return membership.stop_requested and is_without_ranks and not has_begun


def _let_others_end(host: LaunchedHost, stopped_s: float) -> None:
    """Wait until the ranks of other hosts have ended.

    The caller makes the job fail after this wait. If it failed the job at once, these ranks could not finish saving.
    The reports of this host's ranks are not checked, because a rank may end itself or its last report may be lost.

    Args:
        host: This host. Its rank processes have ended.
        stopped_s: Time of the request to stop, in monotonic seconds. The wait ends shortly before the stop grace ends.
    """
    deadline_s = stopped_s + host.plan.timings.early_grace_s
    while (names := _unfinished(host)) and time.monotonic() < deadline_s:
        host.tick(f"the end of rank {names}")


def _unfinished(host: LaunchedHost) -> str:
    """Return the ranks of other hosts that may still run, as text. On a host that is done, all ranks have ended."""
    with host.hub.membership() as membership:
        other_hosts = [status for status in membership.statuses(Role.TRAINER) if status.host != host.plan.name]
    running = [status for status in other_hosts if status.state not in (HostState.DONE, HostState.FAILED)]
    reports = [report for status in running for report in status.ranks]
    return ", ".join(str(report.rank) for report in reports if not report.finished)


def _awaited_ends(reports: Sequence[RankReport], num_ranks: int) -> str:
    """Return a text that names the ranks of this host, if all of their scripts have ended. Else return an empty text.

    Call it while processes of ranks still run. A report does not show whether the process of its rank has ended.
    """
    # A rank reports `finished` when its script has ended.
    if len(reports) < num_ranks or not all(report.finished for report in reports):
        return ""
    names = ", ".join(str(report.rank) for report in reports)
    why = "the script has ended, but what it has started or its exit handlers still run"
    return f"the end of rank {names}: {why}"


class _ShownProgress:
    """The progress of a generation of ranks, as the first trainer host logs it.

    Args:
        host: This host.
    """

    def __init__(self, host: LaunchedHost) -> None:
        self._host = host
        self._interval_s = progress.interval_s(os.environ)
        self._next_s = time.monotonic() + self._interval_s
        self._wanted = WantedHosts()

    def show_if_due(self) -> None:
        """Log the progress and its metrics, if the interval has passed since the last time."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._interval_s
            self.show()

    def show(self) -> None:
        """Log the progress and its metrics."""
        with self._host.hub.membership() as membership:
            trainers = membership.statuses(Role.TRAINER)
            endpoints = membership.endpoints()
            data_hosts = membership.statuses(Role.DATA)
            # The totals of the job include batches of data hosts that have left.
            data_hosts += [gone.status for gone in membership.joined_hosts.left if gone.status is not None]
        found = progress.measure(trainers)
        if found is not None:
            logger.info("progress: %s", progress.describe(found))
        # Ranks that load their own data could not use a data host.
        is_remote = self._host.plan.placement.remote
        wanted = self._wanted.observe(totals_of(trainers, data_hosts, endpoints)) if is_remote else None
        log_metrics(progress_metrics(trainers, num_endpoints=len(endpoints), wanted=wanted))


def _trainers_done(host: LaunchedHost) -> bool:
    with host.hub.membership() as membership:
        return membership.trainers_done


def _listed(missing: list[tuple[str, str]]) -> str:
    """Return hosts and the last known state of each, as text."""
    return "; ".join(f"{host} ({state})" for host, state in missing)
