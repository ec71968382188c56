"""The JPEG pipeline `pipelines.jpeg` as arrays, without torch. Endpoints import it and serve it to TensorFlow."""

from __future__ import annotations

import random

import cv2
import numpy as np
import numpy.typing as npt
from pipelines.photos import list_photos, random_resized_crop, read_photo

import hetero

BATCH_SIZE = 64
SIDE = 224
_LENGTH = 2_000 * BATCH_SIZE
"""No run sees the end of an epoch."""


class PhotoArrays:
    """Samples are ``(3, 224, 224)`` uint8 and a label.

    Args:
        root: Folder of the photographs.
    """

    def __init__(self, root: str) -> None:
        self._files = list_photos(root)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        pixels = read_photo(self._files[index % len(self._files)])
        top, left, height, width = random_resized_crop(*pixels.shape[:2])
        pixels = cv2.resize(pixels[top : top + height, left : left + width], (SIDE, SIDE))
        if random.random() < 0.5:
            pixels = cv2.flip(pixels, 1)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1)), index % 8


@hetero.dataset(fingerprint="photos", collate_fn=hetero.collate_arrays)
def photo_arrays(root: str) -> PhotoArrays:
    """Serve `PhotoArrays`."""
    return PhotoArrays(root)
