"""Pinned memory for batches: an accelerator copies from it without another copy."""

from __future__ import annotations

import torch

__all__ = ["allocate_pinned"]


def allocate_pinned(nbytes: int) -> memoryview:
    """Return pinned memory for a batch; it lives as long as the last tensor over it.

    Raises:
        RuntimeError: If there is none, as torch says it.
    """
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return memoryview(pinned.numpy())  # type: ignore[arg-type]
