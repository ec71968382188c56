"""The work of a host in its role: data hosts serve batches, trainer hosts run ranks."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence

from hetero.audit.ledger import DIRECTORY_VARIABLE
from hetero.cluster import Role
from hetero.control.membership import Membership
from hetero.control.rank.session import LAUNCHER_VARIABLE
from hetero.control.status import Cause, HostState, RankReport
from hetero.errors import ExitCode
from hetero.launch import placement, progress
from hetero.launch.host import Host, RestartError
from hetero.launch.metric_lines import progress_metrics, say_metrics
from hetero.launch.ranks.leader import Copies
from hetero.launch.ranks.mpi_ranks import GivenRanks
from hetero.launch.ranks.ranks import RankProcesses, RanksOptions, free_port
from hetero.launch.service_watch import ServiceWatch
from hetero.wire.channels import join_address

__all__ = ["serve", "train"]

logger = logging.getLogger(__name__)

_SPOT_S = 5.0
"""Seconds that a data host waits after SIGTERM to learn whether the whole job is to stop."""
_TOLD_AT = 0.9
"""Fraction of the stop grace. When it is over, a failed stop callback is reported even if ranks of other hosts still
run. At the end of the grace the job fails because ranks did not end, and that failure would hide the callback's."""


_NO_TORCH = (
    "torchrun is to start the ranks, but this host has no torch; pip install torch, or say --framework tensorflow "
    "(hetero_framework, HETERO_FRAMEWORK) for a job that trains with TensorFlow"
)


def serve(host: Host) -> None:
    """Serve batches until every trainer host is done, then shut this data host down.

    Return early if only this host was asked to stop.

    Raises:
        JobEndsError: If the job fails, or if a trainer host is missing at the start timeout.
    """
    deadline_s = time.monotonic() + host.timings.start_timeout_s
    if host.copies is not None:
        host.fail(_misuse(host, "mpirun made ranks on a data host; have it start this on the trainer hosts alone"))
    _start_endpoints(host, deadline_s)
    host.publish(state=HostState.SERVING)
    logger.info("serving with %s", "nothing" if host.pool is None else host.pool.describe())
    while not _may_leave(host, deadline_s):
        host.tick(lambda membership: _words_on_trainers(host, membership))
    host.publish(state=HostState.DRAINING)
    if host.placement.has_tf_dispatcher:
        _let_workers_end(host)
    if host.pool is not None:
        host.pool.stop(host.timings.abort_grace_s)
    host.publish(state=HostState.DONE, endpoints=())
    host.farewell()
    host.report()


def train(host: Host) -> None:
    """Run the ranks of this host, wait until the ranks of all hosts are done, and write the report.

    Raises:
        JobEndsError: If the job fails, or if a host is missing at the start timeout.
    """
    if host.placement.framework == "torch" and host.copies is None and importlib.util.find_spec("torch") is None:
        host.fail(_misuse(host, _NO_TORCH))
    _start_endpoints(host, time.monotonic() + host.timings.start_timeout_s)
    while not _train_generation(host):
        pass
    host.farewell()
    if host.pool is not None:
        host.pool.stop(host.timings.abort_grace_s)
    host.report()


def _train_generation(host: Host) -> bool:
    """Run one generation of this host's ranks. Return whether it finished, False if the trainer group restarts."""
    try:
        if host.copies is not None:
            _wait_for_copies(host, host.copies)
        port = _own_port(host)
        host.publish(state=HostState.WAIT_PEERS, rendezvous_port=port)
        if _wait_for_peers(host, time.monotonic() + host.timings.start_timeout_s):
            host.publish(state=HostState.TRAINING)
            _run_ranks(host)
        host.publish(state=HostState.DONE)
        while not _trainers_done(host):
            host.tick(lambda membership: _words(membership.missing(Role.TRAINER, at_least=HostState.DONE)))
    except RestartError:
        return False
    return True


def _meeting_hosts(host: Host) -> Sequence[str]:
    """Return the trainer hosts where ranks may meet.

    With TensorFlow these are all trainer hosts, because each rank has a server. With torch it is the first one. If
    mpirun made the ranks, they meet on the host of rank 0, which may be any trainer host.
    """
    if host.copies is not None:
        return host.trainer_hosts
    return host.trainer_hosts if host.placement.framework == "tensorflow" else host.trainer_hosts[:1]


def _own_port(host: Host) -> int:
    """Return the first of the free ports for the meeting points on this host, 0 if ranks do not meet here."""
    if host.copies is not None:
        return free_port() if 0 in host.copies.ranks.values() else 0
    if host.name not in _meeting_hosts(host):
        return 0
    return free_port(host.placement.num_ranks if host.placement.framework == "tensorflow" else 1)


def _start_endpoints(host: Host, deadline_s: float) -> None:
    pool = host.pool
    if pool is None:
        return
    pool.start()
    while not host.endpoints_were_ready and not host.was_stopped:
        host.tick(lambda _: f"{pool.describe()} on this host")
        if time.monotonic() > deadline_s:
            summary = f"endpoints were not ready within {host.timings.start_timeout_s:.0f} s"
            host.fail(Cause(host=host.name, summary=summary, exit_code=ExitCode.DATA_HOSTS_MISSING))


def _may_leave(host: Host, deadline_s: float) -> bool:
    """Return whether a data host may leave, because every trainer host is done or only this host was asked to stop."""
    with host.hub.membership() as membership:
        is_done = membership.trainers_done
        job_stops = membership.stop_requested
        missing = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
    if is_done:
        logger.info("every trainer host is done")
        return True
    host.trainers_came = host.trainers_came or not missing  # restarting hosts are missing again
    if not host.trainers_came and time.monotonic() > deadline_s:
        summary = f"trainer hosts never came within {host.timings.start_timeout_s:.0f} s: {_words(missing)}"
        host.fail(Cause(host=host.name, summary=summary, exit_code=ExitCode.TRAINER_HOSTS_MISSING))
    if host.interrupted_s is None or job_stops or time.monotonic() - host.interrupted_s < _SPOT_S:
        return False
    logger.warning("this host alone was asked to stop: leaving; the others compute its batches")
    return True


def _let_workers_end(host: Host) -> None:
    """Wait for a short time until the other data hosts have ended their workers. The dispatcher must end after them.

    Lost hosts are not waited for, because their workers are lost too.
    """
    deadline_s = time.monotonic() + host.timings.abort_grace_s
    while time.monotonic() < deadline_s:
        with host.hub.membership() as membership:
            others = [status for status in membership.statuses(Role.DATA) if status.host != host.name]
            in_service = membership.hosts_in_service()
        if not any(status.host in in_service or status.state is HostState.DRAINING for status in others):
            return
        host.tick()


def _words_on_trainers(host: Host, membership: Membership) -> str:
    """Return the trainer hosts that a data host waits for, as text. Empty while it serves them."""
    if not host.trainers_came:
        return _words(membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS))
    if host.interrupted_s is not None or membership.stop_requested:
        return f"the job's end on {_words(membership.missing(Role.TRAINER, at_least=HostState.DONE))}"
    return ""


def _wait_for_peers(host: Host, deadline_s: float) -> bool:
    """Wait for all other hosts. Return True when ranks can start, False if the job was asked to stop."""
    while True:
        with host.hub.membership() as membership:
            # Only the first generation waits for data hosts, because they may come and go later.
            data = [] if host.generation else membership.missing(Role.DATA, at_least=HostState.SERVING)
            trainers = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
            stop_requested = membership.stop_requested
        words = _words(data + trainers)
        nameless = [name for name in _meeting_hosts(host) if not host.has_address(name)]
        if not words and nameless:
            words = f"the address of {', '.join(nameless)}, where ranks meet"
        if stop_requested:
            # The other hosts learn of the request no later than of this host's DONE state, and start no ranks either.
            host.publish(stop_requested=True)
            return False
        if host.copies is not None and host.copies.ended:
            summary = "mpirun ended a process of this host before the ranks were started"
            host.fail(Cause(host=host.name, summary=summary, exit_code=ExitCode.SCRIPT_FAILED))
        if not words:
            return True
        if time.monotonic() > deadline_s:
            code = ExitCode.DATA_HOSTS_MISSING if data else ExitCode.TRAINER_HOSTS_MISSING
            summary = f"not there after {host.timings.start_timeout_s:.0f} s: {words}"
            host.fail(Cause(host=host.name, summary=summary, exit_code=code))
        host.tick(lambda _, words=words: words)  # type: ignore[misc]


def _run_ranks(host: Host) -> None:
    # Collect what the ranks need to know.
    launcher = join_address(host.address, host.hub.port) if host.rank_socket is None else host.rank_socket.address
    environment = {**host.child_environment, LAUNCHER_VARIABLE: launcher}
    if host.options.audit:
        environment[DIRECTORY_VARIABLE] = str(host.output_folder)
    with host.hub.membership() as membership:
        ports = {status.host: status.rendezvous_port for status in membership.statuses(Role.TRAINER)}
    options = RanksOptions(
        script=host.options.script,
        is_module=host.options.module,
        script_args=host.options.script_args,
        framework=host.placement.framework,
        num_hosts=len(host.trainer_hosts),
        host_index=host.trainer_hosts.index(host.name),
        meeting_points=_meeting_points(host, ports),
        own_address=host.address,
        num_ranks=host.placement.num_ranks,
        num_cpus=placement.usable_cpus(),
        num_gpus=placement.num_gpus(),
        environment=environment,
        generation=host.generation,
    )
    # Start the ranks and watch them until they have ended.
    interval_s = progress.interval_s(os.environ)
    next_progress_s = time.monotonic() + interval_s
    stopped_s = math.inf
    service = ServiceWatch(host)
    ranks = _start_ranks(host, options)
    try:
        while (status := ranks.poll()) is None:
            host.tick(lambda membership: _words_on_ends(membership.own.ranks, options.num_ranks))
            service.check()
            if host.was_stopped:
                stopped_s = min(stopped_s, time.monotonic())
            if _is_left_alone(host):
                logger.warning("asked to stop, and another trainer host has started no ranks: ending these")
                return
            if host.is_first_trainer and time.monotonic() >= next_progress_s:
                next_progress_s = time.monotonic() + interval_s
                _show_progress(host)
        if status != 0:
            with host.hub.membership() as membership:
                reported = {report.rank: report.failure for report in membership.own.ranks if report.failure}
            host.fail(ranks.cause(reported))
        failure = ranks.failure_at_stop()
        if failure is not None:
            _let_others_end(host, min(stopped_s, time.monotonic()))
            host.fail(failure)
    finally:
        ranks.kill()
    if host.is_first_trainer:
        _show_progress(host)  # in a short job this is the first progress line
    logger.info("ranks are done")


def _meeting_points(host: Host, ports: Mapping[str, int]) -> list[tuple[str, int]]:
    names = [name for name in _meeting_hosts(host) if host.copies is None or ports[name]]
    if not names:
        host.fail(_misuse(host, "mpirun put rank 0 on none of the trainer hosts; have it start this on all of them"))
    return [(host.address_of(name), ports[name]) for name in names]


def _start_ranks(host: Host, options: RanksOptions) -> RankProcesses | GivenRanks:
    if host.copies is not None:
        logger.info("starting %d of the %d ranks that mpirun made", options.num_ranks, host.copies.outer.world_size)
        return GivenRanks(options, host.copies, host=host.name, relay=host.relay, run_dir=host.run_dir)
    logger.info("starting %d of %d ranks", options.num_ranks, options.num_ranks * options.num_hosts)
    return RankProcesses(options, host=host.name, relay=host.relay, run_dir=host.run_dir)


def _wait_for_copies(host: Host, copies: Copies) -> None:
    """Wait until all processes that mpirun made on this host have connected. Each process knows only its own rank."""
    if host.options.job_restarts:
        host.fail(_misuse(host, "job_restarts cannot be had with mpirun, whose ranks start once; leave it out"))
    deadline_s = time.monotonic() + host.timings.start_timeout_s
    while not copies.are_there:
        host.tick(lambda _: f"mpirun's processes: {len(copies.ranks)} of {copies.outer.num_local} are there")
        if time.monotonic() > deadline_s:
            summary = f"mpirun has not started all its processes within {host.timings.start_timeout_s:.0f} s"
            host.fail(Cause(host=host.name, summary=summary, exit_code=ExitCode.TRAINER_HOSTS_MISSING))


def _misuse(host: Host, summary: str) -> Cause:
    return Cause(host=host.name, summary=summary, exit_code=ExitCode.USAGE)


def _is_left_alone(host: Host) -> bool:
    """Return whether this host's ranks wait for ranks that another host will not start.

    This happens if a request to stop arrives after one trainer host has started its ranks and before another has.
    """
    with host.hub.membership() as membership:
        others = [status for status in membership.statuses(Role.TRAINER) if status.host != host.name]
        is_without_ranks = any(status.state is HostState.DONE and not status.ranks for status in others)
        return membership.stop_requested and is_without_ranks and not membership.own.ranks


def _let_others_end(host: Host, stopped_s: float) -> None:
    """Wait until the ranks of other hosts have ended, because a failure of the job would interrupt what they save.

    The reports of this host's ranks are not checked, because a rank may end itself or its last report may be lost.

    Args:
        host: This host. Its rank processes have ended.
        stopped_s: Time of the request to stop, in monotonic seconds. The wait ends shortly before the stop grace does.
    """
    deadline_s = stopped_s + _TOLD_AT * host.timings.stop_grace_s
    while (names := _unfinished(host)) and time.monotonic() < deadline_s:
        host.tick(lambda _, names=names: f"the end of rank {names}")  # type: ignore[misc]


def _unfinished(host: Host) -> str:
    """Return the ranks of other hosts that may still run, as text. The ranks of a host that is done have all ended."""
    with host.hub.membership() as membership:
        others = [status for status in membership.statuses(Role.TRAINER) if status.host != host.name]
    running = [status for status in others if status.state not in (HostState.DONE, HostState.FAILED)]
    reports = [report for status in running for report in status.ranks]
    return ", ".join(str(report.rank) for report in reports if not report.finished)


def _words_on_ends(reports: Sequence[RankReport], num_ranks: int) -> str:
    """Return a text that names the ranks whose processes still run after every script has ended, else an empty text."""
    if len(reports) < num_ranks or not all(report.finished for report in reports):
        return ""
    names = ", ".join(str(report.rank) for report in reports)
    return f"the end of the processes of rank {names}; their scripts have ended"


def _show_progress(host: Host) -> None:
    with host.hub.membership() as membership:
        reports = membership.own.ranks
        trainers = membership.statuses(Role.TRAINER)
        num_endpoints = len(membership.endpoints())
    text = progress.describe(reports)
    if text:
        logger.info("progress: %s", text)
    say_metrics(progress_metrics(trainers, num_endpoints=num_endpoints))


def _trainers_done(host: Host) -> bool:
    with host.hub.membership() as membership:
        return membership.trainers_done


def _words(missing: list[tuple[str, str]]) -> str:
    return "; ".join(f"{host} ({word})" for host, word in missing)
