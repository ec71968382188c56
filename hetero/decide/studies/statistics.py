"""Statistics of a study: means with intervals, time to quality, and quality after time. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.decide.studies.study_file import Metric
from hetero.metrics.logged import LoggedMetric

__all__ = [
    "Interval",
    "best_value",
    "f_tail",
    "interval_of",
    "quality_after",
    "series_of",
    "t_quantile",
    "time_to_quality",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    low: float | None
    """None with one value, which gives no interval."""
    high: float | None


def interval_of(values: Sequence[float], *, is_positive: bool = False) -> Interval | None:
    """Return the mean of independent values with its 95 % interval by Student's t distribution. None without values.

    Args:
        values: Finite numbers, one per replicate.
        is_positive: Whether the values are times or amounts. If so, the interval is computed for the logarithm of the
            mean, so it never contains 0 or less. The standard error of this logarithm is the mean's standard error
            divided by the mean.
    """
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean=mean, low=None, high=None)
    std = statistics.stdev(values)
    half = t_quantile(len(values) - 1, coverage=0.95) * std / math.sqrt(len(values))
    low, high = mean - half, mean + half
    # Two replicates that differ much once had an interval with seconds and dollars below zero.
    if is_positive and mean > 0:
        low, high = mean * math.exp(-half / mean), mean * math.exp(half / mean)
    return Interval(mean=mean, low=low, high=high)


def t_quantile(freedom: int, coverage: float) -> float:
    """Return t such that Student's distribution has ``coverage`` of its mass between -t and t.

    Args:
        freedom: Degrees of freedom, at least 1.
        coverage: In (0, 1), for example 0.95.
    """
    # The square of a variable with this distribution has the F distribution with 1 and `freedom` degrees. So
    # 1 - `f_tail` is the coverage. Find an upper bound first, then ever closer bounds by bisection.
    low, high = 0.0, 1.0
    while 1 - f_tail(high**2, first=1, second=freedom) < coverage:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        # Stop if no floating point number is between the bounds.
        if middle in (low, high):
            break
        if 1 - f_tail(middle**2, first=1, second=freedom) < coverage:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def f_tail(ratio: float, first: int, second: int) -> float:
    """Return the probability that an F variable exceeds a ratio, by Simpson's rule on its beta integral.

    Args:
        ratio: The ratio.
        first: Degrees of freedom of the numerator.
        second: Degrees of freedom of the denominator.
    """
    # The package must be importable without NumPy, which a plan of runs does not need.
    import numpy as np

    if ratio <= 0:
        return 1.0
    # With t = sin^2(u), the beta integral is smooth: 2 sin^(2a-1)(u) cos^(2b-1)(u) du.
    a, b = first / 2, second / 2
    end = math.asin(math.sqrt(first * ratio / (first * ratio + second)))
    log_beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    u = np.linspace(0.0, end, 2001)
    values = 2 * np.sin(u) ** (2 * a - 1) * np.cos(u) ** (2 * b - 1)
    step = end / 2000
    # Simpson's weights: 1, 4, 2, 4, 2, ..., 4, 1.
    weights = np.ones(2001)
    weights[1:-1:2], weights[2:-1:2] = 4, 2
    share_below = step / 3 * float(weights @ values) / math.exp(log_beta)
    # Keep a rounding error within the bounds of a probability.
    return min(1.0, max(0.0, 1.0 - share_below))


def series_of(metrics: Iterable[LoggedMetric], name: str) -> list[LoggedMetric]:
    """Return the values of one metric in the order of their times, from the lowest rank that logged it."""
    found = [value for value in metrics if value.name == name]
    rank = min((value.rank for value in found), default=0)
    return sorted((value for value in found if value.rank == rank), key=lambda value: value.at_s)


def time_to_quality(metrics: Iterable[LoggedMetric], metric: Metric) -> float | None:
    """Return the seconds from the start of the run until the metric first reached its target. None if it did not.

    Values without a wall-clock time are left out. They are final values, and the time when they were reached is not
    known.
    """
    series = _timed(series_of(metrics, metric.name))
    return next((value.at_s for value in series if metric.reaches(value.value)), None)


def quality_after(metrics: Iterable[LoggedMetric], metric: Metric, seconds: float) -> float | None:
    """Return the best value that was logged at most ``seconds`` after the start of the run. None without a value."""
    series = _timed(series_of(metrics, metric.name))
    return best_value((value for value in series if value.at_s <= seconds), metric)


def _timed(series: Sequence[LoggedMetric]) -> list[LoggedMetric]:
    return [value for value in series if value.unix_s]


def best_value(metrics: Iterable[LoggedMetric], metric: Metric) -> float | None:
    """Return the best value of a metric, or None without a value."""
    values = [value.value for value in series_of(metrics, metric.name)]
    return (max if metric.goal == "max" else min)(values, default=None)
