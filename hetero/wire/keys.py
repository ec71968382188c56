"""Indices that are not all integers <-> their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hetero.batches.indices import MAX_INDEX_DEPTH, fits_int64, is_integers
from hetero.errors import ConfigError, ProtocolError
from hetero.spec import Index
from hetero.wire.limits import Limits
from hetero.wire.proto import data_pb2 as pb

__all__ = ["decode_keys", "encode_keys"]


def encode_keys(messages: Any, indices: Sequence[Index], limits: Limits) -> None:
    """Append the messages of some indices.

    Args:
        messages: Repeated field of ``Key`` messages.
        indices: Indices as `hetero.batches.request.as_indices` returns them.
        limits: The receiver's limits.

    Raises:
        ConfigError: If an index exceeds a limit, or has an unsupported type.
        ValueError: If a text cannot be encoded in UTF-8.
    """
    encoder = _Encoder(limits)
    for index in indices:
        encoder.fill(messages.add(), index, 0)


def decode_keys(messages: Iterable[pb.Key], limits: Limits) -> tuple[Index, ...]:
    """Return the indices in some messages.

    Raises:
        ProtocolError: If `encode_keys` could not have made the messages.
    """
    decoder = _Decoder(limits)
    return tuple([decoder.index(message, 0) for message in messages])


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
