"""The steps of a host, and the means over a window of them. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hetero.control.status import RankReport

__all__ = ["JoinedSteps", "StepTime", "Window"]

_PAUSE = 3.0
"""Factor by which the compute of a step must exceed the median step for the step to count as one with a pause. Test:
``test_pauses_of_the_loop_do_not_mislead_the_controller``."""


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
    """Means over successive steps, in seconds."""

    step_s: float
    wait_s: float

    @classmethod
    def of(cls, steps: Sequence[StepTime]) -> Window:
        """Return the means over at least one step.

        Steps with a pause are left out. A pause is an evaluation or a checkpoint inside of the loop, and counts as
        compute. A pause of seconds would hide what endpoints do to steps of milliseconds.
        """
        longest_s = _PAUSE * statistics.median(step.total_s for step in steps)
        # Not empty, because at least half of the steps are not longer than the median.
        without_pause = [step for step in steps if step.compute_s <= longest_s]
        return cls(
            step_s=statistics.fmean(step.total_s for step in without_pause),
            wait_s=statistics.fmean(step.wait_s for step in without_pause),
        )

    @property
    def wait_share(self) -> float:
        """Data wait / step time, in [0, 1]."""
        return self.wait_s / self.step_s if self.step_s > 0 else 0.0


class JoinedSteps:
    """The steps of a host, each known once every rank of the host has reported it.

    The data wait of a step is the longest data wait of its ranks, and the time of a step is the longest time of its
    ranks. `take` gives the reason.

    Args:
        num_ranks: Ranks of the host.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._next_step = 0
        """Number of the next step to return."""
        self.loader = ""
        """Loader of the steps. Empty until it is known."""

    def restart(self) -> None:
        """Begin anew with the first step, because the ranks were restarted."""
        self._next_step = 0
        self.loader = ""

    def take(self, reports: Sequence[RankReport]) -> list[StepTime]:
        """Return the steps that all ranks have reported since the last call.

        Ranks end a step together. A rank whose batch came early waits inside of its compute for the rank whose batch
        came last. So a rank's own compute includes waits for data, and only the longest time minus the longest data
        wait is compute.

        Args:
            reports: The latest report of each rank. A report repeats the latest steps of its rank.
        """
        times = [report.step_times for report in reports if report.step_times is not None]
        loaders = {each.loader for each in times}
        if len(times) < self._num_ranks or len(loaders) != 1:
            return []
        # Ranks report the steps of the loader that takes the most time. Early in the job, another loader may begin to
        # take the most, for example the one for training instead of the one for validation. The steps of another loader
        # count from 0.
        if loaders != {self.loader}:
            (self.loader,) = loaders
            self._next_step = 0
        # A report has the times of some successive steps. Only steps that are in the reports of all ranks count.
        begin = max(self._next_step, *(each.first for each in times))
        end = min(each.first + len(each.wait_s) for each in times)
        # If the reports have no step in common yet, `end` is before `begin`.
        self._next_step = max(begin, end)
        steps = []
        for number in range(begin, end):
            wait_s = max(each.wait_s[number - each.first] for each in times)
            total_s = max(each.compute_s[number - each.first] + each.wait_s[number - each.first] for each in times)
            steps.append(StepTime(compute_s=total_s - wait_s, wait_s=wait_s))
        return steps
