"""A data set with a cache whose samples take long to load, and do not need the CPU meanwhile. Endpoints import it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hetero

NUM_SAMPLES = 1_600
SAMPLE_BYTES = 3 * 224 * 224
HOST_VARIABLE = "BENCHMARK_HOST_FOLDER"


class KeptSamples:
    """Images of 150 KB, each loaded in ``load_s`` seconds and augmented in ``augment_s`` seconds of waiting."""

    def __init__(self, load_s: float, augment_s: float) -> None:
        self._load_s = load_s
        self._augment_s = augment_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def load(self, index: int) -> Any:
        """Return an image."""
        time.sleep(self._load_s)
        return np.full((3, 224, 224), index % 256, np.uint8)

    def augment(self, image: Any) -> dict[str, Any]:
        """Return the sample of an image."""
        time.sleep(self._augment_s)
        return {"image": image, "draw": np.random.random()}


@hetero.dataset(
    collate_fn=hetero.collate_arrays,
    seeding="sample",
    fingerprint="kept",
    cache=hetero.Cache(memory=0, disk="1 GB", folder=f"${HOST_VARIABLE}"),
)
def kept_samples(load_s: float, augment_s: float, run: str) -> KeptSamples:
    """Build the data set. ``run`` tells the samples of one run from those of others."""
    return KeptSamples(load_s, augment_s)
