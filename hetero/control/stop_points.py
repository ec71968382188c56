"""Where the ranks of a job end together after a request to stop. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hetero.control.status import RankReport, StopPoint

__all__ = ["stop_point"]


def stop_point(reports: Sequence[RankReport]) -> StopPoint:
    """Return the point where ranks that run the same loop end together.

    The point is in a loader that all ranks have used. If there are several such loaders, the point is in the loader
    that most ranks use now. The number of steps comes from the most advanced rank.

    Args:
        reports: Reports of ranks that have paused.
    """
    started = [set(report.steps_started) for report in reports]
    # If the ranks share no loader, consider all loaders.
    loaders = set.intersection(*started) or set.union(*started) if started else set()
    # Without any loader, no rank has begun a step. An empty name lets each rank end before its next step.
    if not loaders:
        return StopPoint(loader="", steps=0)

    def steps(loader: str) -> int:
        return max(report.steps_started.get(loader, 0) for report in reports)

    def num_ranks_in(loader: str) -> int:
        return sum(report.loader == loader for report in reports)

    # On a tie, use the loader with fewer steps. It may be a validation that the other ranks will begin too.
    chosen = min(loaders, key=lambda loader: (-num_ranks_in(loader), steps(loader), loader))
    return StopPoint(loader=chosen, steps=steps(chosen))
