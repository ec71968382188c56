"""A nested batch <-> an answer: a message, and the payload after it.

The message is a protobuf ``Answer``: the header of a batch (version, structure, sizes, checksum), the failure of
the user's code, or a refusal; each with the checksum of the request that it answers, so that the answer to another
request, or to one that was damaged on its way, does not pass. After a header come the leaves' bytes one after the
other, with nothing between them: sent from the batch's own memory, received into memory that is the batch's. Compressed
ones come in blocks, whose sizes the header says (`hetero.wire.compression`); the checksum is of what they were before.
No I/O here.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from hetero.batches.leaves import Leaf, LeafShape
from hetero.batches.skips import Skips
from hetero.batches.structure import UnsupportedBatchError, flatten, unflatten
from hetero.batches.trees import Tree
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire.compression import (
    BlockReader,
    ChecksumError,
    Codec,
    compress_leaf,
    compression_from_proto,
    compression_to_proto,
    load_codec,
    raw_block_sizes,
)
from hetero.wire.limits import BLOCK_BYTES, PROTOCOL, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.requests import failure_from_proto, failure_to_proto
from hetero.wire.skips import decode_skips, encode_skips
from hetero.wire.trees import decode_structure, encode_structure

__all__ = [
    "BatchDecoder",
    "EncodedBatch",
    "Refusal",
    "RefusedError",
    "encode_failure",
    "encode_refusal",
    "why_unsendable",
]

_CHUNK_BYTES = 16 * 2**20
"""Received and checked at once. Less costs no less of the processor, and takes the interpreter's lock more often: for
each time, a training loop in Python may keep a thread waiting for 5 ms."""
_MAX_DETAILS = 500
_TAGS = {"header": 0x0A, "failure": 0x12, "refusal": 0x1A}
"""First byte of an answer: field number << 3 | 2, "length-delimited"."""
_DEFAULT_LIMITS = Limits()


class Refusal(enum.Enum):
    """Why a request gets no batch, where that is not the user's code's doing."""

    BUSY = "it has too many requests in work"
    UNPREPARED = "it has not built the data set"
    MALFORMED = "it does not understand the request"
    BROKEN = "it failed internally"


class RefusedError(Exception):
    """An endpoint refused a request."""

    def __init__(self, refusal: Refusal, details: str) -> None:
        super().__init__(refusal, details)
        self.refusal = refusal
        self.details = details

    def __str__(self) -> str:
        return f"{self.refusal.value}: {self.details}"


class EncodedBatch:
    """The answer that holds one batch.

    Args:
        batch: See `hetero.batches.structure.flatten`.
        limits: Bounds of what is sent.
        num_queued: Requests that wait on this endpoint.
        copy: Whether the batch may change or go before it is sent. Without, its memory is what is sent.
        skips: The samples that others stand in for.
        request: What it answers, as it arrived.

    Raises:
        UnsupportedBatchError: If something in the batch cannot be sent, or the batch exceeds a limit.
    """

    __slots__ = ("_header", "_pieces", "_request", "nbytes")

    def __init__(
        self,
        batch: Any,
        *,
        limits: Limits = _DEFAULT_LIMITS,
        num_queued: int = 0,
        copy: bool = True,
        skips: Skips | None = None,
        request: bytes = b"",
    ) -> None:
        tree, leaves = flatten(batch, limits)
        structure = encode_structure(tree, leaves)
        if len(structure) > limits.max_header_bytes:
            raise UnsupportedBatchError(
                f"batch: its keys, numbers and short strings take {len(structure)} bytes, "
                f"at most {limits.max_header_bytes} are allowed\n  Use tensors, arrays or longer lists."
            )
        self._pieces = [leaf.data for leaf in leaves if leaf.nbytes]
        if copy:
            self._pieces = [_copy(data) for data in self._pieces]
        self.nbytes: int = sum(map(len, self._pieces))
        """Payload, uncompressed."""
        skipped = encode_skips(skips)
        hasher = xxhash.xxh3_64(structure)
        hasher.update(skipped)
        for data in self._pieces:
            hasher.update(data)
        self._header = pb.BatchHeader(
            protocol=PROTOCOL,
            structure=structure,
            payload_bytes=self.nbytes,
            checksum=hasher.intdigest(),
            num_queued=num_queued,
            skips=skipped,
        )
        self._request = _digest(request)

    def compress(self, name: str) -> None:
        """Compress the payload, where that makes it smaller; once, before it is sent.

        Args:
            name: One of `hetero.wire.compression.COMPRESSIONS`.

        Raises:
            ConfigError: If its package is not installed here; nothing has changed then.
        """
        codec = load_codec(name)
        self._header.compression = compression_to_proto(name)
        leaves, self._pieces = self._pieces, []
        for data in leaves:
            pieces, sizes = compress_leaf(data, codec)
            self._pieces += pieces
            self._header.block_bytes.extend(sizes)

    @property
    def message(self) -> bytes:
        """What precedes the payload; made anew each time."""
        return pb.Answer(header=self._header, request=self._request).SerializeToString()

    @property
    def payload(self) -> Sequence[memoryview]:
        """What follows the message: bytes, read-only or not, of at least one byte each."""
        return self._pieces


def why_unsendable(batch: Any, limits: Limits = _DEFAULT_LIMITS) -> str | None:
    """Return why a data host could not send a batch, None if it could; raises nothing and copies no dense tensor."""
    try:
        EncodedBatch(batch, limits=limits, copy=False)
    except Exception as error:  # noqa: BLE001 - whatever objects of the user's raise, a data host would report it too
        return str(error)
    return None


def encode_failure(failure: SampleFailure, *, request: bytes = b"") -> bytes:
    """Return the answer that says that the user's code raised.

    Args:
        failure: What is known of it.
        request: What it answers, as it arrived.
    """
    return pb.Answer(failure=failure_to_proto(failure), request=_digest(request)).SerializeToString()


def encode_refusal(refusal: Refusal, details: str, *, request: bytes = b"") -> bytes:
    """Return the answer that refuses the request.

    Args:
        refusal: Why.
        details: In words; cut if they are long.
        request: What it answers, as it arrived.
    """
    message = pb.Refusal(reason=refusal.name, details=details[:_MAX_DETAILS])
    return pb.Answer(refusal=message, request=_digest(request)).SerializeToString()


def _allocate(nbytes: int) -> memoryview:
    """Return a writable buffer; unlike bytearray, NumPy does not clear it first."""
    return np.empty(nbytes, np.uint8).data


def _copy(data: memoryview) -> memoryview:
    copied = _allocate(len(data))
    copied[:] = data
    return copied


class BatchDecoder:
    """Rebuilds one batch from its answer, trusting nothing of it.

        decoder.take_message(stream.receive_message(limits.max_answer_bytes))
        while not decoder.done:
            if decoder.needs_memory:
                stream.wait_for_data()
            decoder.filled(stream.receive_into(decoder.room()))
        batch = decoder.result()

    Args:
        limits: Nothing beyond them is accepted, or allocated.
        allocate: Returns a writable buffer of so many bytes, for one tensor; pinned memory, say. torch does not pin
            other leaves either.
        compression: What was asked for; another one is not accepted.
        max_skipped: Samples that others may stand in for: 0 if the request does not allow it.
        request: What was sent: the answer to another one, or to this one damaged on its way, is not accepted.

    Raises:
        ConfigError: If the package of that compression is not installed here.
    """

    def __init__(
        self,
        limits: Limits = _DEFAULT_LIMITS,
        *,
        allocate: Callable[[int], memoryview] = _allocate,
        compression: str | None = None,
        max_skipped: int = 0,
        request: bytes = b"",
    ) -> None:
        self._limits = limits
        self._allocate = allocate
        self._compression = compression
        self._max_skipped = max_skipped
        self._codec: Codec | None = None if compression is None else load_codec(compression)
        self._blocks: BlockReader | None = None
        self._has_header = False
        self._tree: Tree = None
        self._shapes: list[LeafShape] = []
        self._buffers: list[memoryview] = []
        self._leaf_index = -1  # of the leaf that is being filled: the last of the buffers
        self._filled = 0  # bytes of that leaf
        self._missing = 0  # bytes of payload
        self._expected_checksum = 0
        self._hasher = xxhash.xxh3_64()
        self._request = _digest(request)

        self.nbytes = 0
        """Payload, uncompressed; 0 before the header has come."""
        self.saved_bytes = 0
        """Of the payload, by compression."""
        self.lacks_compression = False
        """Whether the endpoint has not the package for what was asked of it."""
        self.skips: Skips | None = None
        """The samples that others stand in for."""
        self.num_queued = 0
        """Requests that waited on the endpoint."""

    @property
    def done(self) -> bool:
        """Whether the batch is complete and its checksum right."""
        return self._has_header and self._missing == 0

    def take_message(self, message: bytes) -> None:
        """Take the message that an answer begins with; allocates nothing.

        Raises:
            DatasetError: If it says that the user's code raised.
            RefusedError: If it refuses the request.
            ChecksumError: If it answers another request; or there is no payload, and the batch is not what was sent.
            ProtocolError: If `EncodedBatch` would not have made this here. The decoder is of no use any more.
        """
        if len(message) > self._limits.max_answer_bytes:
            raise ProtocolError(
                f"an answer has {len(message)} bytes, at most {self._limits.max_answer_bytes} are allowed"
            )
        answer = parse(pb.Answer, message)
        part = answer.WhichOneof("part")
        if part is None:
            raise ProtocolError("an answer is neither batch nor failure nor refusal")
        if message[0] != _TAGS[part]:
            raise ProtocolError("an answer holds more than one part")
        if answer.request != self._request:
            raise ChecksumError("an answer is not to this request, or one of both arrived damaged")
        if part == "failure":
            if len(message) > self._limits.max_failure_bytes:
                raise ProtocolError(f"a failure has {len(message)} bytes, more than {self._limits.max_failure_bytes}")
            raise DatasetError(failure_from_proto(answer.failure))
        if part == "refusal":
            raise _refused(answer.refusal)
        self._take_header(answer.header)
        self._check_end()

    @property
    def needs_memory(self) -> bool:
        """Whether `room` allocates a leaf next: not to be called before a byte of it has come."""
        return self._leaf_index < 0 or self._filled == self._shapes[self._leaf_index].nbytes

    def room(self) -> memoryview:
        """Return where the next bytes of payload go; only while the batch is not complete."""
        if self.needs_memory:
            self._next_leaf()
        if self._blocks is not None:
            return self._blocks.room(self._block())
        return self._buffers[-1][self._filled : self._filled + _CHUNK_BYTES]

    def filled(self, nbytes: int) -> None:
        """Take note that so many bytes of the `room` are there now.

        Raises:
            ChecksumError: If these were the last ones, of the batch or of a block, and it is not what was sent.
        """
        if self._blocks is not None:
            nbytes = self._blocks.filled(nbytes, self._block())
        self._hasher.update(self._buffers[-1][self._filled : self._filled + nbytes])
        self._filled += nbytes
        self._missing -= nbytes
        self._check_end()

    def result(self) -> Any:
        """Return the batch, whose tensors and arrays are writable and own their memory; once.

        Raises:
            ProtocolError: If it is not complete, or its parts do not make a batch here.
            UnknownTypeError: If it is what was sent, and holds a type that this process does not have.
        """
        if not self.done:
            raise ProtocolError(f"a batch ended early: {self._missing} of {self.nbytes} bytes are missing")
        buffers = iter(self._buffers)
        self._buffers = []
        leaves = [
            Leaf(
                container=shape.container,
                dtype=shape.dtype,
                shape=shape.shape,
                nbytes=shape.nbytes,
                strides=shape.strides,
                data=next(buffers) if shape.nbytes else memoryview(b""),
            )
            for shape in self._shapes
        ]
        return unflatten(self._tree, leaves)

    def _take_header(self, header: pb.BatchHeader) -> None:
        if header.protocol != PROTOCOL:
            raise ProtocolError(
                f"the endpoint speaks protocol {header.protocol}, this side {PROTOCOL}\n"
                "  Install the same version of hetero on all hosts."
            )
        if len(header.structure) > self._limits.max_header_bytes:
            raise ProtocolError(
                f"the structure of a batch has {len(header.structure)} bytes, "
                f"at most {self._limits.max_header_bytes} are allowed"
            )
        tree, shapes = decode_structure(header.structure, self._limits)
        nbytes = sum(shape.nbytes for shape in shapes)
        if nbytes != header.payload_bytes:
            raise ProtocolError(f"the leaves of a batch have {nbytes} bytes, its header says {header.payload_bytes}")
        if nbytes > self._limits.max_batch_bytes:
            raise ProtocolError(
                f"a batch has {nbytes} bytes, at most {self._limits.max_batch_bytes} are allowed\n"
                "  Use smaller batches, send uint8 and normalise on the accelerator, or raise --max-batch-bytes."
            )
        if self._codec is not None or header.compression:
            self._take_blocks(header, shapes)
        self.skips = decode_skips(header.skips, max_skipped=self._max_skipped)
        self._tree, self._shapes = tree, shapes
        self._expected_checksum = header.checksum
        self._hasher.update(header.structure)
        self._hasher.update(header.skips)
        self.nbytes = self._missing = nbytes
        self.num_queued = header.num_queued
        self._has_header = True

    def _take_blocks(self, header: pb.BatchHeader, shapes: Sequence[LeafShape]) -> None:
        """Check what is said of compression, before anything is allocated."""
        compression = compression_from_proto(header.compression)
        if compression is None:
            self.lacks_compression = True
            return
        if self._codec is None or compression != self._compression:
            raise ProtocolError(f"a batch is compressed with {compression}, {self._compression} was asked for")
        sizes = list(header.block_bytes)
        expected = [size for shape in shapes for size in raw_block_sizes(shape.nbytes)]
        if len(sizes) != len(expected):
            raise ProtocolError(f"a batch has {len(sizes)} compressed blocks, its leaves make {len(expected)}")
        for size, raw_size in zip(sizes, expected, strict=True):
            if size >= raw_size:  # it would have travelled as it is
                raise ProtocolError(f"a compressed block has {size} bytes, it is to give {raw_size}")
            if size:
                self.saved_bytes += raw_size - size
        self._blocks = BlockReader(self._codec, sizes)

    def _block(self) -> memoryview:
        """Return where the block belongs that is coming."""
        return self._buffers[-1][self._filled : self._filled + BLOCK_BYTES]

    def _check_end(self) -> None:
        if self.done and self._hasher.intdigest() != self._expected_checksum:
            self._missing = -1
            raise ChecksumError(f"a batch of {self.nbytes} bytes arrived damaged: its checksum differs")

    def _next_leaf(self) -> None:
        """Allocate the next leaf that has bytes."""
        self._leaf_index += 1
        while not self._shapes[self._leaf_index].nbytes:
            self._leaf_index += 1
        shape = self._shapes[self._leaf_index]
        nbytes = shape.nbytes
        buffer = self._allocate(nbytes) if shape.container == "tensor" else _allocate(nbytes)
        self._buffers.append((buffer if buffer.format == "B" else buffer.cast("B"))[:nbytes])
        self._filled = 0


def _digest(request: bytes) -> int:
    """Return what an answer says of the request that it answers; 0: that it arrived as no whole one."""
    return xxhash.xxh3_64_intdigest(request) if request else 0


def _refused(message: pb.Refusal) -> Exception:
    name = pb.Refusal.Reason.Name(message.reason) if message.reason in pb.Refusal.Reason.values() else ""
    if name not in Refusal.__members__:
        return ProtocolError(f"an answer refuses for the unknown reason {message.reason}")
    return RefusedError(Refusal[name], " ".join(message.details.split())[:_MAX_DETAILS])
