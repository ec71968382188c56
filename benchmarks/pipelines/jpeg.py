"""Image classification: decode, random resized crop to 224, flip. Images are uint8. The accelerator normalises them."""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
import torch

from pipelines.photos import list_photos, random_resized_crop, read_photo

BATCH_SIZE = 64
HAS_FIXED_SHAPES = True
SIDE = 224
collate = None


class Photos(torch.utils.data.Dataset):
    """Samples are ``(3, 224, 224)`` uint8 and a label."""

    def __init__(self, length: int, root: str) -> None:
        self._length = length
        self._files = list_photos(root)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.augment(self.load(index))

    def load(self, index: int) -> tuple[np.ndarray, int]:
        """Return what is the same in each epoch: the pixels of a photograph, and a label."""
        return read_photo(self._files[index % len(self._files)]), index % 8

    def augment(self, sample: tuple[np.ndarray, int]) -> tuple[torch.Tensor, int]:
        """Return the sample of that, with random numbers."""
        pixels, label = sample
        top, left, height, width = random_resized_crop(*pixels.shape[:2])
        pixels = cv2.resize(pixels[top : top + height, left : left + width], (SIDE, SIDE))
        if random.random() < 0.5:
            pixels = cv2.flip(pixels, 1)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))), label


def build(length: int, root: str) -> Any:
    """Return the data set."""
    return Photos(length, root)
