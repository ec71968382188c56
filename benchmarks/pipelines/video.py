"""Video: clips of 16 frames decoded from motion JPEG, one crop for all of them, 38.5 MB per batch."""

from __future__ import annotations

import random
from typing import Any

import cv2
import torch

from pipelines.photos import list_photos, random_resized_crop, read_photo

BATCH_SIZE = 16
HAS_FIXED_SHAPES = True
NUM_FRAMES, SIDE = 16, 224
collate = None


class Clips(torch.utils.data.Dataset):
    """Samples are ``(16, 3, 224, 224)`` uint8 and a label."""

    def __init__(self, length: int, root: str) -> None:
        self._length = length
        self._files = list_photos(root)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        clip = torch.empty(NUM_FRAMES, 3, SIDE, SIDE, dtype=torch.uint8)
        begin = random.randrange(len(self._files))
        crop, flip = None, random.random() < 0.5
        for number in range(NUM_FRAMES):
            pixels = read_photo(self._files[(begin + number) % len(self._files)])
            if crop is None:
                crop = random_resized_crop(int(pixels.shape[0] * 0.8), int(pixels.shape[1] * 0.8))
            top, left, height, width = crop
            pixels = cv2.resize(pixels[top : top + height, left : left + width], (SIDE, SIDE))
            clip[number] = torch.from_numpy(cv2.flip(pixels, 1) if flip else pixels).permute(2, 0, 1)
        return clip, index % 400


def build(length: int, root: str) -> Any:
    """Return the data set."""
    return Clips(length, root)
