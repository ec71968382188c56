"""Cost arithmetic: pure functions of prices in USD per hour and times in seconds.

``hourly_usd`` is always the sum over all hosts of the job, because every host is billed until the last one has exited.
"""

from __future__ import annotations

import math

from hetero.errors import ConfigError

__all__ = [
    "break_even_speedup",
    "cost_per_1k_steps_usd",
    "cost_per_million_samples_usd",
    "job_cost_usd",
    "relative_error",
    "saving",
    "speedup",
]


def job_cost_usd(hourly_usd: float, wall_s: float) -> float:
    """Return the cost in USD of running all hosts for ``wall_s`` seconds."""
    return _positive("hourly_usd", hourly_usd) * _positive("wall_s", wall_s) / 3600


def cost_per_1k_steps_usd(hourly_usd: float, step_time_s: float) -> float:
    """Return the cost in USD of 1,000 steps of ``step_time_s`` seconds each."""
    return 1000 * _positive("hourly_usd", hourly_usd) * _positive("step_time_s", step_time_s) / 3600


def cost_per_million_samples_usd(hourly_usd: float, samples_per_s: float) -> float:
    """Return the cost in USD of 10^6 samples, with ``samples_per_s`` summed over all ranks."""
    return 1e6 * _positive("hourly_usd", hourly_usd) / 3600 / _positive("samples_per_s", samples_per_s)


def saving(cost_usd: float, baseline_cost_usd: float) -> float:
    """Return the saving for the same work as a fraction of the baseline's cost, negative if the cost is higher."""
    return 1 - _positive("cost_usd", cost_usd) / _positive("baseline_cost_usd", baseline_cost_usd)


def speedup(step_time_s: float, baseline_step_time_s: float) -> float:
    """Return how many times faster a step is than the same step of the baseline."""
    return _positive("baseline_step_time_s", baseline_step_time_s) / _positive("step_time_s", step_time_s)


def break_even_speedup(hourly_usd: float, baseline_hourly_usd: float) -> float:
    """Return the speed-up above which the job is cheaper on the cluster with the higher hourly price.

    The cost is price times time. The job is therefore cheaper on that cluster if and only if
    ``baseline_step_time / step_time``, which is the speed-up, exceeds ``hourly / baseline_hourly``.
    """
    return _positive("hourly_usd", hourly_usd) / _positive("baseline_hourly_usd", baseline_hourly_usd)


def relative_error(predicted: float, actual: float) -> float:
    """Return ``predicted / actual - 1``, which is positive if the prediction was too high."""
    return _positive("predicted", predicted) / _positive("actual", actual) - 1


def _positive(name: str, value: float) -> float:
    """Return the value. Raise `ConfigError` unless it is finite and above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} is {value}; it must be finite and above 0")
    return value
