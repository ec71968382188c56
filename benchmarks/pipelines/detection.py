"""Object detection: images of different sizes, padded, and as many boxes as there happen to be, in nested dicts."""

from __future__ import annotations

import random
from typing import Any

import cv2
import numpy as np
import torch

from pipelines.photos import list_photos, read_photo

BATCH_SIZE = 16
HAS_FIXED_SHAPES = False
SIDES = (320, 352, 384, 416, 448, 480)
MAX_BOXES = 40  # and at least one: RPCDataloader cannot receive empty tensors


class Scenes(torch.utils.data.Dataset):
    """Samples are dicts: an image whose short side is drawn from `SIDES`, and its target."""

    def __init__(self, length: int, root: str) -> None:
        self._length = length
        self._files = list_photos(root)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = read_photo(self._files[index % len(self._files)])
        scale = random.choice(SIDES) / min(pixels.shape[:2])
        pixels = cv2.resize(pixels, None, fx=scale, fy=scale)
        height, width = pixels.shape[:2]
        truth = np.random.default_rng(index)  # annotations belong to the image, not to the epoch
        corners = truth.uniform(0, 1, size=(int(truth.integers(1, MAX_BOXES + 1)), 4)).astype(np.float32)
        boxes = np.concatenate([corners[:, :2] * 0.7, corners[:, :2] * 0.7 + 0.02 + corners[:, 2:] * 0.25], axis=1)
        boxes *= np.array([width, height, width, height], np.float32)
        if random.random() < 0.5:
            pixels = cv2.flip(pixels, 1)
            boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
        return {
            "image": torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))),
            "target": {
                "boxes": torch.from_numpy(boxes),
                "labels": torch.from_numpy(truth.integers(0, 80, size=len(boxes))),
                "area": torch.from_numpy((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])),
                "image_id": index,
            },
        }


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad the images to the largest. Keep targets apart, as detection models take them."""
    height = max(sample["image"].shape[1] for sample in samples)
    width = max(sample["image"].shape[2] for sample in samples)
    images = torch.zeros(len(samples), 3, height, width, dtype=torch.uint8)
    for position, sample in enumerate(samples):
        image = sample["image"]
        images[position, :, : image.shape[1], : image.shape[2]] = image
    return {
        "images": images,
        "sizes": [list(sample["image"].shape[1:]) for sample in samples],
        "targets": [sample["target"] for sample in samples],
    }


def build(length: int, root: str) -> Any:
    """Return the data set."""
    return Scenes(length, root)
