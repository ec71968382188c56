"""CIFAR-10 as a data set: records, augmentation as in He et al. (2015), normalisation."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.cifar import open_split

__all__ = ["PADDING", "ImageDataset", "crop_and_flip"]

PADDING = 4
"""Pixels of zeros on each side before the random crop."""


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """Images as float32 tensors of shape ``(3, 32, 32)``, and their labels.

    Every image is normalised with the mean and the standard deviation of each colour of the training set. Training
    images are first padded, cropped and flipped at random.

    Args:
        folder: Folder with CIFAR-10's binary files.
        split: ``"train"`` or ``"test"``.

    Raises:
        FileNotFoundError: If a file does not exist.
        ValueError: If a file is malformed.
    """

    def __init__(self, folder: str, split: str) -> None:
        self.records = open_split(Path(folder), split)
        self.augments = split == "train"
        mean, deviation = open_split(Path(folder), "train").statistics()
        self._mean = mean.reshape(3, 1, 1)
        self._scale = np.float32(1) / np.maximum(deviation, np.float32(1)).reshape(3, 1, 1)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, label = self.records[index]
        image = (pixels.astype(np.float32) - self._mean) * self._scale
        if self.augments:
            # The draws come from `random`, which the loader seeds for every sample.
            image = crop_and_flip(
                image,
                top=random.randint(0, 2 * PADDING),
                left=random.randint(0, 2 * PADDING),
                flips=random.random() < 0.5,
            )
        return torch.from_numpy(image), label


def crop_and_flip(image: npt.NDArray[np.float32], *, top: int, left: int, flips: bool) -> npt.NDArray[np.float32]:
    """Pad a normalised image with `PADDING` zeros on each side, cut out a window of the image's size, and mirror it.

    Args:
        image: Shape ``(channels, height, width)``.
        top: First row of the window in the padded image, 0 to 2 `PADDING`.
        left: First column of the window in the padded image, 0 to 2 `PADDING`.
        flips: Whether to mirror the window from left to right.
    """
    height, width = image.shape[1:]
    padded = np.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    window = padded[:, top : top + height, left : left + width]
    return np.ascontiguousarray(window[:, :, ::-1] if flips else window)
