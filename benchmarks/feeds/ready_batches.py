"""The data sets of the benchmarks that preprocess nothing: endpoints and local workers import them alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import hetero

_LENGTH = 10**9


def ready_batch(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return the array: every page begins with 0."""
    return np.arange(nbytes, dtype=np.uint8)


class ReadyBatches:
    """Every sample is the same prepared array: what remains is the transport.

    Args:
        nbytes: Of the array.
    """

    def __init__(self, nbytes: int) -> None:
        self._batch = ready_batch(nbytes)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> npt.NDArray[np.uint8]:
        return self._batch


class ReadyImages:
    """Every sample is the same batch of uint8 images with labels.

    Args:
        batch_size: Images.
        size: Their height and width.
    """

    def __init__(self, batch_size: int, size: int) -> None:
        generator = np.random.default_rng(0)
        self._images = generator.integers(0, 256, (batch_size, 3, size, size), dtype=np.uint8)
        self._labels = generator.integers(0, 1000, batch_size)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        return self._images, self._labels


class TinySamples:
    """Samples of a few bytes whose cost is emulated."""

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def collate_tiny(samples: list[int]) -> npt.NDArray[np.int64]:
    """Return a batch without torch, which small processes need not import."""
    return np.array(samples)


@hetero.dataset(fingerprint="ready")
def ready_batches(nbytes: int) -> Any:
    """Serve `ReadyBatches`."""
    return ReadyBatches(nbytes)


@hetero.dataset(fingerprint="images")
def ready_images(batch_size: int, size: int) -> Any:
    """Serve `ReadyImages`."""
    return ReadyImages(batch_size, size)


@hetero.dataset(fingerprint="tiny", collate_fn=collate_tiny, seeding="batch")
def tiny_samples() -> Any:
    """Serve `TinySamples`."""
    return TinySamples()
