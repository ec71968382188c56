"""Executes the runs of a study that its ledger does not have yet, within its budget.

The main thread decides which run begins, and writes the ledger. A thread of a pool executes each run. Before a run, the
main thread adds the expected duration and cost of the run to the sums of the runs so far. If a sum passes the budget,
the run does not start. If the real sums pass the budget while runs execute, the main thread stops these runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hetero.decide.studies.ledger import RUNS_FOLDER, Ledger, RecordedRuns
from hetero.decide.studies.runs import FAILED, FINISHED, STOPPED, Billing, Executor, PlannedRun, RunResult
from hetero.decide.studies.study_file import Budget
from hetero.errors import BudgetError, ConfigError

__all__ = ["Estimates", "Progress", "conduct", "read_results"]

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 5.0
"""Seconds between two looks at the runs. The budget is passed by at most this time. If a study is killed, the end of
its run is known this exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """State of a study after a run began or ended."""

    run: PlannedRun
    result: RunResult | None
    """How the run ended. None if it begins."""
    num_done: int
    num_total: int
    num_failed: int
    left_s: float | None
    """Expected wall time of the runs that have not ended. None if no duration is known."""
    left_usd: float | None
    num_unknown: int
    """Runs without an expected duration, which `left_s` and `left_usd` leave out."""


class _Running(NamedTuple):
    """A run that is being executed."""

    run: PlannedRun
    started_s: float
    """Monotonic time of its start."""


@dataclass(slots=True)
class _Session:
    """The state of one start of a study."""

    runs: Sequence[PlannedRun]
    executor: Executor
    folder: Path
    ledger: Ledger
    budget: Budget
    estimates: Estimates
    on_progress: Callable[[Progress], object] | None
    prices: Mapping[str, float | None]
    """USD per hour of each run by its id."""
    skips_failed_groups: bool = False
    failed_groups: set[tuple[str, ...]] = field(default_factory=set)
    """Groups that begin no more runs, because one failed."""
    running: dict[Future[RunResult], _Running] = field(default_factory=dict)
    stop_reason: str = ""
    error: Exception | None = None
    """Why the study ends after the runs that are being executed."""

    def go(self, pending: list[PlannedRun]) -> None:
        """Execute the pending runs. `stop_reason` says why some did not run.

        If a run cannot be executed, no more runs begin. The runs that are being executed may end first, because they
        have cost money. Then the error is raised.
        """
        with ThreadPoolExecutor(self.executor.max_parallel, thread_name_prefix="study-run") as pool:
            try:
                while pending or self.running:
                    refusal = self._start_some(pool, pending)
                    # End only if no run is being executed. If one is, it may take less than expected, and the next run
                    # may start then.
                    if not self.running:
                        self.stop_reason = self.stop_reason or refusal
                        return
                    self._await_some(pending)
                if self.error is not None:
                    raise self.error
            # After any error or Ctrl-C, stop the runs and record what they cost.
            except BaseException:
                self.executor.stop()
                self._end_all()
                raise

    def _start_some(self, pool: ThreadPoolExecutor, pending: list[PlannedRun]) -> str:
        """Start runs while there is room. Return why the next one may not start, or an empty text."""
        while pending and len(self.running) < self.executor.max_parallel:
            run = pending[0]
            # Check the budget before the start, because a run that is stopped in the middle costs money and measures
            # nothing.
            refusal = self._refusal(run)
            if refusal:
                return refusal
            pending.pop(0)
            folder = self.folder / RUNS_FOLDER / run.run_id
            folder.mkdir(parents=True, exist_ok=True)
            # Write to the disk before the run begins. If the study is killed between the two, its next start must know
            # that the run may have cost something.
            self.ledger.start(run, self.prices[run.run_id])
            future = pool.submit(self.executor.execute, run, folder)
            self.running[future] = _Running(run, time.monotonic())
            self._report(run, result=None)
        return ""

    def _await_some(self, pending: list[PlannedRun]) -> None:
        """Wait until a run ends or the next look is due. Record ended runs, and stop all if the budget is passed."""
        # The ledger notes every few seconds that a run is alive. If the study is killed, the run counts with its cost
        # until the last note.
        for running in self.running.values():
            self.ledger.record_alive(running.run)
        done, _ = wait(self.running, timeout=_LOOK_INTERVAL_S, return_when=FIRST_COMPLETED)
        for future in done:
            error = future.exception()
            if isinstance(error, Exception):
                name = self.running.pop(future).run.run_id
                # `go` raises the error after the other runs. Log the error now, because they may take long.
                if self.running:
                    logger.error("run %s cannot be executed, so no more runs begin: %s", name, error)
                self.error = self.error or error
                pending.clear()
            else:
                # An error such as KeyboardInterrupt is no Exception. `_end` raises it, and `go` then stops all runs.
                self._end(future)
                # Change the list in place, because `go` looks at the same list.
                pending[:] = [run for run in pending if run.groups not in self.failed_groups]
        # If a run has ended, check the budget at the next look, with its real cost.
        if not done and not self.stop_reason and (passed := self._passed()):
            self.stop_reason = passed
            logger.warning("%s; stopping %s", passed, ", ".join(each.run.run_id for each in self.running.values()))
            pending.clear()
            self.executor.stop()

    def _end(self, future: Future[RunResult], *, why_stopped: str = "") -> None:
        """Record the result of a run that has ended."""
        run = self.running.pop(future).run
        result = replace(future.result(), levels=run.levels, replicate=run.replicate)
        why = why_stopped or self.stop_reason
        # A run reports a failure after it was asked to stop. The study caused this, so record the run as stopped.
        if why and result.state == FAILED:
            result = replace(result, state=STOPPED, cause=why)
        if self.skips_failed_groups and result.state == FAILED:
            self.failed_groups.add(run.groups)
            logger.error("run %s failed, so no more runs of this cluster begin", result.run_id)
        self.ledger.end(run, result)
        # Forget a stopped job, because the next start would follow it instead of running it again.
        if result.state == STOPPED:
            self.ledger.forget_job(result.run_id)
        self.estimates.add(run, result)
        self._report(run, result)

    def _end_all(self) -> None:
        """Wait for runs that were asked to stop, and record them."""
        for future in list(self.running):
            try:
                # This call waits until the run has ended.
                future.exception()
                self._end(future, why_stopped="the study was interrupted")
            except Exception as error:  # noqa: BLE001  the ledger keeps the run as interrupted
                logger.error("a run of the study ended without a result: %s", error)
                self.running.pop(future, None)

    # The budget

    def _refusal(self, run: PlannedRun) -> str:
        """Return why a run may not start: its expected cost or time would pass the budget. Empty if it may."""
        # If the expected duration is unknown, 0 is added. The run is then stopped when the budget is really passed.
        expected_s = self.estimates.expected_s(run) or 0.0
        # A run that takes longer than expected counts with its time so far.
        running = [
            (each.run, max(self.estimates.expected_s(each.run) or 0.0, self._elapsed_s(each)))
            for each in self.running.values()
        ]
        spent_s, spent_usd = self.ledger.spent_s, self.ledger.spent_usd
        # A budget that is spent allows no run, not even one whose expected duration is 0.
        if self.budget.hours is not None:
            limit_s = 3600 * self.budget.hours
            running_s = sum(seconds for _, seconds in running)
            if spent_s + running_s + expected_s > limit_s or spent_s >= limit_s:
                return (
                    f"the budget of {self.budget.hours:g} h does not allow run {run.run_id}: {spent_s / 3600:.2f} h "
                    f"are spent, and it is expected to take {expected_s / 3600:.2f} h"
                )
        if self.budget.usd is not None:
            expected_usd = self._usd(run, expected_s)
            running_usd = sum(self._usd(*each) for each in running)
            if spent_usd + running_usd + expected_usd > self.budget.usd or spent_usd >= self.budget.usd:
                return (
                    f"the budget of USD {self.budget.usd:g} does not allow run {run.run_id}: USD {spent_usd:.2f} are "
                    f"spent, and it is expected to cost USD {expected_usd:.2f}"
                )
        return ""

    def _passed(self) -> str:
        """Return which budget the runs that are being executed have passed, or an empty text."""
        elapsed_s = {each.run.run_id: self._elapsed_s(each) for each in self.running.values()}
        usd = sum(self._usd(each.run, elapsed_s[each.run.run_id]) for each in self.running.values())
        if self.budget.hours is not None and self.ledger.spent_s + sum(elapsed_s.values()) >= 3600 * self.budget.hours:
            return f"the budget of {self.budget.hours:g} h is spent"
        if self.budget.usd is not None and self.ledger.spent_usd + usd >= self.budget.usd:
            return f"the budget of USD {self.budget.usd:g} is spent"
        return ""

    def _elapsed_s(self, running: _Running) -> float:
        """Return the time of a run so far that counts against the budget."""
        # Ask the executor for the billed time, because a job that waits for its instances costs nothing. By the clock,
        # two hours of waiting once spent the budget.
        if isinstance(self.executor, Billing):
            return self.executor.billed_s(running.run)
        return time.monotonic() - running.started_s

    def _usd(self, run: PlannedRun, seconds: float) -> float:
        """Return the cost of a run of this duration. 0 if its price is unknown."""
        return (self.prices[run.run_id] or 0.0) * seconds / 3600

    # Progress

    def left(self) -> list[PlannedRun]:
        """Return the runs that have not ended and will run.

        If `failed_groups` has the groups of a run, the run will not begin. A run that is being executed goes on.
        """
        running = {each.run.run_id for each in self.running.values()}
        return [
            run
            for run in self.runs
            if run.run_id not in self.ledger.results and (run.groups not in self.failed_groups or run.run_id in running)
        ]

    def _report(self, run: PlannedRun, result: RunResult | None) -> None:
        """Call ``on_progress`` with the number of runs that have ended, and the time and cost that are left.

        Args:
            run: The run that begins or has ended.
            result: Its result. None if it begins.
        """
        if self.on_progress is None:
            return
        # The ledger may also have runs that this start leaves out, for example those with other levels.
        own_ids = {each.run_id for each in self.runs}
        ended = {run_id: found for run_id, (_, found) in self.ledger.results.items() if run_id in own_ids}
        left = self.left()
        expected = [(each, self.estimates.expected_s(each)) for each in left]
        known = [(each, seconds) for each, seconds in expected if seconds is not None]
        # Nothing is known if runs are left and none of them has an expected duration. If no run is left, 0 s are left.
        is_known = bool(known) or not left
        is_priced = None not in self.prices.values()
        self.on_progress(
            Progress(
                run=run,
                result=result,
                num_done=len(ended),
                num_total=len(ended) + len(left),
                num_failed=sum(found.state == FAILED for found in ended.values()),
                left_s=sum(seconds for _, seconds in known) if is_known else None,
                left_usd=sum(self._usd(*each) for each in known) if is_known and is_priced else None,
                num_unknown=len(expected) - len(known),
            )
        )


def conduct(
    runs: Sequence[PlannedRun],
    executor: Executor,
    folder: Path,
    *,
    budget: Budget | None = None,
    on_progress: Callable[[Progress], object] | None = None,
    expected_s: Mapping[str, float] | None = None,
    identity: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    fresh: bool = False,
    skips_failed_groups: bool = False,
) -> list[RunResult]:
    """Execute the runs that the ledger in ``folder`` does not have yet, in their order, and return all results.

    If the process is killed, another call goes on after the last run that ended. A run that fails is kept with its
    cause, and the study continues.

    Args:
        runs: The runs, with distinct ids.
        executor: Executes the runs, at most ``executor.max_parallel`` at the same time.
        folder: Folder of the study. Run ``ID`` has the folder ``runs/ID`` in it.
        budget: Limits. The cost of earlier starts counts.
        on_progress: Called on this thread when a run begins and when it ends.
        expected_s: Stated durations by run id, which `Estimates` uses.
        identity: What the study is, for comparison with the ledger. None: no comparison.
        retry_failed: Whether runs that failed run again.
        fresh: Whether to forget the runs of earlier starts.
        skips_failed_groups: Whether no more runs on the same groups begin after one of them fails in this start.

    Raises:
        BudgetError: If the budget does not allow a run, or a run passed it. `read_results` returns what ended.
        ConfigError: If the ledger is of another study, ids are not distinct, prices for a budget in USD are missing, or
            the folder cannot be written to.
        KeyboardInterrupt: After the runs were stopped and recorded.
    """
    if len({run.run_id for run in runs}) < len(runs):
        raise ConfigError("two runs have the same run_id; expected distinct ones")
    budget = Budget() if budget is None else budget
    prices = _prices(runs, executor, budget)
    with _translated(folder), Ledger(folder, identity, fresh=fresh) as ledger:
        if retry_failed:
            ledger.forget_failed()
        estimates = Estimates(expected_s or {})
        for run in runs:
            # The cost of an interrupted run counts against the budget, although the run begins again.
            interrupted = ledger.interrupted(run)
            if interrupted is not None:
                logger.warning("run %s was interrupted after %.0f s and runs again", run.run_id, interrupted.wall_s)
                ledger.end(run, interrupted)
            known = ledger.result(run)
            if known is not None:
                estimates.add(run, known)
        session = _Session(
            runs=runs,
            executor=executor,
            folder=folder,
            ledger=ledger,
            budget=budget,
            estimates=estimates,
            on_progress=on_progress,
            prices=prices,
            skips_failed_groups=skips_failed_groups,
        )
        session.go([run for run in runs if run.run_id not in ledger.results])
        found = _results(ledger, runs)
        num_left = len(session.left())
    if session.stop_reason:
        raise BudgetError(
            f"{session.stop_reason}\n  {num_left} of {len(runs)} runs are left\n"
            "  to do: raise the budget in the study and start it again, which keeps the runs that ended"
        )
    return found


def read_results(
    runs: Iterable[PlannedRun], folder: Path, *, identity: Mapping[str, Any] | None = None
) -> list[RunResult]:
    """Return the results that the ledger in a folder has, in the order of the runs, with their reports.

    It writes nothing, so a study may write to the folder at the same time.

    Raises:
        ConfigError: If the ledger is missing, malformed or of another study.
    """
    return _results(RecordedRuns(folder, identity), runs)


def _results(ledger: RecordedRuns, runs: Iterable[PlannedRun]) -> list[RunResult]:
    return [found for run in runs if (found := ledger.result(run)) is not None]


@contextlib.contextmanager
def _translated(folder: Path) -> Iterator[None]:
    """Turn the errors of files into errors that say what to do."""
    try:
        yield
    # BrokenPipeError means that the reader of the progress has gone. It is no error of a file.
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(
            f"cannot write to {error.filename or folder}: {error.strerror or error}\n"
            "  to do: check its permissions and the free space, or give another --output-dir"
        ) from error


def _prices(runs: Sequence[PlannedRun], executor: Executor, budget: Budget) -> dict[str, float | None]:
    """Return the price of each run. Raise `ConfigError` if one is missing for a budget in USD."""
    prices = {run.run_id: executor.hourly_usd(run) for run in runs}
    unpriced = next((run for run in runs if prices[run.run_id] is None), None)
    if unpriced is not None and budget.usd is not None:
        raise ConfigError(
            f"a budget in USD needs the prices of all hosts, and run {unpriced.run_id} has none "
            f"({', '.join(unpriced.groups) or 'no groups'})\n"
            "  to do: state price_profile, price_file or prices in the study's options; or a budget in hours"
        )
    return prices


class Estimates:
    """Expected durations of runs.

    The first of these that exists counts:

    1. the mean of the finished runs with the same levels,
    2. the stated duration or the longest finished run on the same cluster, whichever is longer, because a budget must
       not be passed.

    Args:
        stated_s: Stated durations in seconds by run id.
    """

    def __init__(self, stated_s: Mapping[str, float]) -> None:
        self._stated_s = stated_s
        self._by_levels: dict[str, list[float]] = {}
        self._by_cluster: dict[str, list[float]] = {}

    def add(self, run: PlannedRun, result: RunResult) -> None:
        """Learn from a run that has ended. Only finished runs count."""
        if result.state == FINISHED:
            self._by_levels.setdefault(_levels_key(run), []).append(result.wall_s)
            self._by_cluster.setdefault(_cluster_key(run), []).append(result.wall_s)

    def expected_s(self, run: PlannedRun) -> float | None:
        """Return the expected wall time of a run in seconds, or None if nothing is known."""
        # Runs with the same levels do the same work, so their mean is the best estimate.
        same_work_s = self._by_levels.get(_levels_key(run))
        if same_work_s:
            return sum(same_work_s) / len(same_work_s)
        # Runs with other levels on the same cluster may do less work than this one. So take the longest time.
        stated_s = self._stated_s.get(run.run_id)
        known_s = [*self._by_cluster.get(_cluster_key(run), ()), *(() if stated_s is None else (stated_s,))]
        return max(known_s, default=None)


def _levels_key(run: PlannedRun) -> str:
    """Return a key that is equal for runs which differ only in their seeds."""
    levels = {name: level for name, level in run.levels.items() if name != "seed"}
    return json.dumps([levels, run.script], sort_keys=True, default=str)


def _cluster_key(run: PlannedRun) -> str:
    """Return a key that is equal for runs on the same hosts with the same launch options."""
    return json.dumps([run.groups, dict(run.options)], sort_keys=True, default=str)
