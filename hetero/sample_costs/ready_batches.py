"""A data set whose batches are ready in memory. An endpoint serves this data set to measure what receiving costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.datasets import dataset

__all__ = ["Ready", "hetero_profile_batch"]


class Ready:
    """A data set that returns the same arrays for every index.

    Args:
        leaf_bytes: Bytes of each array.
    """

    def __init__(self, leaf_bytes: list[int]) -> None:
        self._arrays = [np.ones(nbytes, np.uint8) for nbytes in leaf_bytes]

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, _index: int) -> list[npt.NDArray[Any]]:
        return self._arrays


@dataset(seeding="batch", fingerprint="ready")
def hetero_profile_batch(leaf_bytes: list[int]) -> Ready:
    """Return the data set."""
    return Ready(leaf_bytes)
