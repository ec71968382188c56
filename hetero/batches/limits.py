"""How large the structure of a batch may be. Apart from `hetero.batches.structure`: launchers need it without NumPy."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StructureLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureLimits:
    """Bounds of one batch, the same for who sends and who receives."""

    max_batch_bytes: int = 2**30
    """All leaves together."""
    max_leaves: int = 1024
    """Tensors, arrays, NumPy scalars, long lists and strings."""
    max_nodes: int = 16_384
    """Containers and values of the tree."""
    max_depth: int = 8
    """Containers inside containers."""
    max_ndim: int = 8
    """Dimensions of an array."""
    max_key_bytes: int = 256
    """UTF-8 of a dictionary key, a field or a type's name."""
    max_inline_bytes: int = 256
    """Longer str and bytes become leaves."""
    max_list_items: int = 2**20
    """Items of all lists that became leaves: Python objects take many times the bytes that they came in."""
