"""The functions that an unauthenticated peer's bytes reach first. Each takes any bytes.

`run` is what the fuzzer calls, what the suite calls with the corpus, and what mutated frames are given to: the first
byte says which parser gets the rest. Whatever that raises beyond its documented errors is a finding, and so is an
allocation beyond the limits.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any
from unittest import mock

import xxhash

from hetero.batches.structure.leaves import UnknownTypeError
from hetero.control.status import RankReport, status_from_proto
from hetero.errors import DatasetError, ProtocolError
from hetero.wire import framing
from hetero.wire.faults import CallFailedError
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import control_pb2
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.records import record_of
from hetero.wire.requests import failure_from_proto, from_proto, spec_from_proto, to_proto
from hetero.wire.trees import decode_structure

__all__ = ["LIMITS", "TARGETS", "run", "signed", "split_answer"]

LIMITS = Limits(max_batch_bytes=2**16, max_leaves=64, max_nodes=512, max_list_items=4096)
LINK_MESSAGES = (
    pb.AttendRequest,
    pb.AttendReply,
    pb.PrepareRequest,
    pb.PrepareReply,
)
_EXPECTED = (ProtocolError, UnknownTypeError, DatasetError, CallFailedError)
_LENGTH = struct.Struct("<I")


class Excess(BaseException):
    """More was to be allocated than the limits allow."""


def split_answer(data: bytes) -> tuple[bytes, bytes]:
    """Return the message and the payload of an answer as it travels."""
    size = _LENGTH.unpack_from(data.ljust(_LENGTH.size, b"\0"))[0] % (len(data) + 1)
    rest = data[_LENGTH.size :]
    return rest[:size], rest[size:]


def _decode(data: bytes, compression: str | None) -> Any:
    allocated = 0

    def allocate(nbytes: int) -> memoryview:
        nonlocal allocated
        allocated += nbytes
        if not 0 < nbytes <= allocated <= LIMITS.max_batch_bytes:
            raise Excess(f"{allocated} bytes")
        return memoryview(bytearray(nbytes))

    message, payload = split_answer(data)
    decoder = BatchDecoder(LIMITS, allocate=allocate, compression=compression)
    decoder.take_message(message)
    with mock.patch.object(framing, "_allocate", allocate):  # for leaves other than tensors
        while payload and not decoder.done:
            room = decoder.room()[: len(payload)]
            room[:] = payload[: len(room)]
            payload = payload[len(room) :]
            decoder.filled(len(room))
    return decoder.result()


def signed(data: bytes) -> bytes:
    """Return an answer with the sizes and the checksum that belong to it, as a holder of the token can make it."""
    message, payload = split_answer(data)
    try:
        parsed = parse(pb.Answer, message)
    except ProtocolError:
        return data
    if not parsed.HasField("header"):
        return data
    parsed.header.protocol = PROTOCOL
    parsed.header.payload_bytes = len(payload)
    parsed.header.checksum = xxhash.xxh3_64_intdigest(parsed.header.structure + payload)
    message = parsed.SerializeToString()
    return _LENGTH.pack(len(message)) + message + payload


def _request(data: bytes) -> object:
    message = parse(pb.FetchRequest, data)
    request = from_proto(message, LIMITS)
    again = from_proto(parse(pb.FetchRequest, to_proto(request, LIMITS).SerializeToString()), LIMITS)
    # What is accepted means the same to the next one who reads it.
    for field in dataclasses.fields(request):
        if field.name != "work":
            assert getattr(again, field.name) == getattr(request, field.name)
    assert repr(list(again.work.labels)) == repr(list(request.work.labels))  # NaN is not equal to itself
    return request


def _link(data: bytes) -> object:
    """The gRPC messages that a reader and an endpoint parse."""
    kind = LINK_MESSAGES[data[0] % len(LINK_MESSAGES)] if data else pb.AttendReply
    message = parse(kind, data[1:])
    if isinstance(message, pb.PrepareRequest):
        return spec_from_proto(message.dataset)
    if isinstance(message, pb.PrepareReply) and message.HasField("failure"):
        return failure_from_proto(message.failure)
    return dict(message.environment) if isinstance(message, pb.PrepareReply) else message


TARGETS: tuple[Callable[[bytes], object], ...] = (
    lambda data: _decode(data, None),
    lambda data: _decode(signed(data), None),
    lambda data: _decode(data, "lz4"),
    lambda data: _decode(data, "zstd"),
    lambda data: decode_structure(data, LIMITS),
    _request,
    lambda data: status_from_proto(parse(control_pb2.HostStatus, data)),
    lambda data: record_of(RankReport, parse(control_pb2.RankReport, data)),
    _link,
)


def run(data: bytes) -> str:
    """Give the bytes to the parser that the first of them names. Return how that ended."""
    if not data:
        return "empty"
    try:
        TARGETS[data[0] % len(TARGETS)](data[1:])
    except _EXPECTED as error:
        return type(error).__name__
    return "accepted"
