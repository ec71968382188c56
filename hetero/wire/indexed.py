"""Converts indexed work to its fields of a request, and back. Either all indices are integers, or all are keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.indexed import IndexedWork
from hetero.batches.indices import Indices
from hetero.batches.structure.limits import MAX_DEPTH
from hetero.batches.structure.trees import ListTree, Tree, TupleTree
from hetero.errors import ConfigError, ProtocolError
from hetero.spec import Index
from hetero.wire.limits import Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.trees import decode_items, encode_items

__all__ = ["read", "write"]

_INDEX, _OCCURRENCE = np.dtype("<i8"), np.dtype("<u4")
_MAX_INTEGER_BYTES = 1024
"""Bytes of the largest integer in an index. Python cannot print more than 4,300 digits (1,786 bytes) in a message."""


def write(message: pb.FetchRequest, work: IndexedWork) -> None:
    """Set the fields of a request for its indices.

    Args:
        message: The request.
        work: The indices and their occurrences.

    Raises:
        ConfigError: If an index exceeds a limit, or has an unsupported type.
        ValueError: If a text cannot be encoded in UTF-8.
    """
    if isinstance(work.indices, np.ndarray):
        message.indices = work.indices.astype(_INDEX, copy=False).tobytes()
    else:
        message.keys = encode_items([_tree(index) for index in work.indices])
    if work.occurrences is not None and work.occurrences.any():
        message.occurrences = work.occurrences.astype(_OCCURRENCE, copy=False).tobytes()


def read(message: pb.FetchRequest, limits: Limits) -> IndexedWork:
    """Return the indices in a request.

    Raises:
        ProtocolError: If `write` could not have made the message.
    """
    keys = decode_items(message.keys) if message.keys else ()
    integers, occurrences = _array(message.indices, _INDEX), _array(message.occurrences, _OCCURRENCE)
    num_indices = len(integers) + len(keys)
    # `write` sets only one of the two fields.
    if num_indices > limits.max_indices or (len(integers) and keys):
        raise ProtocolError(
            f"a request has {len(integers)} indices and {len(keys)} keys, "
            f"expected at most {limits.max_indices} of one kind"
        )
    if len(occurrences) not in (0, num_indices):
        raise ProtocolError(f"a request has {num_indices} indices but {len(occurrences)} occurrences")
    indices: Indices = tuple([_index(key) for key in keys]) if keys else integers
    return IndexedWork(indices, occurrences if len(occurrences) else None)


def _array(data: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the numbers in these bytes, in memory that may be written to."""
    if len(data) % dtype.itemsize:
        raise ProtocolError(f"a request has {len(data)} bytes of numbers, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype).copy()


def _tree(index: Index, depth: int = 0) -> Tree:
    """Return an index as a tree, which can be sent."""
    if isinstance(index, tuple | list):
        if depth >= MAX_DEPTH:
            raise ConfigError(f"an index nests deeper than {MAX_DEPTH} levels")
        items = tuple([_tree(part, depth + 1) for part in index])
        return TupleTree(items) if isinstance(index, tuple) else ListTree(items)
    if isinstance(index, int) and _num_bytes(index) > _MAX_INTEGER_BYTES:
        raise ConfigError(f"the index of {_num_bytes(index)} bytes exceeds {_MAX_INTEGER_BYTES} bytes")
    # Look for bool first, because a bool is an int too, and must not arrive at the data set as an int.
    # Make a plain value of a subclass, such as np.float64, because `encode_items` knows only plain types.
    for kind in (bool, int, float, str, bytes):
        if isinstance(index, kind):
            return kind(index)  # type: ignore[arg-type]
    if index is not None:
        raise ConfigError(f"the index {index!r:.60} of type {type(index).__name__} cannot be sent")
    return None


def _index(tree: Tree) -> Index:
    """Return the index in a received tree, or reject the tree."""
    if isinstance(tree, ListTree):
        return [_index(item) for item in tree.items]
    if isinstance(tree, TupleTree):
        return tuple([_index(item) for item in tree.items])
    if isinstance(tree, int) and _num_bytes(tree) > _MAX_INTEGER_BYTES:
        raise ProtocolError(f"an index exceeds {_MAX_INTEGER_BYTES} bytes")
    if tree is None or isinstance(tree, bool | int | float | str | bytes):
        return tree
    raise ProtocolError("an index is of no known kind")


def _num_bytes(value: int) -> int:
    """Return how many bytes an integer takes with its sign."""
    return value.bit_length() // 8 + 1
