"""The steps of a host, figures of a window of them, and whether two windows really differ. Pure."""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.control.status import RankReport

__all__ = ["JoinedSteps", "StepTime", "Verdict", "Window", "compare"]

_NUM_BLOCKS = 8
_ERRORS = 3.0
"""Two means differ if they are this number of standard errors apart. With eight blocks on each side, chance alone
exceeds it in about one of 100 comparisons."""
_PAUSE = 3.0
"""Factor by which the compute of a step must exceed the median for the step to count as one with a pause."""
_MAX_PAUSES = 0.25
"""Largest share of steps with pauses. More than that are no pauses."""
_MIN_DIFFERENCE = 0.01
"""Smallest relative difference of two step times that matters."""


class Verdict(enum.Enum):
    """The step time of a window, compared with that of an earlier one."""

    SHORTER = "shorter"
    SAME = "same"
    LONGER = "longer"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One step of the ranks of a host. The slowest rank counts."""

    compute_s: float
    wait_s: float
    """Data wait: time blocked in ``next()``."""

    @property
    def total_s(self) -> float:
        """The step's time in seconds."""
        return self.compute_s + self.wait_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Means over successive steps, each with its standard error, in seconds."""

    num_steps: int
    """All steps, also those that the means leave out."""
    step_s: float
    step_error_s: float
    compute_s: float
    wait_s: float
    wait_error_s: float

    @classmethod
    def of(cls, steps: Sequence[StepTime]) -> Window:
        """Return the figures of at least one step.

        The means leave out steps with a pause: an evaluation or a checkpoint inside of the loop, which counts as
        compute. A pause of seconds would hide what endpoints do to steps of milliseconds.
        """
        num_steps = len(steps)
        steps = _without_pauses(steps)
        totals_s = [step.total_s for step in steps]
        waits_s = [step.wait_s for step in steps]
        return cls(
            num_steps=num_steps,
            step_s=_mean(totals_s),
            step_error_s=_error(totals_s),
            compute_s=_mean([step.compute_s for step in steps]),
            wait_s=_mean(waits_s),
            wait_error_s=_error(waits_s),
        )

    @property
    def wait_share(self) -> float:
        """Data wait / step time, in [0, 1]."""
        return self.wait_s / self.step_s if self.step_s > 0 else 0.0

    def surely_waits(self, share: float) -> bool:
        """Return whether the data wait exceeds ``share`` of the step time by two standard errors or more."""
        return self.wait_s - 2 * self.wait_error_s > share * self.step_s


def compare(before: Window, after: Window) -> Verdict:
    """Return whether steps became shorter or longer.

    The means differ if their difference exceeds three standard errors and 1 % of the time before.
    """
    bound_s = max(
        _ERRORS * math.hypot(before.step_error_s, after.step_error_s),
        _MIN_DIFFERENCE * before.step_s,
    )
    if after.step_s - before.step_s > bound_s:
        return Verdict.LONGER
    return Verdict.SHORTER if before.step_s - after.step_s > bound_s else Verdict.SAME


def _without_pauses(steps: Sequence[StepTime]) -> Sequence[StepTime]:
    """Return the steps whose compute is not much longer than usual. If many are longer, return all."""
    usual_s = statistics.median(step.compute_s for step in steps)
    bound_s = max(_PAUSE * usual_s, statistics.median(step.total_s for step in steps) / 2)
    kept = [step for step in steps if step.compute_s <= bound_s]
    return kept if len(kept) >= (1 - _MAX_PAUSES) * len(steps) else steps


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, infinite for a single value.

    Steps that follow each other are not independent, because batches come in bursts. Therefore the error comes from
    the means of eight blocks of successive steps.
    """
    size = max(1, len(values) // _NUM_BLOCKS)
    blocks = [_mean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    if len(blocks) < 2:
        return math.inf
    mean = _mean(blocks)
    variance = sum((block - mean) ** 2 for block in blocks) / (len(blocks) - 1)
    return math.sqrt(variance / len(blocks))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class JoinedSteps:
    """The steps of a host, each known once every rank of the host has reported it.

    Ranks take their steps together, so the rank with the longest data wait holds up the others. The other ranks wait
    for it inside of their compute. Therefore the data wait of a step is the longest of its ranks, and so is its time.

    Args:
        num_ranks: Ranks of the host.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._next = 0
        self.loader = ""
        """Loader of the steps. Empty until it is known."""

    def restart(self) -> None:
        """Begin anew with the first step, because the ranks were restarted."""
        self._next = 0
        self.loader = ""

    def take(self, reports: Sequence[RankReport]) -> list[StepTime]:
        """Return the steps that all ranks have reported since the last call.

        Args:
            reports: The latest report of each rank. A report repeats the latest steps of its rank.
        """
        times = [report.step_times for report in reports if report.step_times is not None]
        loaders = {each.loader for each in times}
        if len(times) < self._num_ranks or len(loaders) != 1:
            return []
        # The loader that takes the most time may change early in the job, for example from validation to training.
        if loaders != {self.loader}:
            (self.loader,) = loaders
            self._next = 0
        begin = max(self._next, *(each.first for each in times))
        end = min(each.first + len(each.wait_s) for each in times)
        self._next = max(begin, end)
        found = []
        for number in range(begin, end):
            wait_s = max(each.wait_s[number - each.first] for each in times)
            total_s = max(each.compute_s[number - each.first] + each.wait_s[number - each.first] for each in times)
            found.append(StepTime(compute_s=total_s - wait_s, wait_s=wait_s))
        return found
