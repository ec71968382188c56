"""Photographs on disk, and what image pipelines do to them."""

from __future__ import annotations

import math
import random
from pathlib import Path

import cv2
import numpy as np

__all__ = ["list_photos", "random_resized_crop", "read_photo"]

cv2.setNumThreads(0)  # one preprocessing process represents one core


def list_photos(root: str) -> list[str]:
    """Return the training photographs that ``examples/photos/make_data.py`` made, sorted.

    Raises:
        FileNotFoundError: If no photographs are found.
    """
    files = sorted(str(path) for path in Path(root).glob("train/*/*.jpg"))
    if not files:
        raise FileNotFoundError(f"no photographs in {root}: bench_pipelines.py makes them")
    return files


def read_photo(path: str) -> np.ndarray:
    """Return the pixels of a JPEG, ``(height, width, 3)`` uint8 RGB."""
    return cv2.cvtColor(cv2.imread(path, cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)


def random_resized_crop(height: int, width: int) -> tuple[int, int, int, int]:
    """Draw a crop of 8 to 100 % of the area and an aspect ratio of 3/4 to 4/3.

    Returns:
        Top, left, height and width.
    """
    area = height * width
    for _ in range(10):
        target = area * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        crop_width, crop_height = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            return (
                random.randint(0, height - crop_height),
                random.randint(0, width - crop_width),
                crop_height,
                crop_width,
            )
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side
