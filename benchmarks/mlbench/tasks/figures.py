"""Arithmetic on logged values: time to accuracy, accuracy after time, speed-up, cost.

It needs one metric of quality with times, so it applies to any script of a study. Where the script logs ``train_s`` at
the same step, that is the time, and it excludes start-up and evaluation. Otherwise the time is that since the start of
the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.metrics.logged import LoggedMetric
from tasks.prescription import PRICES, PUBLISHED_TIMES_S, PublishedTime

__all__ = [
    "Evaluation",
    "accuracy_after",
    "cost_usd",
    "evaluations",
    "has_training_clock",
    "hourly_usd",
    "logged_time_to",
    "published_costs_usd",
    "speed_up",
    "time_to",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One evaluation of a model."""

    at_s: float
    """Seconds of training, or since the start of the run."""
    value: float
    """For example the accuracy."""
    step: int | None = None


def has_training_clock(values: Sequence[LoggedMetric]) -> bool:
    """Return whether the script logged its seconds of training."""
    return any(value.name == "train_s" for value in values)


def evaluations(values: Sequence[LoggedMetric], name: str) -> list[Evaluation]:
    """Return the evaluations of one metric, of the lowest rank that logged it, in the order of their times.

    Args:
        values: All metrics of a run.
        name: Name of the metric.
    """
    own = [value for value in values if value.name == name]
    first = min((value.rank for value in own), default=0)
    clock = {value.step: value.value for value in values if value.name == "train_s" and value.rank == first}
    found = [
        Evaluation(at_s=clock.get(value.step, value.at_s), value=value.value, step=value.step)
        for value in own
        if value.rank == first and (not clock or value.step in clock)
    ]
    return sorted(found, key=lambda evaluation: evaluation.at_s)


def time_to(found: Sequence[Evaluation], target: float, *, is_loss: bool = False) -> Evaluation | None:
    """Return the first evaluation that reaches the target, or None.

    Args:
        found: Evaluations in the order of their times.
        target: Accuracy to reach, or with ``is_loss`` the loss to reach.
        is_loss: Whether smaller values are better.
    """
    return next((each for each in found if (each.value <= target if is_loss else each.value >= target)), None)


def logged_time_to(values: Sequence[LoggedMetric], name: str, target: float) -> Evaluation | None:
    """Return the first evaluation that reached the target as the script logged it, or None if it did not.

    The log of a long run keeps only a part of its evaluations, so their first one that reaches the target may be later.

    Args:
        values: All metrics of a run.
        name: Name of the metric. Only the time to an ``accuracy`` is logged.
        target: Accuracy to reach. None is returned if the script logged the time to another one.
    """
    found = {value.name: value.value for value in values if value.rank == 0}
    at_s, step = found.get("time_to_accuracy_s"), found.get("steps_to_accuracy")
    if name != "accuracy" or found.get("target_accuracy") != target or at_s is None or step is None:
        return None
    return Evaluation(at_s=at_s, value=target, step=round(step))


def accuracy_after(found: Sequence[Evaluation], duration_s: float) -> float | None:
    """Return the value of the last evaluation within a duration, or None without one."""
    within = [each.value for each in found if each.at_s <= duration_s]
    return within[-1] if within else None


def speed_up(baseline_s: float, time_s: float) -> float:
    """Return how many times as fast a run is as the baseline.

    Raises:
        ValueError: If a time is not above 0.
    """
    if not (baseline_s > 0 and time_s > 0):
        raise ValueError(f"times {baseline_s} s and {time_s} s; expected both above 0")
    return baseline_s / time_s


def hourly_usd(*, num_hosts: int, num_gpus: int = 0, is_preemptible: bool = True) -> float:
    """Return the price of a cluster at the published prices.

    A GPU's price is paid on top of its host's.

    Args:
        num_hosts: Hosts, n1-standard-4.
        num_gpus: K80s of all hosts together.
        is_preemptible: Whether the hosts are preemptible, as in all published results.

    Raises:
        ValueError: If GPUs are on hosts that are not preemptible, because the document has no price for them.
    """
    if num_gpus and not is_preemptible:
        raise ValueError("the document has no price for a GPU that is not preemptible")
    host_usd = PRICES.preemptible_host_usd if is_preemptible else PRICES.host_usd
    return num_hosts * host_usd + num_gpus * PRICES.preemptible_gpu_usd


def cost_usd(time_s: float, price_usd: float) -> float:
    """Return the cost of a time at a price per hour."""
    return time_s / 3600 * price_usd


def published_costs_usd(times: Sequence[PublishedTime] = PUBLISHED_TIMES_S) -> dict[str, float]:
    """Return what the published baselines of task 1a cost, each on one preemptible host."""
    return {each.name: cost_usd(each.time_s, hourly_usd(num_hosts=1, num_gpus=each.num_gpus)) for each in times}
