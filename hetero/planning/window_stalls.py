"""How much longer steps take because batches arrive in order through a window.

A rank asks for ``n`` batches ahead. Batch k is requested when step k - n begins, so step k begins at

    begin(k) = max(begin(k - 1) + base, begin(k - n) + time of batch k on the slowest rank)

If a batch takes longer than ``n`` steps, the step waits for it. The mean of this recursion over random batch times has
no simple formula, so `stall_table` computes it for a grid of slacks and windows.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

__all__ = ["StallTable", "stall_table"]

Array = NDArray[np.float64]

_SLACKS = np.array(
    [0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0]
)
"""Time of a window without stalls / mean batch time. It is below 1 if the window limits the steps."""
_WINDOWS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128])
_NUM_STEPS = 600
"""Steps of the recursion beside four windows at its begin, which are left out."""


class StallTable:
    """Step time / base step time for a distribution of batch times. `stall_table` creates it.

    Args:
        shape: Times of random batches, relative to their mean.
        num_ranks: Ranks whose steps begin together.
    """

    def __init__(self, shape: Array, num_ranks: int) -> None:
        random = np.random.default_rng(0)
        ratios = np.empty((len(_WINDOWS), len(_SLACKS)))
        for row, window in enumerate(_WINDOWS):
            num_steps = _NUM_STEPS + 4 * int(window)
            drawn = random.choice(shape, size=(num_steps, min(num_ranks, 64))).max(axis=1)
            begins = np.zeros((num_steps, len(_SLACKS)))
            base = _SLACKS / window  # the mean batch time is the unit
            for step in range(1, num_steps):
                earliest = begins[step - 1] + base
                if step >= window:
                    earliest = np.maximum(earliest, begins[step - window] + drawn[step])
                begins[step] = earliest
            start = 2 * int(window)
            ratios[row] = (begins[-1] - begins[start]) / (num_steps - 1 - start) / base
        self._ratios = np.maximum(ratios, 1.0)

    def ratio(self, slack: Array, in_flight: Array) -> Array:
        """Return step time / base step time, at least 1.

        Args:
            slack: Base step time x batches in flight / mean batch time.
            in_flight: Batches in flight of one rank, of the same shape.
        """
        slack = np.maximum(slack, 1e-9)
        rows = np.interp(np.log(np.maximum(in_flight, 1.0)), np.log(_WINDOWS), np.arange(len(_WINDOWS)))
        columns = np.interp(np.log(slack), np.log(_SLACKS), np.arange(len(_SLACKS)))
        low_row, low_column = np.floor(rows).astype(int), np.floor(columns).astype(int)
        high_row = np.minimum(low_row + 1, len(_WINDOWS) - 1)
        high_column = np.minimum(low_column + 1, len(_SLACKS) - 1)
        right, down = columns - low_column, rows - low_row
        upper = self._ratios[low_row, low_column] * (1 - right) + self._ratios[low_row, high_column] * right
        lower = self._ratios[high_row, low_column] * (1 - right) + self._ratios[high_row, high_column] * right
        found = upper * (1 - down) + lower * down
        # Below the grid, the window alone limits the steps, so the ratio grows as the slack shrinks.
        return np.asarray(found * np.maximum(1.0, _SLACKS[0] / slack))


@functools.lru_cache(maxsize=16)
def stall_table(shape: tuple[float, ...], num_ranks: int) -> StallTable:
    """Return the table for batch times, relative to their mean."""
    return StallTable(np.array(shape), num_ranks)
