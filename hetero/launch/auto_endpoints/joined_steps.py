"""Joins the steps that the ranks of a host report. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.control.status import RankReport
from hetero.launch.auto_endpoints.windows import StepTime

__all__ = ["JoinedSteps"]


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
