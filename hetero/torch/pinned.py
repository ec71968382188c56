"""Pinned memory for batches. An accelerator can copy from it directly, without an intermediate copy.

This is a separate module because tests on machines without an accelerator replace the `torch` that it uses.
"""

from __future__ import annotations

import torch

__all__ = ["allocate_pinned"]


def allocate_pinned(nbytes: int) -> memoryview:
    """Return pinned memory for a batch, which is freed with the last tensor that uses it.

    Raises:
        RuntimeError: If torch cannot allocate pinned memory.
    """
    # The array below keeps this tensor alive. tests/torch/test_pinned.py fails if a version of torch changes that.
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return memoryview(pinned.numpy())  # type: ignore[arg-type]
