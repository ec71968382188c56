"""A data set whose samples take long, and do not need the CPU meanwhile. Endpoints import it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hetero

NUM_SAMPLES = 100_000


class SlowSamples:
    """Images of 150 KB, each after ``sample_s`` seconds of waiting."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s
        self._image = np.ones((3, 224, 224), np.uint8)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        time.sleep(self._sample_s)
        return {"image": self._image, "label": index}


@hetero.dataset(collate_fn=hetero.collate_arrays, seeding="sample", fingerprint="slow")
def slow_samples(sample_s: float) -> SlowSamples:
    """Build the data set."""
    return SlowSamples(sample_s)
