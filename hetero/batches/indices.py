"""Indices that samplers yield, in Python's own types and as canonical bytes.

An index is a position, or a key if the data set takes keys.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Sequence
from operator import index as to_integer
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hetero.batches.structure.limits import MAX_DEPTH
from hetero.errors import ConfigError
from hetero.plans.plan import Source
from hetero.spec import Index

__all__ = [
    "Indices",
    "as_indices",
    "fits_int64",
    "index_bytes",
    "is_integers",
    "plain_index",
    "plain_indices",
    "probes",
    "sources_of",
]

Indices: TypeAlias = npt.NDArray[np.int64] | tuple[Index, ...]
"""An array if all indices are integers, else a tuple. The array is compact enough for 10^9 integers."""

_NUM_PROBES = 8
"""Samples that stand for all. Each takes the time of a sample."""
_pack_length = struct.Struct("<cI").pack
_pack_integer = struct.Struct("<cq").pack
_pack_real = struct.Struct("<cd").pack
_PLAIN_TYPES = frozenset({int, float, bool, str, bytes, type(None)})


def as_indices(indices: Iterable[Any]) -> Indices:
    """Return a sampler's indices in the form that `hetero.batches.indexed.IndexedWork` takes.

    Args:
        indices: Indices of the types that `plain_index` accepts.

    Returns:
        A new int64 array if all indices are integers of 64 bits, else a tuple. Lists in the tuple are copies.

    Raises:
        ConfigError: If an index has another type.
    """
    if isinstance(indices, np.ndarray) and indices.dtype.kind in "iu" and indices.ndim == 1:
        # Converted to int64, indices of this size would become negative.
        if indices.dtype.kind == "u" and indices.size and int(indices.max()) >= 2**63:
            return tuple(indices.tolist())
        # Always copy, because a sampler may reuse its array. A sampler with a single buffer changed batches in flight.
        return indices.astype(np.int64)
    plain: list[Any] = list(indices)
    # Nearly all samplers yield Python's integers, which need no conversion. 64 of them then take 3 us instead of 12.
    if set(map(type, plain)) != {int}:
        plain = [plain_index(index) for index in plain]
        if any(type(index) is not int for index in plain):
            return tuple(plain)
    try:
        return np.array(plain, dtype=np.int64)
    except OverflowError:
        return tuple(plain)


def probes(num_samples: int, sources: Sequence[Source] = ()) -> list[int]:
    """Return up to eight positions of a data set at equal distances, from the first to the last, ascending.

    All hosts compute the samples at these positions, to find out whether they have the same data set. If it is known
    which samples lie together, they are of one unit of each source, because each other one would be read on each host.
    """
    if sources and all(source.num_samples and source.layout is not None for source in sources):
        begins = itertools.accumulate((source.num_samples for source in sources), initial=0)
        units = [int(source.layout.unit_rows[0]) for source in sources if source.layout is not None]
        return [begin + probe for begin, unit in zip(begins, units, strict=False) for probe in probes(unit)]
    if not num_samples:
        return []
    # Use a set, because a small data set has fewer positions than `_NUM_PROBES`.
    distance = (num_samples - 1) / (_NUM_PROBES - 1)
    return sorted({round(number * distance) for number in range(_NUM_PROBES)})


def sources_of(dataset: object) -> tuple[Source, ...]:
    """Return the parts of a data set that a plan may draw from. Empty if it does not state them in ``sources``."""
    # Ask the class, because an object that wraps another one may pass all names on to it.
    if not isinstance(getattr(type(dataset), "sources", None), property):
        return ()
    found: Any = dataset.sources  # type: ignore[attr-defined]
    is_stated = isinstance(found, tuple) and all(isinstance(each, Source) for each in found)
    return found if is_stated else ()


def plain_indices(indices: Indices) -> Sequence[Index]:
    """Return the indices in Python's own types, which is the form that data sets receive."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def plain_index(index: Any, depth: int = 0) -> Index:
    """Return one index in Python's own types.

    Args:
        index: An integer, float or boolean (Python's, NumPy's, or a tensor without dimensions), a str, bytes, None, or
            tuples and lists of these.
        depth: Number of tuples and lists around the index.

    Raises:
        ConfigError: If the index has another type, or nests deeper than `MAX_DEPTH`.
    """
    if type(index) in _PLAIN_TYPES or isinstance(index, str):
        return index  # type: ignore[no-any-return]
    if isinstance(index, tuple | list):
        if depth >= MAX_DEPTH:
            raise ConfigError(f"the sampler yielded an index that nests deeper than {MAX_DEPTH} levels")
        # Copy a list of integers without a call for each item. If an index is a list, it may name a whole batch.
        is_plain = set(map(type, index)) <= _PLAIN_TYPES
        parts = list(index) if is_plain else [plain_index(part, depth + 1) for part in index]
        return parts if isinstance(index, list) else tuple(parts)
    if isinstance(index, bytes):
        return bytes(index)
    if isinstance(index, np.bool_):
        return bool(index)
    if isinstance(index, float | np.floating):
        return float(index)
    try:
        return to_integer(index)
    except TypeError:
        # A tensor or array without dimensions may hold a float or a boolean.
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
    """Return whether all items of a tuple are integers of at most 64 bits."""
    return all(isinstance(part, int) and fits_int64(part) for part in index)


def index_bytes(index: Index) -> bytes:
    """Return canonical bytes of one index. The bytes of one index are never a prefix of another index's bytes.

    Indices that are equal in Python but have different types, such as 1 and 1.0, have different bytes. The exception is
    bool: True and 1 have the same bytes.

    Raises:
        TypeError: If the index has a type that `plain_index` never returns.
    """
    # The first byte names the type. A length follows if the size of the content varies.
    if isinstance(index, str):
        text = index.encode("utf-8", "surrogatepass")
        return _pack_length(b"s", len(text)) + text
    if isinstance(index, tuple | list):
        # The most common tuples have a short form.
        if isinstance(index, tuple) and is_integers(index):
            return _pack_length(b"t", len(index)) + struct.pack(f"<{len(index)}q", *index)
        tag = b"T" if isinstance(index, tuple) else b"L"
        return b"".join((_pack_length(tag, len(index)), *map(index_bytes, index)))
    if isinstance(index, float):
        return _pack_real(b"f", index)
    if isinstance(index, bytes):
        return _pack_length(b"y", len(index)) + index
    if index is None:
        return b"n"
    integer = to_integer(index)
    if fits_int64(integer):
        return _pack_integer(b"i", integer)
    digits = integer.to_bytes(integer.bit_length() // 8 + 1, "little", signed=True)
    return _pack_length(b"I", len(digits)) + digits
