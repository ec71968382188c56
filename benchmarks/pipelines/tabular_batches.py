"""The rows of `pipelines.tabular`, computed by batch in NumPy, as Ray Data's guides do it. Not one of the six."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipelines.tabular import BATCH_SIZE, HAS_FIXED_SHAPES, NUM_ROWS, SEEDING, Rows

__all__ = ["BATCH_SIZE", "HAS_FIXED_SHAPES", "SEEDING", "build", "collate"]


class Table(Rows):
    """Batches have columns: ``(n, 32)`` float32, ``(n, 8)`` int64 and ``(n,)`` float64, as torch collates the rows."""

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        rows = np.asarray(indices) % NUM_ROWS
        numbers = (self._numbers[rows] - self._mean) * self._scale
        categories = self._categories[rows] % 10_007
        return {
            "numbers": torch.from_numpy(numbers),
            "categories": torch.from_numpy(categories),
            "target": torch.from_numpy((rows % 2).astype(np.float64)),
        }


def collate(batch: Any) -> Any:
    """Return the batch, because `Table` has collated it."""
    return batch


def build(length: int, root: str) -> Any:
    """Return the data set. ``root`` is not used."""
    return Table(length)
