"""Tables: rows of 32 numbers and 8 categories. A sample costs microseconds, so this measures overheads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

BATCH_SIZE = 1024
HAS_FIXED_SHAPES = True
SEEDING = "batch"
NUM_ROWS, NUM_NUMBERS, NUM_CATEGORIES = 100_000, 32, 8
collate = None


class Rows(torch.utils.data.Dataset):
    """Samples are ``(32,)`` float32, ``(8,)`` int64 and a float."""

    def __init__(self, length: int) -> None:
        self._length = length
        generator = np.random.default_rng(0)
        self._numbers = generator.standard_normal((NUM_ROWS, NUM_NUMBERS), dtype=np.float32)
        self._categories = generator.integers(0, 1_000_000, (NUM_ROWS, NUM_CATEGORIES))
        self._mean = self._numbers.mean(axis=0)
        self._scale = 1 / self._numbers.std(axis=0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, float]:
        row = index % NUM_ROWS
        numbers = (self._numbers[row] - self._mean) * self._scale
        return torch.from_numpy(numbers), torch.from_numpy(self._categories[row] % 10_007), float(row % 2)


def build(length: int, root: str) -> Any:
    """Return the data set. ``root`` is not used."""
    return Rows(length)
