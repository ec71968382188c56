"""The batches that a profile run repeats, with tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.data

from hetero.loaders import kept_batches
from hetero.torch.leaf_copies import copy_leaves, leaves_of

__all__ = ["KeptBatches", "batch_nbytes"]


class KeptBatches(kept_batches.KeptBatches):
    """The first batches of a loader. If one of them is in pinned memory, all batches are handed out in pinned memory.

    Args:
        max_bytes: See `hetero.loaders.kept_batches.KeptBatches`.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        super().__init__(copy=copy_leaves, nbytes=batch_nbytes, max_bytes=max_bytes)
        self._is_pinned = False

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch, unless there are enough already."""
        self._is_pinned |= any(isinstance(leaf, torch.Tensor) and leaf.is_pinned() for leaf in leaves_of(batch))
        super().keep(batch)

    def _handed_out(self, batch: Any) -> Any:
        # pin_memory also copies the batch and makes new containers, so no other copy is needed.
        if self._is_pinned:
            return torch.utils.data._utils.pin_memory.pin_memory(batch)
        return super()._handed_out(batch)


def batch_nbytes(value: Any) -> int:
    """Return the bytes of the tensors and arrays in nested mappings, sequences and dataclasses."""
    return sum(leaf.nbytes for leaf in leaves_of(value))
