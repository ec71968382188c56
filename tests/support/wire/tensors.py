"""Tensors for batches: torch's where torch is installed, and arrays elsewhere.

The tests of the wire also run in environments without torch: `make test-pythons`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

try:
    import torch
except ImportError:
    HAS_TORCH = False
else:
    HAS_TORCH = True

__all__ = ["HAS_TORCH", "bfloats", "tensor"]


def tensor(array: Any) -> Any:
    """Return a tensor with the values of an array, or of a list that makes an array."""
    array = np.array(array)
    return torch.from_numpy(array) if HAS_TORCH else array


def bfloats(array: Any) -> Any:
    """Return a tensor of bfloat16 with the bits of an array of 16-bit integers. It needs torch."""
    return tensor(array).view(torch.bfloat16)
