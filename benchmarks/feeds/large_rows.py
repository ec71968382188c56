"""A data set that takes much memory: an array, or a list of texts. Endpoints import it."""

from __future__ import annotations

from typing import Any

import numpy as np

import hetero

NUM_ROWS = 100_000


class Rows:
    """Rows of numbers, or of texts.

    Args:
        megabytes: Size of the data.
        kind: ``array`` or ``list``.
    """

    def __init__(self, megabytes: int, kind: str) -> None:
        if kind == "array":
            self._rows: Any = np.ones((NUM_ROWS, 10 * megabytes), np.uint8)
        else:  # a text of 40 characters takes 89 bytes, and 8 in the list
            self._rows = [f"{number:040d}" for number in range(megabytes * 1_000_000 // 97)]

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        row = self._rows[index]
        return row[:500] if isinstance(row, np.ndarray) else np.frombuffer(row.encode(), np.uint8)


@hetero.dataset(collate_fn=hetero.collate_arrays, seeding="batch", fingerprint="rows")
def shared_rows(megabytes: int, kind: str) -> Rows:
    """Build the data set once per host."""
    return Rows(megabytes, kind)


@hetero.dataset(collate_fn=hetero.collate_arrays, seeding="batch", fingerprint="rows", fork_built=False)
def own_rows(megabytes: int, kind: str) -> Rows:
    """Build the data set in each endpoint."""
    return Rows(megabytes, kind)
