"""The longest time that the canary runs allow, if a part of the time grows with the square of the data. Pure.

Suppose that this part is a tenth of the other growing part at 3 % of the data. Between 1 and 3 % of the data, it is
then less than the noise, so no test of the points finds it. In the whole job, it is more than three times the other
growing part. Therefore a forecast states the longest time that the runs allow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.decide.canary.line import Noise, Posterior, interval

__all__ = ["quadratic_bound", "quadratic_notes"]

_NUM_DRAWS = 20_000
"""Draws of the parabola. Most of them have a negative part, and do not count."""
_MIN_ACCEPTED = 200
_FAR_ABOVE = 2.0
"""Least ratio of the bound and the upper end of the forecast's interval, for a note with the bound."""


def quadratic_bound(
    x: Sequence[float], y: Sequence[float], random: np.random.Generator, *, noise: Noise
) -> float | None:
    """Return the 95th percentile of y at x = 1 for y = a + b x + c x^2, where no part is negative.

    Args:
        x: Fractions of the whole, in (0, 1].
        y: Figures, at least 0.
        random: Generator of the draws.
        noise: Prior of the noise.

    Returns:
        None if nearly all parabolas through the points have a negative part. A line then describes them better.
    """
    xs, ys = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    # All columns are 1 at the centre of the fractions, so they have about the same size.
    centre = float(np.exp(np.mean(np.log(xs))))
    design = np.stack([np.ones(len(xs)), xs / centre, (xs / centre) ** 2], axis=1)
    # As in `fit_line`, the noise has a part in proportion to the figure, and an absolute part.
    posterior = Posterior(design, ys, variances=ys**2 + (noise.absolute / noise.relative) ** 2, noise=noise)
    # Leave out draws with a negative part, because no part of a time is negative.
    parts, _ = posterior.draw_positive(_NUM_DRAWS, random)
    if len(parts) < _MIN_ACCEPTED:
        return None
    # The columns of the design for the whole, where x is 1.
    whole = np.asarray([1.0, 1 / centre, 1 / centre**2])
    _, _, high = interval(parts @ whole)
    return high


def quadratic_notes(bound_s: float | None, high_s: float) -> list[str]:
    """Return a sentence about the longest time that the runs do not exclude, if it is far above the forecast.

    Args:
        bound_s: The longest time that the runs do not exclude. None if it is not known.
        high_s: Upper end of the forecast's interval.
    """
    if bound_s is None or bound_s <= _FAR_ABOVE * high_s:
        return []
    text = (
        "The interval assumes that the time grows in proportion to the data. If a small part of it grows with the "
        f"square of the data, these runs do not exclude {bound_s:,.0f} s. Runs on larger fractions would show it."
    )
    return [text]
