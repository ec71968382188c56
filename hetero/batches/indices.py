"""Indices that samplers yield, in Python's own types and as canonical bytes.

An index is a position, or a key if the data set takes keys.
"""

from __future__ import annotations

import struct
from operator import index as to_integer
from typing import Any

import numpy as np

from hetero.errors import ConfigError
from hetero.spec import Index

__all__ = ["MAX_INDEX_DEPTH", "fits_int64", "index_bytes", "is_integers", "plain_index"]

MAX_INDEX_DEPTH = 8
"""Limit on the depth of nested tuples and lists in an index."""

_LENGTH = struct.Struct("<cI").pack
_INTEGER = struct.Struct("<cq").pack
_REAL = struct.Struct("<cd").pack
_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


def plain_index(index: Any, depth: int = 0) -> Index:
    """Return one index in Python's own types.

    Args:
        index: An integer, float or boolean (Python's, NumPy's, or a tensor without dimensions), a str, bytes, None, or
            tuples and lists of these.
        depth: Number of tuples and lists around the index.

    Raises:
        ConfigError: If the index has another type, or nests deeper than `MAX_INDEX_DEPTH`.
    """
    if type(index) in _PLAIN_TYPES or isinstance(index, str):
        return index  # type: ignore[no-any-return]
    if isinstance(index, tuple | list):
        if depth >= MAX_INDEX_DEPTH:
            raise ConfigError(f"the sampler yielded an index that nests deeper than {MAX_INDEX_DEPTH} levels")
        # A list of integers is a whole batch of a data set that takes lists. Copy it without a call for each item.
        is_plain = set(map(type, index)) <= _PLAIN_TYPES
        parts = list(index) if is_plain else [plain_index(part, depth + 1) for part in index]
        return parts if isinstance(index, list) else tuple(parts)
    if isinstance(index, bytes | float | np.bool_ | np.floating):
        return (
            bytes(index) if isinstance(index, bytes) else bool(index) if isinstance(index, np.bool_) else float(index)
        )
    try:
        return to_integer(index)
    except TypeError:
        if getattr(index, "ndim", None) == 0 and callable(getattr(index, "item", None)):
            item = index.item()
            if type(item) in _PLAIN_TYPES:
                return item  # type: ignore[no-any-return]
    raise ConfigError(
        f"the sampler yielded {index!r:.60} of type {type(index).__name__}\n"
        "  expected: an integer, a float, a str, bytes, a bool, None, or a tuple or list of these"
    )


def fits_int64(value: int) -> bool:
    """Return whether an integer has at most 64 bits, the sign included."""
    return -(2**63) <= value < 2**63


def is_integers(index: tuple[Any, ...]) -> bool:
    """Return whether a tuple holds integers of 64 bits only."""
    return all(isinstance(part, int) and fits_int64(part) for part in index)


def index_bytes(index: Index) -> bytes:
    """Return canonical bytes of one index. The bytes of no other index begin with them.

    Indices that are equal as dictionary keys have different bytes if their types differ. The exception is bool: True
    and 1 have the same bytes.

    Raises:
        TypeError: If the index has a type that `plain_index` never returns.
    """
    if isinstance(index, str):
        text = index.encode("utf-8", "surrogatepass")
        return _LENGTH(b"s", len(text)) + text
    if isinstance(index, tuple | list):
        if isinstance(index, tuple) and is_integers(index):
            return _LENGTH(b"t", len(index)) + struct.pack(f"<{len(index)}q", *index)
        tag = b"T" if isinstance(index, tuple) else b"L"
        return b"".join((_LENGTH(tag, len(index)), *map(index_bytes, index)))
    if isinstance(index, float):
        return _REAL(b"f", index)
    if isinstance(index, bytes):
        return _LENGTH(b"y", len(index)) + index
    if index is None:
        return b"n"
    integer = to_integer(index)
    if fits_int64(integer):
        return _INTEGER(b"i", integer)
    digits = integer.to_bytes(integer.bit_length() // 8 + 1, "little", signed=True)
    return _LENGTH(b"I", len(digits)) + digits
