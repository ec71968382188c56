"""Compares forecasts with whole jobs. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from canary_jobs.jobs import Job
from hetero.decide.canary.forecast import ForecastOptions, forecast
from hetero.decide.canary.model import Candidate
from hetero.decide.canary.points import CanaryPoint
from hetero.decide.canary.refusals import ran_out_of_memory

__all__ = [
    "LIMITS",
    "LimitJudgement",
    "Outcome",
    "Score",
    "facts_of",
    "judged_limits",
    "score",
    "summary",
]

LIMITS = (0.7, 0.85, 1.15, 1.3)
"""Memory limits that the forecasts are judged by, as shares of the whole's actual peak."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitJudgement:
    """What the forecast of one job says of a memory limit."""

    job: str
    share: float
    """The limit as a share of the actual peak."""
    said: float
    """Probability that the job needs more."""

    @property
    def is_wrong(self) -> bool:
        """Whether the more probable answer is not the true one."""
        return (self.said >= 0.5) != (self.share < 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one job showed."""

    job: Job
    shown: Candidate
    actual: CanaryPoint
    """The whole run."""
    stamp: Mapping[str, str]
    """Date and commit of the first of the runs."""

    @property
    def rules(self) -> tuple[str, ...]:
        """Rules that refused the time."""
        return tuple(dict.fromkeys(refusal.rule for refusal in self.shown.refused("time")))

    @property
    def is_missed(self) -> bool:
        """Whether the job must be refused, and none of the rules that know why refused it."""
        return bool(self.job.refused_by) and not set(self.rules) & set(self.job.refused_by)

    @property
    def failed_unexpectedly(self) -> bool:
        """Whether the whole failed, except for a lack of memory in a job with a limit."""
        is_expected = self.job.limit_mib is not None and ran_out_of_memory(self.actual)
        return bool(self.actual.failure) and not is_expected

    @property
    def scores(self) -> list[Score]:
        """The figures, if the whole finished."""
        return [] if self.actual.failure else score(self.job.name, self.shown, facts_of(self.actual))


def score(job: str, shown: Candidate, actual: Mapping[str, float]) -> list[Score]:
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


def judged_limits(outcome: Outcome) -> list[LimitJudgement]:
    """Return what the forecast says of each of `LIMITS`. Empty if the memory was refused or its peak is not known."""
    peak = outcome.actual.resources.memory_peak_bytes
    if outcome.actual.failure or peak is None or outcome.shown.refused("memory peak"):
        return []
    candidates = [replace(outcome.shown, memory_limit_bytes=share * peak) for share in LIMITS]
    return [
        LimitJudgement(job=outcome.job.name, share=share, said=said)
        for share, candidate in zip(LIMITS, candidates, strict=True)
        if (said := forecast(candidate, ForecastOptions()).candidate.out_of_memory) is not None
    ]


def facts_of(point: CanaryPoint) -> dict[str, Any]:
    """Return the figures of a whole run by the names of a forecast's figures."""
    resources = point.resources
    found: dict[str, Any] = {
        "time": point.wall_s,
        "CPU mean": resources.cpu_percent_mean,
        "memory mean": resources.memory_mean_bytes,
        "memory p99": resources.memory_p99_bytes,
        "memory peak": resources.memory_peak_bytes,
    }
    percents = sorted(resources.cpu_percents)
    found["CPU p99"] = percents[min(len(percents) - 1, int(0.99 * len(percents)))] if percents else None
    return {name: value for name, value in found.items() if value is not None}


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
