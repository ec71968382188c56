"""Compares forecasts with what the whole jobs did. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero.canary.forecast import Candidate, ForecastOptions, forecast
from hetero.canary.model import CandidateForecast

__all__ = ["ENOUGH", "Score", "frugal", "score", "summary"]

ENOUGH = 0.15
"""Half-width of the interval at which `frugal` begins no more runs."""
MEMORY = ("memory mean", "memory p99", "memory peak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One figure of one job."""

    job: str
    figure: str
    forecast: float
    low: float
    high: float
    actual: float
    refused: tuple[str, ...]
    """Rules that refused it."""

    @property
    def error(self) -> float:
        """Forecast over actual, minus 1."""
        return self.forecast / self.actual - 1

    @property
    def is_covered(self) -> bool:
        """Whether the interval contains the actual value."""
        return self.low <= self.actual <= self.high


def score(job: str, shown: CandidateForecast, actual: Mapping[str, float]) -> list[Score]:
    """Return the scores of the figures that the whole run has too."""
    return [
        Score(
            job=job,
            figure=figure.name,
            forecast=figure.value,
            low=figure.low,
            high=figure.high,
            actual=actual[figure.name],
            refused=tuple(dict.fromkeys(refusal.rule for refusal in shown.refused(figure.name))),
        )
        for figure in shown.figures
        if actual.get(figure.name)
    ]


def frugal(shown: CandidateForecast, order: Sequence[str]) -> tuple[CandidateForecast, int]:
    """Return the forecast that ``--enough 15%`` would have given, and the number of runs that it needed.

    Args:
        shown: The forecast from all runs.
        order: Ids of the runs in the order of their execution.
    """
    points = sorted(shown.points, key=lambda point: order.index(point.run_id))
    for number in range(4, len(points) + 1):
        candidate = Candidate(
            name=shown.name,
            groups=shown.groups,
            points=tuple(points[:number]),
            hourly_usd=shown.hourly_usd,
            memory_limit_bytes=shown.memory_limit_bytes,
        )
        found = forecast(candidate, ForecastOptions()).shown
        time = found.figure("time")
        if time is not None and not found.refused("time") and time.half_width <= ENOUGH:
            break
    return found, number


def summary(scores: Sequence[Score]) -> dict[str, Any]:
    """Return the figures that have bounds."""
    given = [each for each in scores if not each.refused]
    times = [abs(each.error) for each in given if each.figure == "time"]
    memory = [abs(each.error) for each in given if each.figure == "memory peak"]
    covered = [each.is_covered for each in given]
    return {
        "time_median": statistics.median(times) if times else None,
        "time_max": max(times, default=None),
        "memory_median": statistics.median(memory) if memory else None,
        "coverage": sum(covered) / len(covered) if covered else None,
        "coverage_by_figure": {
            name: [sum(found), len(found)]
            for name in dict.fromkeys(each.figure for each in given)
            if (found := [each.is_covered for each in given if each.figure == name])
        },
        "num_intervals": len(covered),
        "num_times": len(times),
    }
