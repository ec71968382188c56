"""A nested batch without its leaves: what `hetero.batches.structure` makes, and what travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
]

MAX_EQUAL_HASHES = 64
"""Of keys or items: a table of which all have the same hash takes time that grows with their number's square.

Powers of two up to the longest integer that can be sent have 34 in common.
"""


@dataclass(frozen=True, slots=True)
class LeafRef:
    """Stands for a leaf."""

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
    """A set or frozenset of what `is_hashable`."""

    items: tuple[Tree, ...]
    is_frozen: bool


@dataclass(frozen=True, slots=True)
class MappingTree:
    """A dict, or a collections.OrderedDict; in insertion order."""

    keys: tuple[Tree, ...]
    """What `is_hashable`."""
    values: tuple[Tree, ...]
    ordered: bool
    read_only: bool = False
    """Whether a types.MappingProxyType is around it."""


@dataclass(frozen=True, slots=True)
class RecordTree:
    """A namedtuple or dataclass of the user's."""

    module: str
    """Empty: the user's script, which is ``__main__`` in one process and not in another."""
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
"""A nested batch without its leaves; plain values stand for themselves."""


def is_hashable(tree: Tree) -> bool:
    """Return whether it may be a key, or in a set: a plain value, or tuples and frozensets of these."""
    if isinstance(tree, TupleTree) or (isinstance(tree, SetTree) and tree.is_frozen):
        return all(map(is_hashable, tree.items))
    return not isinstance(tree, LeafRef | ListTree | SetTree | MappingTree | RecordTree)


def collide(items: Sequence[Tree]) -> bool:
    """Return whether too many keys or items, all of which `is_hashable`, have the same hash.

    Whoever makes a batch chooses the hashes of numbers and of tuples of numbers: of integers that are equal modulo
    2**61 - 1, for one.
    """
    return len(items) > MAX_EQUAL_HASHES and max(Counter(map(hash, items)).values()) > MAX_EQUAL_HASHES
