"""Says what more canary runs would tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.canary.line import Noise, fit_line, interval
from hetero.canary.model import ForecastFigure, Refusal
from hetero.canary.points import CanaryPoint
from hetero.canary.refusals import percent

__all__ = ["BUDGET_S", "suggestion"]

BUDGET_S = 600.0
"""Time of the runs that a suggestion is about."""
_LARGEST = 0.5
_STEPS = (1.0, 0.5)
"""The suggested fractions, as shares of the largest one."""
_NO_USE = ("early-stop", "passes", "failed")


def suggestion(points: Sequence[CanaryPoint], time: ForecastFigure, refusals: Sequence[Refusal]) -> str:
    """Return what ten more minutes of canaries would tell, or an empty text if they would tell nothing.

    Args:
        points: The finished runs.
        time: The forecast of the time.
        refusals: The reasons against it.
    """
    if any(refusal.rule in _NO_USE for refusal in refusals):
        return (
            "More canaries with larger fractions would not tell how long the whole runs, because the script decides "
            "that by its values. Give it a fixed number of passes for a forecast."
        )
    fixed_s = float(np.median([point.fixed_s for point in points]))
    largest = max(point.fraction for point in points)
    growing_s = float(np.median([point.growing_s / point.fraction for point in points]))
    growth = _growth(points)
    fraction = _affordable(fixed_s, growing_s, growth, largest)
    if fraction <= 1.3 * largest:
        return (
            f"Another {BUDGET_S / 60:.0f} minutes do not suffice for larger fractions than "
            f"{percent(largest)}. They would only add replicates."
        )
    fractions = " and ".join(percent(fraction * share) for share in reversed(_STEPS))
    text = f"Another {BUDGET_S / 60:.0f} minutes of canaries suffice for {fractions} of the data. "
    rules = {refusal.rule for refusal in refusals}
    if "curved" in rules:
        return text + "They would show whether the growth keeps its power, or turns into a line."
    if "no-growth" in rules:
        return text + "They would show whether the time grows at all."
    if "unreached" in rules:
        return text + "They count further, and may reach the condition."
    if "short-passes" in rules:
        return text + "Their passes have more batches."
    width = _width_with(points, fraction, fixed_s, growing_s)
    return text + (
        f"If the line holds, they narrow the interval of the time from {time.half_width:.0%} to about {width:.0%} of "
        "the value to each side."
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


def _width_with(points: Sequence[CanaryPoint], fraction: float, fixed_s: float, growing_s: float) -> float:
    """Return the half-width of the interval if the suggested runs were exactly on the line."""
    x = [point.fraction for point in points]
    y = [point.growing_s for point in points]
    line = fit_line(x, y, np.random.default_rng(0), noise=Noise(relative=0.02, absolute=0.03), curvature=0.0)
    a, b = float(np.median(line.fixed)), float(np.median(line.expected - line.fixed))
    more = [fraction * share for share in _STEPS]
    wider = fit_line(
        [*x, *more],
        [*y, *(a + b * each for each in more)],
        np.random.default_rng(0),
        noise=Noise(relative=0.02, absolute=0.03),
        curvature=0.015,
    )
    middle, low, high = interval(wider.single + fixed_s)
    return (high - low) / 2 / max(middle, 1e-9)
