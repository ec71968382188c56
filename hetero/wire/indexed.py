"""Converts indexed work to its fields of a request, and back. Either all indices are integers, or all are messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero.batches.indexed import IndexedWork
from hetero.batches.indices import MAX_INDEX_DEPTH, Indices, fits_int64, is_integers
from hetero.errors import ConfigError, ProtocolError
from hetero.spec import Index
from hetero.wire.limits import Limits
from hetero.wire.proto import data_pb2 as pb

__all__ = ["is_in", "read", "write"]


def is_in(message: pb.FetchRequest) -> bool:
    """Return True, because a request without another kind of work has indices."""
    return True


def write(message: pb.FetchRequest, work: IndexedWork, limits: Limits) -> None:
    """Set the fields of a request for its indices.

    Args:
        message: The request.
        work: The indices and their occurrences.
        limits: The receiver's limits.

    Raises:
        ConfigError: If an index exceeds a limit, or has an unsupported type.
        ValueError: If a text cannot be encoded in UTF-8.
    """
    if isinstance(work.indices, np.ndarray):
        message.indices.extend(work.indices.tolist())
    else:
        encoder = _Encoder(limits)
        for index in work.indices:
            encoder.fill(message.keys.add(), index, 0)
    if work.occurrences is not None and work.occurrences.any():
        message.occurrences.extend(work.occurrences.tolist())


def read(message: pb.FetchRequest, limits: Limits) -> IndexedWork:
    """Return the indices in a request.

    Raises:
        ProtocolError: If `write` could not have made the message.
    """
    num_indices = len(message.indices) + len(message.keys)
    if num_indices > limits.max_indices or (message.indices and message.keys):
        raise ProtocolError(
            f"a request has {len(message.indices)} indices and {len(message.keys)} keys, "
            f"expected at most {limits.max_indices} of one kind"
        )
    if message.occurrences and len(message.occurrences) != num_indices:
        raise ProtocolError(f"a request has {num_indices} indices but {len(message.occurrences)} occurrences")
    indices: Indices
    if message.keys:
        decoder = _Decoder(limits)
        indices = tuple([decoder.index(key, 0) for key in message.keys])
    else:
        indices = np.fromiter(message.indices, np.int64, num_indices)
    occurrences = np.fromiter(message.occurrences, np.uint32, num_indices) if message.occurrences else None
    return IndexedWork(indices, occurrences)


class _Encoder:
    """Writes the indices of one request."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_parts = 0

    def fill(self, message: pb.Key, index: Index, depth: int) -> None:
        self._count(1)
        if isinstance(index, str):
            self._check_size(index, len(index.encode(errors="replace")))
            message.text = index
        elif isinstance(index, tuple | list):
            self._fill_sequence(message, index, depth)
        elif isinstance(index, bool):
            # Before the case of int, because a bool is one too. Booleans once came to the data set as integers.
            message.boolean = index
        elif isinstance(index, int):
            if fits_int64(index):
                message.integer = index
            else:
                size = index.bit_length() // 8 + 1
                self._check_size(index, size)
                message.big_integer = index.to_bytes(size, "little", signed=True)
        elif isinstance(index, float):
            message.real = index
        elif isinstance(index, bytes):
            self._check_size(index, len(index))
            message.binary = index
        elif index is None:
            message.none = True
        else:
            raise ConfigError(f"the index {index!r:.60} of type {type(index).__name__} cannot be sent")

    def _fill_sequence(self, message: pb.Key, index: Sequence[Index], depth: int) -> None:
        if depth >= MAX_INDEX_DEPTH:
            raise ConfigError(f"an index nests deeper than {MAX_INDEX_DEPTH} levels")
        if isinstance(index, tuple) and is_integers(index) and bool not in set(map(type, index)):
            self._count(len(index))
            message.integers.SetInParent()
            message.integers.values.extend(index)
            return
        sequence = message.tuple if isinstance(index, tuple) else message.list
        sequence.SetInParent()
        for part in index:
            self.fill(sequence.items.add(), part, depth + 1)

    def _count(self, number: int) -> None:
        self._num_parts += number
        if self._num_parts > self._limits.max_index_parts:
            raise ConfigError(f"the indices of a batch have more than {self._limits.max_index_parts} parts")

    def _check_size(self, index: int | str | bytes, size: int) -> None:
        is_integer = isinstance(index, int)
        max_bytes = self._limits.max_index_integer_bytes if is_integer else self._limits.max_index_bytes
        if size > max_bytes:
            text = f"of {size} bytes" if isinstance(index, int) else repr(index[:60])
            raise ConfigError(f"the index {text} exceeds {max_bytes} bytes")


class _Decoder:
    """Reads the indices of one request."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_parts = 0

    def index(self, message: pb.Key, depth: int) -> Index:
        self._count(1)
        kind = message.WhichOneof("kind")
        if kind == "integers":
            self._count(len(message.integers.values))
            return tuple(message.integers.values)
        if kind in ("tuple", "list"):
            if depth >= MAX_INDEX_DEPTH:
                raise ProtocolError(f"an index nests deeper than {MAX_INDEX_DEPTH} levels")
            sequence = message.tuple if kind == "tuple" else message.list
            parts = [self.index(part, depth + 1) for part in sequence.items]
            return tuple(parts) if kind == "tuple" else parts
        if kind is None or (kind == "none" and not message.none):
            raise ProtocolError("an index is of no known kind")
        if kind == "none":
            return None
        value: int | float | str | bytes | bool = getattr(message, kind)
        is_integer = kind == "big_integer"
        max_bytes = self._limits.max_index_integer_bytes if is_integer else self._limits.max_index_bytes
        if isinstance(value, str | bytes) and _num_bytes(value) > max_bytes:
            raise ProtocolError(f"an index exceeds {max_bytes} bytes")
        return int.from_bytes(message.big_integer, "little", signed=True) if is_integer else value

    def _count(self, number: int) -> None:
        self._num_parts += number
        if self._num_parts > self._limits.max_index_parts:
            raise ProtocolError(f"the indices of a request have more than {self._limits.max_index_parts} parts")


def _num_bytes(value: str | bytes) -> int:
    return len(value.encode()) if isinstance(value, str) else len(value)
