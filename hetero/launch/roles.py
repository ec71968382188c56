"""What a host does in its role: data hosts serve, trainer hosts train."""

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
"""How long a data host that got SIGTERM waits to learn whether the whole job is to stop."""
_TOLD_AT = 0.9
"""Part of the grace after which a stop callback's failure is told though ranks of other hosts have not ended: at its
end, what is told is that they have not, and the failure that came first would be lost."""


_NO_TORCH = (
    "torchrun is to start the ranks, but this host has no torch; pip install torch, or say --framework tensorflow "
    "(hetero_framework, HETERO_FRAMEWORK) for a job that trains with TensorFlow"
)


def serve(host: Host) -> None:
    """Serve batches until every trainer host is done; returns when this host has taken its leave.

    Raises:
        JobEndsError: If the job fails, or no trainer host comes before the start timeout.
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
    """Run the ranks of this host and report; returns when the ranks of all hosts are done.

    Raises:
        JobEndsError: If the job fails, or a host is missing at the start timeout.
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
    """Run the ranks of this host once; False if the trainer group has to start over."""
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
    """Return the trainer hosts whose addresses and ports ranks need: all if each rank has a server of TensorFlow's.

    Where mpirun made the ranks it is one, where it has put rank 0: any.
    """
    if host.copies is not None:
        return host.trainer_hosts
    return host.trainer_hosts if host.placement.framework == "tensorflow" else host.trainer_hosts[:1]


def _own_port(host: Host) -> int:
    """Return the first of the free ports where ranks of this host may be met; 0: they are not."""
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
    """Return whether a data host's work is done, or it alone was asked to stop."""
    with host.hub.membership() as membership:
        is_done = membership.trainers_done
        job_stops = membership.stop_requested
        missing = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
    if is_done:
        logger.info("every trainer host is done")
        return True
    host.trainers_came = host.trainers_came or not missing  # a restart makes them count as not ready again
    if not host.trainers_came and time.monotonic() > deadline_s:
        summary = f"trainer hosts never came within {host.timings.start_timeout_s:.0f} s: {_words(missing)}"
        host.fail(Cause(host=host.name, summary=summary, exit_code=ExitCode.TRAINER_HOSTS_MISSING))
    if host.interrupted_s is None or job_stops or time.monotonic() - host.interrupted_s < _SPOT_S:
        return False
    logger.warning("this host alone was asked to stop: leaving; the others compute its batches")
    return True


def _let_workers_end(host: Host) -> None:
    """Wait, a moment at most, until the other data hosts have ended their workers: the dispatcher ends after them.

    Not for hosts that were lost: their workers were, too.
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
    """Return which trainer hosts a data host waits for; empty while it serves them."""
    if not host.trainers_came:
        return _words(membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS))
    if host.interrupted_s is not None or membership.stop_requested:
        return f"the job's end on {_words(membership.missing(Role.TRAINER, at_least=HostState.DONE))}"
    return ""


def _wait_for_peers(host: Host, deadline_s: float) -> bool:
    """Return whether ranks are to start: every host is there, and none was asked to stop."""
    while True:
        with host.hub.membership() as membership:
            # A data host may come and go once the job runs.
            data = [] if host.generation else membership.missing(Role.DATA, at_least=HostState.SERVING)
            trainers = membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)
            stop_requested = membership.stop_requested
        words = _words(data + trainers)
        nameless = [name for name in _meeting_hosts(host) if not host.has_address(name)]
        if not words and nameless:
            words = f"the address of {', '.join(nameless)}, where ranks meet"
        if stop_requested:
            # The others learn of the request with or before this host's DONE, and start no ranks either.
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
        _show_progress(host)  # whatever has come since the last time, and of a job that was short, all
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
    """Wait until the other processes that mpirun made on this host are there: each knows only its own rank."""
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
    """Return whether ranks wait for others that will not be: a request to stop came between the starts of two hosts."""
    with host.hub.membership() as membership:
        others = [status for status in membership.statuses(Role.TRAINER) if status.host != host.name]
        is_without_ranks = any(status.state is HostState.DONE and not status.ranks for status in others)
        return membership.stop_requested and is_without_ranks and not membership.own.ranks


def _let_others_end(host: Host, stopped_s: float) -> None:
    """Wait until the ranks of other hosts have ended: some may still be saving what a failure of the job would cut off.

    Those of this host have. What they said last may not be that they finished: one ended itself, or its word was lost.

    Args:
        host: This one, whose rank processes have ended.
        stopped_s: When the job was asked to stop, monotonic seconds: the wait ends shortly before the grace does.
    """
    deadline_s = stopped_s + _TOLD_AT * host.timings.stop_grace_s
    while (names := _unfinished(host)) and time.monotonic() < deadline_s:
        host.tick(lambda _, names=names: f"the end of rank {names}")  # type: ignore[misc]


def _unfinished(host: Host) -> str:
    """Return which ranks of other hosts may still run: of a host that is done none does, whatever they said last."""
    with host.hub.membership() as membership:
        others = [status for status in membership.statuses(Role.TRAINER) if status.host != host.name]
    running = [status for status in others if status.state not in (HostState.DONE, HostState.FAILED)]
    reports = [report for status in running for report in status.ranks]
    return ", ".join(str(report.rank) for report in reports if not report.finished)


def _words_on_ends(reports: Sequence[RankReport], num_ranks: int) -> str:
    """Return whose processes have not ended though every script has."""
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
