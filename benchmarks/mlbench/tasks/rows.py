"""Epsilon as a data set: rows of a converted LIBSVM file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.libsvm import Matrix

__all__ = ["RowDataset"]


class RowDataset(Dataset[tuple[Tensor, Tensor]]):
    """Features as float32 tensors of shape ``(num_features,)``, and labels -1 or 1 as float32 scalars.

    Args:
        folder: Folder with a converted matrix for each split: ``train`` and ``test``.
        split: ``"train"`` or ``"test"``.

    Raises:
        FileNotFoundError: If the split is not there.
        ValueError: If its files are damaged.
    """

    def __init__(self, folder: str, split: str) -> None:
        self.matrix = Matrix(Path(folder, split))
        self._labels = torch.from_numpy(self.matrix.labels.astype(np.float32))

    def __len__(self) -> int:
        return len(self.matrix)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # A copy, because the mapped file is read-only and torch has no read-only tensors.
        return torch.from_numpy(self.matrix.features[index].copy()), self._labels[index]
