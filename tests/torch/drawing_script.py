"""A data set that draws: endpoints serve it, and tests compute the same batches in their own process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import hetero


class Drawing(torch.utils.data.Dataset[dict[str, Any]]):
    """Every sample depends on its index and on all three global generators."""

    def __init__(self, num_samples: int, offset: int) -> None:
        self.num_samples = num_samples
        self.offset = offset

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.rand(3) + random.random() + float(np.random.rand())
        return {"index": index, "noise": noise, "name": f"sample {index + self.offset}"}


@hetero.dataset
def drawing(num_samples: int = 37, offset: int = 0) -> Drawing:
    """Return the data set. With another ``offset`` it differs in every sample."""
    return Drawing(num_samples, offset)
