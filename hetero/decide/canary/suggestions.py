"""Says what more canary runs would tell. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hetero.decide.canary.model import Refusal
from hetero.decide.canary.points import CanaryPoint, LoaderWork
from hetero.decide.canary.refusals import is_fixed_loader, percent

__all__ = ["BUDGET_S", "suggestion"]

BUDGET_S = 600.0
"""Time of the runs that a suggestion is about."""
_LARGEST = 0.5
_STEPS = (1.0, 0.5)
"""The suggested fractions, as shares of the largest one."""
_BY_VALUES = ("passes", "failed")
_NARROWER = 0.9
"""New width of an interval / the old one, at most, for which more runs are worth their time."""


def suggestion(
    points: Sequence[CanaryPoint],
    half_width: float,
    refusals: Sequence[Refusal],
    width_with: Callable[[Sequence[CanaryPoint]], float],
    *,
    cache_fraction: float | None = None,
) -> str:
    """Return what ten more minutes of canaries would tell.

    Args:
        points: The finished runs.
        half_width: Half of the width of the interval of the time, as a share of the time.
        refusals: The reasons against the forecast of the time.
        width_with: Returns the half-width with further runs.
        cache_fraction: Fraction from which on the rule ``cpu-cache`` does not refuse. None if it did not refuse.
    """
    rules = {refusal.rule for refusal in refusals}
    if "busy" in rules:
        return ""
    if rules & set(_BY_VALUES):
        return (
            "More canaries with larger fractions would not tell how long the whole runs, because the script decides "
            "that by its values. Give it a fixed number of passes for a forecast."
        )
    if "fixed-steps" in rules:
        return (
            "More canaries with larger fractions would not tell how long the whole runs, because its steps do not "
            "depend on the data. Run the script with fewer steps, and multiply."
        )
    # Find the largest fraction whose runs fit into the ten minutes.
    fixed_s = float(np.median([point.fixed_s for point in points]))
    largest = max(point.fraction for point in points)
    growing_s = float(np.median([point.growing_s / point.fraction for point in points]))
    fraction = _affordable(fixed_s, growing_s, _growth(points), largest)
    minutes = f"{BUDGET_S / 60:.0f} minutes"
    if fraction <= 1.3 * largest:
        return _only_replicates(largest, fixed_s + growing_s, minutes)
    fractions = " and ".join(percent(fraction * share) for share in reversed(_STEPS))
    text = f"Another {minutes} of canaries suffice for {fractions} of the data. "
    # Say what these runs would show.
    if "curved" in rules:
        return text + "They would show whether the growth keeps its power, or turns into a line."
    if "no-growth" in rules:
        return text + "They would show whether the time grows at all."
    if "short-passes" in rules:
        return text + "Their passes have more batches."
    if cache_fraction is not None and "cpu-cache" in rules:
        if fraction < cache_fraction:
            return text + f"The rule cpu-cache needs {percent(cache_fraction)} of the data."
        return text + "They would show how much slower the memory of a larger job is."
    width = width_with([_on_the_line(points, fraction * share) for share in _STEPS])
    if width > _NARROWER * half_width or f"{width:.0%}" == f"{half_width:.0%}":
        return text + f"They would not make the interval of the time much narrower than {half_width:.0%} to each side."
    return text + (
        f"If the line holds, they narrow the interval of the time from {half_width:.0%} to about {width:.0%} of the "
        "value to each side."
    )


def _only_replicates(largest: float, whole_s: float, minutes: str) -> str:
    """Return why larger fractions are not suggested.

    Args:
        largest: Largest fraction of the runs.
        whole_s: Time of the whole, in proportion to the data.
        minutes: The budget, as text.
    """
    if whole_s <= BUDGET_S:
        return (
            f"Canaries have at most {percent(_LARGEST)} of the data. The whole job takes less than another {minutes}, "
            f"about {whole_s:,.0f} s in proportion to the data. Run it instead of more canaries."
        )
    if 1.3 * largest >= _LARGEST:
        return f"Canaries have at most {percent(_LARGEST)} of the data, so another {minutes} would add replicates."
    return (
        f"Another {minutes} do not suffice for larger fractions than {percent(largest)}. They would only add "
        "replicates."
    )


def _growth(points: Sequence[CanaryPoint]) -> float:
    """Return the power of growth to expect: 1, or more if the larger fractions took disproportionately long."""
    small = [p.growing_s / p.fraction for p in points if p.fraction <= np.median([q.fraction for q in points])]
    large = [p.growing_s / p.fraction for p in points if p.fraction >= np.median([q.fraction for q in points])]
    return 2.0 if np.median(large) > 1.3 * np.median(small) else 1.0


def _affordable(fixed_s: float, growing_s: float, growth: float, largest: float) -> float:
    """Return the largest fraction whose runs take at most the budget."""
    fraction = _LARGEST
    while fraction > largest:
        needed_s = sum(fixed_s + growing_s * largest * (fraction * share / largest) ** growth for share in _STEPS)
        if needed_s <= BUDGET_S:
            return fraction
        fraction *= 0.9
    return largest


def _on_the_line(points: Sequence[CanaryPoint], fraction: float) -> CanaryPoint:
    """Return a run with another fraction, whose growing parts are on the line through the smallest and the largest."""
    smallest, model = min(points, key=lambda each: each.fraction), max(points, key=lambda each: each.fraction)
    slope = max(0.0, (model.growing_s - smallest.growing_s) / (model.fraction - smallest.fraction))
    growing_s = model.growing_s + slope * (fraction - model.fraction)
    stretch, ratio = growing_s / max(1e-9, model.growing_s), fraction / model.fraction
    fixed = [work for work in model.loaders if is_fixed_loader(_works(work.name, smallest, model), (1.0, 2.0))]
    loaders = [
        work
        if work in fixed
        else replace(
            work,
            num_steps=round(work.num_steps * ratio),
            num_samples=round(work.num_samples * ratio),
            num_steps_measured=round(work.num_steps * ratio) - (work.num_steps - work.num_steps_measured),
            num_samples_measured=round(work.num_samples * ratio) - (work.num_samples - work.num_samples_measured),
            measured_s=min(growing_s, work.measured_s * ratio),
        )
        for work in model.loaders
    ]
    parts = [replace(part, seconds=part.seconds * stretch) if part.grows else part for part in model.parts]
    wall_s = model.wall_s + growing_s - model.growing_s
    return replace(model, fraction=fraction, wall_s=wall_s, parts=tuple(parts), loaders=tuple(loaders))


def _works(name: str, *points: CanaryPoint) -> list[LoaderWork]:
    return [work for point in points for work in point.loaders if work.name == name]
