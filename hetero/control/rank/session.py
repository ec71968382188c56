"""The connection of a rank to its launcher. Over it the rank reports, and learns about endpoints and a stop of the job.

`hetero.launch.ranks.rank` calls `connect` before it runs the user's script. In a process that no launcher started,
`current` returns None. Loaders then make batches in that process or in workers, and report nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hetero.control import security
from hetero.control.launcher_link import LauncherLink
from hetero.control.members.directory import BATCHES, Directory, EndpointRecord
from hetero.control.rank.alone import EXIT_SIGTERM, end_if_requested, record_requests
from hetero.control.rank.callbacks import CallbackFailure, run_callbacks
from hetero.control.rank.stopping import LateStop
from hetero.control.rank.variables import (
    HOST_VARIABLE,
    LAUNCHER_VARIABLE,
    REMOTE_VARIABLE,
    RESTART_VARIABLE,
    TLS_VARIABLE,
)
from hetero.control.status import MAX_LOADERS, Cause, RankReport, SessionOptions, StepTimes, StopPoint
from hetero.errors import ExitCode, HeteroError
from hetero.metrics.logged import MetricLog
from hetero.metrics.steps import StepTimer, encode_summaries
from hetero.system.logs import LoggedErrors
from hetero.system.memory import keep_freed_memory
from hetero.system.waits import END_TIMEOUT_S, POLL_S
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import fields_of, record_of
from hetero.wire.tls import Tls

__all__ = [
    "RankSession",
    "check_stop",
    "connect",
    "current",
    "end_if_stopping",
    "is_child_of_rank",
    "on_stop",
    "use",
]

logger = logging.getLogger(__name__)

_REPORT_INTERVAL_S = 1.0
_STEP_TIMES_INTERVAL_S = 0.25
_OVERTAKES = 1.5
"""Factor by which the time of another loader must exceed the time of the reported loader. Two loaders that share each
step take about the same time, and reports must not alternate between them."""
_DECISION_TIMEOUT_S = 20.0

_session: RankSession | None = None
_callbacks: list[Callable[[], object]] = []
_inherited: list[RankSession] = []
"""In a process that a rank has forked: the session of its parent. It is kept, so its connections stay as they are."""


class RankSession:
    """The connection of one rank to the launcher of its host.

    Attributes:
        rank: This rank.
        world_size: Number of ranks of the job.
        remote: Whether batches come from endpoints.
        options: Options that the launcher decided for all ranks.
        directory: Endpoints of the data plane, kept current.
        tf_servers: Servers of tf.data.service, kept current.
        token: The job's token.
        job_id: Id of the job, sent with every call.
        tls: TLS settings of this host. None for a job in plaintext.
        stopped: Whether this rank ended its work because the job was asked to stop. Its process then ends with status
            0, see `hetero.launch.ranks.rank`. If a callback failed, the last report has the failure. If the launcher
            does not answer this report, the process ends with status 30.
        stop_failure: Failure of the first stop callback that failed.
        generation: Restarts of the trainer group before this process.
        metrics: Values that the script has logged on this rank, see `hetero.log_metric`.
        hidden_error: Latest error that a framework shows to the script only as text in another error.

    Raises:
        HeteroError: If the launcher cannot be reached or refuses the token.
    """

    def __init__(
        self,
        launcher: str,
        token: security.Token | None,
        *,
        job_id: str,
        rank: int,
        world_size: int,
        generation: int = 0,
        tls: Tls | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.token = token
        self.job_id = job_id
        self.tls = tls
        self.directory = Directory()
        self.tf_servers = Directory()
        self.stopped = False  # whether this rank has ended its work because the job must stop
        self.stop_failure: CallbackFailure | None = None
        self.generation = generation
        self.hidden_error: HeteroError | None = None  # the cause of a framework's error, which has only its text
        self._timers: list[StepTimer] = []
        self._loaders: dict[int, str] = {}
        """Maps the id of a timer to the name of its loader, made unique within this rank."""
        self._counters: Callable[[], Mapping[str, int]] | None = None
        self._profile: Callable[[bool], bytes] | None = None
        self._changed = threading.Condition()
        self._failure: Cause | None = None
        self._reporting = threading.Lock()
        """Allows one report at a time, because an older report must not arrive after a newer one."""
        self._steps_started: collections.Counter[str] = collections.Counter()
        self._latest_loader = ""
        """Loader whose step began last."""
        self._timed_loader = ""
        """Loader whose step times are reported."""
        self._stop_requested = False
        self._stop_at: StopPoint | None = None
        self._closing = threading.Event()
        self._report_now = threading.Event()
        """Ends the pause before the next report."""
        self._summary_errors = LoggedErrors()
        self._summaries: tuple[bytes, ...] = ()  # of the last report, one for each timer
        self._next_summaries_s = 0.0
        # Call this before the threads below allocate. A rank of `hetero launch` has called it, a worker of Ray has not.
        keep_freed_memory()
        # Register with the launcher, whose reply has the options of this job.
        self._link = LauncherLink(launcher, token, job_id=job_id, rank=rank, tls=tls)
        reply = self._link.register(pb.RegisterRequest(rank=rank, world_size=world_size, generation=generation))
        self.remote: bool = reply.remote
        self.options = record_of(SessionOptions, reply)
        self.metrics = MetricLog(rank=rank, elapsed_s=reply.elapsed_s)
        self._metrics_sent = 0  # version of the values that the launcher has
        # From now on, follow the launcher's updates and report about once a second, or more often with step times.
        self._interval_s = _STEP_TIMES_INTERVAL_S if self.options.wants_step_times else _REPORT_INTERVAL_S
        self._late_stop = LateStop(self.options.stop_grace_s, self._end_late)
        self._threads = [
            threading.Thread(target=self._watch, name="hetero-watch", daemon=True),
            threading.Thread(target=self._report_regularly, name="hetero-report", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def register_timer(self, timer: StepTimer) -> None:
        """Include ``timer`` in the reports to the launcher. Each loader has one timer."""
        with self._changed:
            # A script may make several loaders with the same name. The second one is reported as ``NAME#2``.
            namesakes = sum(known.name == timer.name for known in self._timers)
            self._timers.append(timer)
            self._loaders[id(timer)] = timer.name if not namesakes else f"{timer.name}#{namesakes + 1}"

    def set_counters(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Include the data plane's counters in the reports. The session calls ``counters`` about once a second."""
        self._counters = counters

    def set_profile(self, profile: Callable[[bool], bytes]) -> None:
        """Include in the reports the JSON that ``profile`` returns. Its argument: whether the script has ended."""
        self._profile = profile

    def fail(self, summary: str, detail: str, exit_code: ExitCode, *, is_consequence: bool = False) -> None:
        """Report to the launcher why this rank fails, before other hosts notice that it has ended.

        Args:
            summary: Reason, one line.
            detail: Traceback.
            exit_code: Exit code of this process.
            is_consequence: Whether another rank most likely failed before.
        """
        self._failure = self._cause(summary, detail, exit_code, is_consequence=is_consequence)
        self._report()

    def _cause(self, summary: str, detail: str, exit_code: ExitCode, *, is_consequence: bool = False) -> Cause:
        """Return the record of a failure of this rank. The arguments are those of `fail`."""
        return Cause(
            host="",  # the launcher fills it in
            summary=f"rank {self.rank}: {summary}",
            detail=detail,
            exit_code=exit_code,
            is_consequence=is_consequence,
        )

    def check_stop(self, timer: StepTimer) -> None:
        """Count the step that begins now, or end this process if the job is to stop before it.

        A loader calls this at the start of each ``next()``, which is between two steps. Every rank ends after the same
        step. After SIGTERM each rank pauses here and reports how many steps of each loader it has started. See
        `hetero.control.stop_points.stop_point` for the decision that follows.

        Args:
            timer: Timer of the loader, registered before.

        Raises:
            SystemExit: After the stop callbacks ran, with status 143, or 30 if one failed. See `stopped`.
        """
        loader = self._loaders[id(timer)]
        with self._changed:
            # Wait until the last step of all ranks is decided. Report now, because the decision needs all ranks.
            if self._stop_requested and self._stop_at is None:
                self._report_now.set()
                if not self._changed.wait_for(lambda: self._stop_at is not None, _DECISION_TIMEOUT_S):
                    logger.warning(
                        "received no decision where to stop within %.0f s; stopping before this step",
                        _DECISION_TIMEOUT_S,
                    )
                    self._stop_at = StopPoint(loader="", steps=0)
            if not self._is_reached(loader):
                self._steps_started[loader] += 1
                self._latest_loader = loader
                return
        self.end()

    def check_wait(self, is_starved: bool) -> None:
        """End this process if the job was asked to stop and the awaited batch will not come.

        A loader that is blocked in ``next()``, which is between two steps, calls this about twice a second.

        Args:
            is_starved: Whether no endpoint serves at the moment.

        Raises:
            SystemExit: As `check_stop` does.
        """
        if self.must_end_wait(is_starved):
            self.end()

    def must_end_wait(self, is_starved: bool) -> bool:
        """Return whether `check_wait` would end the process. Threads other than the script's call this."""
        is_over = self._late_stop.is_wait_over(is_starved=is_starved) and self._stop_at is not None
        if is_over:
            logger.warning("the job was asked to stop and the next batch has not arrived; stopping before that batch")
        return is_over

    def take_late_stops(self) -> None:
        """Let this process end even if it begins no further step, see `LateStop`. Call this on the main thread."""
        self._late_stop.install()

    def close(self, *, finished: bool = True) -> bool:
        """Send the last report and disconnect. Return whether the launcher answered. Idempotent."""
        # The last report was sent already.
        if self._closing.is_set():
            return True
        self._closing.set()
        self._report_now.set()
        is_answered = self._report(finished=finished)
        self._link.cancel()
        for thread in self._threads:
            thread.join(END_TIMEOUT_S)
        self._link.close()
        return is_answered

    def end(self) -> NoReturn:
        """Run the stop callbacks and end this process by `SystemExit`. Call this on the script's thread."""
        # Set this first, because a callback may take long, and `_end_late` must not run the callbacks again.
        self.stopped = True
        if self.options.profile:
            if _callbacks:
                logger.info("the stop callbacks are not called, because a profile run must not write a checkpoint")
            raise SystemExit(EXIT_SIGTERM)
        failures = run_callbacks(_callbacks)
        self.stop_failure = next(iter(failures), None)
        raise SystemExit(int(ExitCode.SCRIPT_FAILED) if failures else EXIT_SIGTERM)

    def _end_late(self) -> None:
        """End this process in the middle of a step, unless it is ending already."""
        if not self.stopped:
            logger.warning("the job was asked to stop and no step has ended since; stopping in the middle of the step")
            self.end()

    def _is_reached(self, loader: str) -> bool:
        """Return whether this rank must end before it begins the next step of a loader."""
        stop_at = self._stop_at
        if stop_at is None:
            return False
        # Without a loader in the stop point, ranks end before their next step, whatever the loader.
        return not stop_at.loader or (loader == stop_at.loader and self._steps_started[loader] >= stop_at.steps)

    # Threads

    def _watch(self) -> None:
        """Follow the launcher's updates, and connect again after the connection was lost. Runs on a thread."""
        errors = LoggedErrors()
        while not self._closing.is_set():
            with errors.during("following the launcher's directory"):
                try:
                    for update in self._link.watch():
                        self._apply(update)
                except HeteroError as error:
                    if not self._closing.is_set():
                        logger.info("lost the connection to the launcher's directory (%s); connecting again", error)
            self._closing.wait(POLL_S)

    def _apply(self, update: pb.RankUpdate) -> None:
        """Adopt the endpoints, a request to stop, and the stop point of an update."""
        # An entry without an endpoint is a host in service, see `Hub._rank_update`.
        entries = update.endpoints
        with_endpoint = (entry for entry in entries if entry.HasField("endpoint"))
        records = [record_of(EndpointRecord, entry.endpoint, outer=entry) for entry in with_endpoint]
        hosts = [entry.host for entry in entries if not entry.HasField("endpoint")]
        self.directory.replace([record for record in records if record.kind == BATCHES], hosts=hosts)
        self.tf_servers.replace([record for record in records if record.kind != BATCHES], hosts=hosts)
        with self._changed:
            # A request to stop is never withdrawn.
            self._stop_requested = self._stop_requested or update.stop_requested
            if update.HasField("stop_at"):
                self._stop_at = record_of(StopPoint, update.stop_at)
            self._changed.notify_all()
        if update.stop_requested:
            self._late_stop.request()
            self._report_now.set()  # the decision where to stop needs this rank's vote

    def _report_regularly(self) -> None:
        """Report at intervals, and at once after a request to stop. Runs on a thread."""
        errors = LoggedErrors()
        while not self._closing.is_set():
            self._report_now.wait(self._interval_s)
            self._report_now.clear()
            if not self._closing.is_set():
                with errors.during("interrupting this rank"):
                    self._late_stop.interrupt_if_due()
                with errors.during("reporting to the launcher"):
                    self._report()

    def _report(self, *, finished: bool = False) -> bool:
        """Send a report when no other report is being sent. Return whether the launcher answered."""
        with self._reporting:
            return self._send_report(finished)

    def _send_report(self, finished: bool) -> bool:
        """Send a report. ``finished`` says whether the script has ended. Return whether the launcher answered."""
        failure = self._failure
        # Send the failure of a stop callback only in the last report. Earlier it would end the job at once.
        if finished and self.stop_failure is not None:
            failure = self._cause(self.stop_failure.summary, self.stop_failure.detail, ExitCode.SCRIPT_FAILED)
        with self._changed:
            # Read vote and steps under one lock. A vote promises that check_stop() begins no step before the decision.
            reported = self._reported()
            report = RankReport(
                rank=self.rank,
                steps_started={name: count for name, count in self._steps_started.items() if name in reported},
                loader=self._latest_loader,
                waiting=any(timer.is_waiting for timer in self._timers),
                stop_vote=self._stop_requested,
                failure=failure,
                finished=finished,
                generation=self.generation,
            )
            timers = [timer for timer in self._timers if self._loaders[id(timer)] in reported]
        # If this fails, the report is sent without measurements, because failures and votes must arrive.
        with self._summary_errors.during("summing up what this rank measured"):
            # A summary takes milliseconds. Reports with step times are frequent, so they repeat the last summaries.
            now_s = time.monotonic()
            is_last = finished or report.failure is not None
            is_due = is_last or now_s >= self._next_summaries_s or len(timers) != len(self._summaries)
            if is_due or not self.options.wants_step_times:
                self._next_summaries_s = now_s + _REPORT_INTERVAL_S
                self._summaries = encode_summaries([timer.summary() for timer in timers])
            counters = {} if self._counters is None else dict(self._counters())
            times = self._step_times(timers) if self.options.wants_step_times else None
            report = dataclasses.replace(report, summaries_json=self._summaries, counters=counters, step_times=times)
            if self._profile is not None:
                report = dataclasses.replace(report, profile_json=self._profile(finished))
        version, metrics = self.metrics.since(self._metrics_sent)
        report = dataclasses.replace(report, metrics=metrics)
        if is_answered := self._link.report(pb.RankReport(**fields_of(report))):
            self._metrics_sent = version
        return is_answered

    def _step_times(self, timers: Sequence[StepTimer]) -> StepTimes | None:
        """Return the latest steps of the loader that has taken the most time. None before its first step."""
        found = {self._loaders[id(timer)]: timer.recent() for timer in timers}
        loader = max(found, key=lambda name: found[name].total_s, default="")
        # Stay with the loader of the last report, unless another one has taken much more time.
        reported = found.get(self._timed_loader)
        if reported is not None and found[loader].total_s < _OVERTAKES * reported.total_s:
            loader = self._timed_loader
        steps = found.get(loader)
        if steps is None or not steps.compute_s:
            return None
        self._timed_loader = loader
        return StepTimes(loader=loader, first=steps.first, compute_s=steps.compute_s, wait_s=steps.wait_s)

    def _reported(self) -> frozenset[str]:
        """Return the loaders to report: all, or the busiest if there are too many, such as one per validation."""
        names = set(self._loaders.values())
        if len(names) > MAX_LOADERS:
            # Always report the loader whose step began last, so leave one place for this loader.
            names = {name for name, _ in self._steps_started.most_common(MAX_LOADERS - 1)} | {self._latest_loader}
        return frozenset(names)


def connect(environ: Mapping[str, str] = os.environ) -> RankSession | None:
    """Connect this process to its launcher. Return None if no launcher started it.

    Raises:
        HeteroError: If there is a launcher but it cannot be reached.
    """
    global _session
    launcher = environ.get(LAUNCHER_VARIABLE)
    if not launcher:
        return None
    token = security.token_from_environment(environ)
    tls_dir = environ.get(TLS_VARIABLE)
    _session = RankSession(
        launcher,
        token,
        job_id=environ["HETERO_JOB_ID"],
        rank=int(environ.get("RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        generation=int(environ.get(RESTART_VARIABLE, "0")),
        tls=Tls(Path(tls_dir), environ[HOST_VARIABLE]) if tls_dir else None,
    )
    return _session


def use(session: RankSession) -> None:
    """Set the session of this process, if `connect` has not made it."""
    global _session
    _session = session


def current() -> RankSession | None:
    """Return this rank's session, or None in a process that no launcher started."""
    return _session


def is_child_of_rank() -> bool:
    """Return whether a rank of a job with endpoints started this process. It then has no session."""
    return _session is None and LAUNCHER_VARIABLE in os.environ and os.environ.get(REMOTE_VARIABLE) == "1"


def on_stop(callback: Callable[[], object]) -> Callable[[], object]:
    """Register a callback for a stop of the job, for example to save a checkpoint.

    Callbacks run on each rank between two steps, on all ranks after the same step, in the order of registration. Then
    the script ends by `SystemExit`. The ranks end with status 0 and the job ends with status 143. A rank that does not
    reach the end of a step runs them in the middle of the step, after half of the grace. See
    `hetero.control.rank.stopping`. In a process that no launcher started, SIGTERM stops the job, and the process ends
    with status 143. For this, the main thread must register the first callback, because only it handles signals.

    If a callback raises, or exits with a status other than 0, the stop counts as a failure of the job with status 30,
    because the checkpoint may be missing. Later callbacks, and the callbacks of other ranks, still run.

    Args:
        callback: Called without arguments, on the thread that iterates over a loader.

    Returns:
        ``callback``, so it works as a decorator.
    """
    if not _callbacks and LAUNCHER_VARIABLE not in os.environ and threading.current_thread() is threading.main_thread():
        record_requests()
    _callbacks.append(callback)
    return callback


def check_stop(timer: StepTimer) -> None:
    """End the job here if it was asked to stop. A loader calls this with its timer before each step.

    Raises:
        SystemExit: After the stop callbacks ran.
    """
    if _session is not None:
        _session.check_stop(timer)
    else:
        end_if_requested(_callbacks)


def end_if_stopping() -> None:
    """End this process if the job was asked to stop. A loader calls this after it has lost a worker.

    Raises:
        SystemExit: After the stop callbacks ran.
    """
    if _session is None:
        end_if_requested(_callbacks)
    elif _session._stop_requested:
        _session.end()


def _after_fork_in_child() -> None:
    """Leave the parent's session, whose threads the child lacks. `_inherited` keeps its connections as they are."""
    global _session
    if _session is not None:
        _inherited.append(_session)
        _session = None


os.register_at_fork(after_in_child=_after_fork_in_child)
