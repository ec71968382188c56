"""Limits on the structure of a batch.

The limits are in a separate module because launchers need them without NumPy, which `conversion` imports.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MAX_DEPTH", "StructureLimits"]

MAX_DEPTH = 8
"""Depth of containers inside containers, in a batch, in a kept sample and in an index. It keeps deeply nested answers
from overflowing the stack (attack A7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureLimits:
    """Limits on one batch, which are the same for sender and receiver."""

    max_batch_bytes: int = 2**30
    """Bytes of all leaves together."""
    max_leaves: int = 1024
    """Number of leaves: tensors, arrays, NumPy scalars, long lists, and long str and bytes."""
    max_nodes: int = 16_384
    """Number of containers and values in the tree."""
    max_depth: int = MAX_DEPTH
    max_ndim: int = 8
    """Number of dimensions of a tensor or array."""
    max_inline_bytes: int = 256
    """Bytes of a str or bytes in the tree, and of a dictionary key, a field's name or a type's name in UTF-8.

    A longer value becomes a leaf. A longer key is an error.
    """
    max_list_items: int = 2**20
    """Number of items in all lists that became leaves. As Python objects, items take many times the leaf's bytes."""
