"""Samples that only wait, to measure what order costs when some of them are slow. Simulated, and not one of the six."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch

BATCH_SIZE = 16
HAS_FIXED_SHAPES = True
SAMPLE_S = 0.004
SLOW_FACTOR = 20
collate = None


class Waits(torch.utils.data.Dataset):
    """Samples take `SAMPLE_S`, and a share of them, always the same ones, `SLOW_FACTOR` times that."""

    def __init__(self, length: int, slow_share: float) -> None:
        self._length = length
        self._slow_share = slow_share

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        draw = int.from_bytes(hashlib.blake2b(index.to_bytes(8, "little"), digest_size=4).digest(), "little") / 2**32
        time.sleep(SAMPLE_S * (SLOW_FACTOR if draw < self._slow_share else 1))
        return torch.full((256,), index)


def build(length: int, root: str) -> Any:
    """Return the data set. ``root`` is the share of slow samples."""
    return Waits(length, float(root or 0))
