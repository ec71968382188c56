"""The tree of a nested batch without its leaves. `conversion` makes the tree, which is sent with the leaves."""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.structure.layouts import is_dense
from hetero.batches.structure.limits import MAX_DEPTH

__all__ = [
    "MAX_EQUAL_HASHES",
    "LeafRef",
    "ListTree",
    "MappingTree",
    "RecordTree",
    "SetTree",
    "Tree",
    "TupleTree",
    "collide",
    "is_hashable",
    "is_plain",
]

MAX_EQUAL_HASHES = 64
"""Limit on keys or items of one container that have the same hash.

The time to build a dict or set of such items grows with the square of their number, so a limit is needed. The limit is
not lower, because up to 34 of the powers of two that can be sent have the same hash.
"""
_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})


@dataclass(frozen=True, slots=True)
class LeafRef:
    """A reference to a leaf."""

    index: int


@dataclass(frozen=True, slots=True)
class ListTree:
    """A list."""

    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class TupleTree:
    """A plain tuple."""

    items: tuple[Tree, ...]


@dataclass(frozen=True, slots=True)
class SetTree:
    """A set or frozenset. `is_hashable` is true for its items."""

    items: tuple[Tree, ...]
    is_frozen: bool


@dataclass(frozen=True, slots=True)
class MappingTree:
    """A dict or collections.OrderedDict, in insertion order."""

    keys: tuple[Tree, ...]
    """Keys. `is_hashable` is true for each of them."""
    values: tuple[Tree, ...]
    ordered: bool
    read_only: bool = False
    """Whether the mapping is inside a types.MappingProxyType."""


@dataclass(frozen=True, slots=True)
class RecordTree:
    """A namedtuple or dataclass that the user defined."""

    module: str
    """Module of the type. Empty for the user's script, which is not ``__main__`` in every process."""
    qualified_name: str
    fields: tuple[str, ...]
    values: tuple[Tree, ...]


Tree: TypeAlias = (
    LeafRef
    | ListTree
    | TupleTree
    | SetTree
    | MappingTree
    | RecordTree
    | bool
    | int
    | float
    | complex
    | str
    | bytes
    | None
)
"""A nested batch without its leaves. Plain values are in the tree as they are."""


def is_hashable(tree: Tree) -> bool:
    """Return whether a tree may be a key or an item of a set: a plain value, or a tuple or frozenset of these."""
    if isinstance(tree, TupleTree) or (isinstance(tree, SetTree) and tree.is_frozen):
        return all(map(is_hashable, tree.items))
    return not isinstance(tree, LeafRef | ListTree | SetTree | MappingTree | RecordTree)


def collide(items: Sequence[Tree]) -> bool:
    """Return whether too many hashable keys or items have the same hash.

    This must be checked, because the sender of a batch can choose numbers and tuples of numbers with the same hash. For
    example, integers that are equal modulo 2**61 - 1 have the same hash.

    Args:
        items: Hashable keys or items, see `is_hashable`.
    """
    return len(items) > MAX_EQUAL_HASHES and max(Counter(map(hash, items)).values()) > MAX_EQUAL_HASHES


def is_plain(sample: Any) -> bool:
    """Return whether a sample consists only of tensors, arrays, numbers, text, and lists, tuples and dicts of these.

    A plain sample stays exactly the same when it is sent. Therefore a value is plain only if its type is exactly one of
    these types, and no subclass. A tensor must not have other attributes. An array must be writable, and its elements
    must fill its memory without gaps. Records and sets may be in a batch, but they are not plain. A record may have
    more attributes than fields, and the items of a set may arrive in another order.
    """
    torch = imported("torch")

    def is_plain_part(value: Any, depth: int) -> bool:
        """Return whether a value inside the sample is plain. ``depth`` is the number of containers around the value."""
        kind = type(value)
        if kind in _SCALARS or issubclass(kind, np.generic):
            return True
        if kind is np.ndarray:
            return bool(value.flags.writeable) and _is_dense(value)
        if torch is not None and kind is torch.Tensor:
            return not vars(value)
        # A sample may have one level less than a batch, because it is sent inside a list of samples.
        if depth == MAX_DEPTH - 1:
            return False
        if kind is list or kind is tuple:
            return all(is_plain_part(item, depth + 1) for item in value)
        if kind is dict or kind is collections.OrderedDict:
            return all(type(key) in _SCALARS and is_plain_part(item, depth + 1) for key, item in value.items())
        return False

    return is_plain_part(sample, depth=0)


def _is_dense(array: Any) -> bool:
    flags = array.flags
    strides = [stride // array.itemsize if array.itemsize else 0 for stride in array.strides]
    return bool(flags.c_contiguous or flags.f_contiguous or (min(strides) > 0 and is_dense(array.shape, strides)))
