"""The data set of `bench_unauthenticated.py`: random bytes, drawn anew for every sample to give the endpoint work."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import hetero

SAMPLE_BYTES = 2**18
BATCH_SIZE = 4
LENGTH = 10**6


class Noise:
    """Random bytes."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> bytes:
        return np.random.bytes(SAMPLE_BYTES)  # the generator that hetero seeds


def join(samples: list[bytes]) -> npt.NDArray[np.uint8]:
    """Return a batch."""
    return np.frombuffer(b"".join(samples), np.uint8)


@hetero.dataset(collate_fn=join, fingerprint="noise")
def noise() -> Noise:
    """Serve `Noise`."""
    return Noise()
