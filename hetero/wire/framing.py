"""Converts a nested batch to an answer, which is a message and the payload after it, and back.

The message is a protobuf ``Answer``. It holds either the header of a batch (version, structure, sizes, checksum), a
failure of the user's code, or a refusal. Every answer also carries a checksum of the request. The receiver therefore
rejects an answer to another request, or to a request that was damaged on its way.

If the message holds a header, the payload follows the message. The payload consists of the leaves' bytes one after the
other, without separators. The payload is sent from the batch's own memory, and received directly into the memory of the
new batch. A compressed payload comes in blocks, and the header lists the sizes of the blocks
(`hetero.wire.compression`). The checksum covers the uncompressed bytes. This module does not do I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from hetero.batches.failures import MAX_SKIP_CHARS
from hetero.batches.skips import MAX_LISTED, Skip, Skips
from hetero.batches.structure.conversion import UnsupportedBatchError, flatten, unflatten
from hetero.batches.structure.leaves import LeafShape
from hetero.batches.structure.trees import Tree
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
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.limits import BLOCK_BYTES, MAX_SKIPS_BYTES, PROTOCOL, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.requests import failure_from_proto, failure_to_proto
from hetero.wire.trees import decode_structure, encode_structure

__all__ = [
    "BatchDecoder",
    "EncodedBatch",
    "decode_skips",
    "encode_failure",
    "encode_refusal",
    "encode_skips",
    "why_unsendable",
]

_CHUNK_BYTES = 16 * 2**20
"""Largest number of bytes that are received and checked at once. With smaller chunks, the thread needs the
interpreter's lock more often, and saves no CPU time. Each time, it may wait 5 ms for a training loop in Python."""
_MAX_DETAILS = 500
_TAGS = {"header": 0x0A, "failure": 0x12, "refusal": 0x1A}
"""First byte of each kind of answer: field number << 3 | 2, which means "length-delimited"."""
_DEFAULT_LIMITS = Limits()


class EncodedBatch:
    """The answer that holds one batch.

    Args:
        batch: See `hetero.batches.structure.conversion.flatten`.
        limits: Bounds that the batch must not exceed.
        num_queued: Number of requests that wait on this endpoint.
        copy: Whether to copy the batch now, because it may change or be freed before it is sent.
        skips: The skipped samples of the batch.
        request: The bytes of the answered request, as they arrived.
        is_part: Whether this is a list of samples, the answer to a request for a part of a batch.
        num_parts: Number of endpoints that have computed samples of the batch.

    Raises:
        UnsupportedBatchError: If something in the batch cannot be sent, or the batch exceeds a limit.
    """

    __slots__ = ("_header", "_request_digest", "is_part", "nbytes", "payload")

    def __init__(
        self,
        batch: Any,
        *,
        limits: Limits = _DEFAULT_LIMITS,
        num_queued: int = 0,
        copy: bool = True,
        skips: Skips | None = None,
        request: bytes = b"",
        is_part: bool = False,
        num_parts: int = 1,
    ) -> None:
        self.is_part = is_part
        tree, leaves = flatten(batch, limits)
        structure = encode_structure(tree, leaves)
        if len(structure) > limits.max_header_bytes:
            raise UnsupportedBatchError(
                f"batch: its keys, numbers and short strings take {len(structure)} bytes, "
                f"at most {limits.max_header_bytes} are allowed\n  Use tensors, arrays or longer lists."
            )
        self.payload = [leaf.data for leaf in leaves if leaf.nbytes]
        """Buffers that follow the message, each of at least one byte. They may be read-only."""
        # Copy the batch only if the user's code may fill its memory again. With copies, each answer in progress takes
        # the memory of one more batch.
        if copy:
            self.payload = [_copy(data) for data in self.payload]
        self.nbytes: int = sum(map(len, self.payload))
        """Bytes of the payload, uncompressed."""
        skipped = encode_skips(skips)
        hasher = xxhash.xxh3_64(structure)
        hasher.update(skipped)
        for data in self.payload:
            hasher.update(data)
        self._header = pb.BatchHeader(
            protocol=PROTOCOL,
            structure=structure,
            payload_bytes=self.nbytes,
            checksum=hasher.intdigest(),
            num_queued=num_queued,  # the load of this endpoint, by which readers choose endpoints
            skips=skipped,
            num_parts=num_parts,
        )
        # The digest tells the receiver which request this answers. The checksum cannot, because it covers only the
        # batch, so it is also right in the answer to another request.
        self._request_digest = _digest(request)

    def compress(self, name: str) -> None:
        """Compress the blocks of the payload that become smaller. Call this once at most, before sending.

        Args:
            name: One of `hetero.wire.compression.COMPRESSIONS`.

        Raises:
            ConfigError: If the codec's package is not installed here. The batch is then unchanged.
        """
        codec = load_codec(name)
        self._header.compression = compression_to_proto(name)
        leaves, self.payload = self.payload, []
        for data in leaves:
            blocks, sizes = compress_leaf(data, codec)
            self.payload += blocks
            self._header.block_bytes.extend(sizes)

    @property
    def message(self) -> bytes:
        """Bytes of the message, which precedes the payload. Each access serialises the message again."""
        return pb.Answer(header=self._header, request=self._request_digest).SerializeToString()


def why_unsendable(batch: Any, limits: Limits = _DEFAULT_LIMITS) -> str | None:
    """Return why a data host could not send a batch. None if it could. Never raises, and copies no dense tensors."""
    try:
        EncodedBatch(batch, limits=limits, copy=False)
    except Exception as error:  # noqa: BLE001 - a data host would report whatever the user's objects raise
        return str(error)
    return None


def encode_failure(failure: SampleFailure, *, request: bytes = b"") -> bytes:
    """Return the answer that reports an exception of the user's code.

    Args:
        failure: Description of the exception.
        request: The bytes of the answered request, as they arrived.
    """
    return pb.Answer(failure=failure_to_proto(failure), request=_digest(request)).SerializeToString()


def encode_refusal(fault: Fault, details: str, *, request: bytes = b"") -> bytes:
    """Return the answer that refuses the request.

    Args:
        fault: The reason. It must be a fault with ``is_refusal``.
        details: More about the reason. Long text is cut.
        request: The bytes of the answered request, as they arrived.
    """
    message = pb.Refusal(reason=fault.name, details=details[:_MAX_DETAILS])
    return pb.Answer(refusal=message, request=_digest(request)).SerializeToString()


def _allocate(nbytes: int) -> memoryview:
    """Return a writable NumPy buffer. It is faster than a bytearray, whose memory is cleared first."""
    return np.empty(nbytes, np.uint8).data


def _copy(data: memoryview) -> memoryview:
    """Return a copy of a buffer in new memory."""
    copied = _allocate(len(data))
    copied[:] = data
    return copied


class BatchDecoder:
    """Rebuilds one batch from its answer, which is not trusted.

        decoder.take_message(stream.receive_message(limits.max_answer_bytes))
        while not decoder.done:
            if decoder.needs_memory:
                stream.wait_for_data()
            decoder.filled(stream.receive_into(decoder.room()))
        batch = decoder.result()

    Args:
        limits: Larger answers are rejected before memory is allocated for them.
        allocate: Returns a writable buffer of the given number of bytes for one tensor, for example pinned memory. It
            is not used for other leaves, because torch does not pin them either.
        compression: The requested compression. Any other compression is rejected.
        max_skipped: Largest number of skipped samples. 0 if the request does not allow skips.
        request: The bytes of the request as they were sent. An answer to other bytes is rejected.

    Raises:
        ConfigError: If the package of the compression is not installed here.
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
        self._shapes: Sequence[LeafShape] = ()
        self._buffers: list[memoryview] = []
        self._leaf_index = -1  # index of the leaf that is being filled; its buffer is the last of `_buffers`
        self._filled = 0  # bytes of this leaf that have arrived
        self._missing = 0  # bytes of payload that have not arrived
        self._expected_checksum = 0
        self._hasher = xxhash.xxh3_64()
        self._request_digest = _digest(request)

        self.nbytes = 0
        """Bytes of the payload, uncompressed. 0 until the header has arrived."""
        self.saved_bytes = 0
        """Bytes of the payload that compression saved."""
        self.lacks_compression = False
        """Whether the endpoint lacks the package of the requested compression."""
        self.skips: Skips | None = None
        """The skipped samples of the batch."""
        self.num_queued = 0
        """Number of requests that waited on the endpoint."""
        self.num_parts = 0
        """Number of endpoints that have computed samples of the batch."""

    @property
    def done(self) -> bool:
        """Whether the batch is complete and its checksum is right."""
        return self._has_header and self._missing == 0

    def take_message(self, message: bytes) -> None:
        """Process the message at the start of an answer. Does not allocate memory for the payload.

        Raises:
            DatasetError: If the message reports an exception of the user's code.
            CallFailedError: If the message refuses the request.
            ChecksumError: If the message answers another request, or if a batch without payload arrived damaged.
            ProtocolError: If this version of hetero could not have made the message. The decoder is then unusable.
        """
        if len(message) > self._limits.max_answer_bytes:
            raise ProtocolError(
                f"an answer has {len(message)} bytes, at most {self._limits.max_answer_bytes} are allowed"
            )
        # The answer must have exactly one part (header, failure or refusal), and belong to this request.
        answer = parse(pb.Answer, message)
        part = answer.WhichOneof("part")
        if part is None:
            raise ProtocolError("an answer is neither batch nor failure nor refusal")
        # If a message holds several parts, protobuf keeps the last one. Then the first byte names another part.
        if message[0] != _TAGS[part]:
            raise ProtocolError("an answer holds more than one part")
        # Without this check, a proxy that repeated a piece of the stream made a reader train on other samples, because
        # the checksum of the repeated batch was right.
        if answer.request != self._request_digest:
            raise ChecksumError("an answer belongs to another request, or one of the two arrived damaged")
        if part == "failure":
            if len(message) > self._limits.max_failure_bytes:
                raise ProtocolError(f"a failure has {len(message)} bytes, more than {self._limits.max_failure_bytes}")
            raise DatasetError(failure_from_proto(answer.failure))
        if part == "refusal":
            raise _refused(answer.refusal)
        self._take_header(answer.header)
        # A batch without payload is complete now.
        self._check_end()

    @property
    def needs_memory(self) -> bool:
        """Whether the next call of `room` allocates a leaf. If so, first wait until a byte of that leaf has arrived.

        True before the first leaf, and when the present leaf is full.
        """
        return self._leaf_index < 0 or self._filled == self._shapes[self._leaf_index].nbytes

    def room(self) -> memoryview:
        """Return the buffer for the next bytes of payload. Do not call this when the batch is complete."""
        if self.needs_memory:
            self._next_leaf()
        # A compressed payload arrives block by block, any other payload directly in the leaf.
        if self._blocks is not None:
            return self._blocks.room(self._block())
        return self._buffers[-1][self._filled : self._filled + _CHUNK_BYTES]

    def filled(self, nbytes: int) -> None:
        """Record that this number of bytes has been received into the `room`.

        Raises:
            ChecksumError: If the batch or a block is now complete, and arrived damaged.
        """
        # With compression, the leaf grows by a whole block when that block is complete, and by 0 bytes before.
        if self._blocks is not None:
            nbytes = self._blocks.filled(nbytes, self._block())
        self._hasher.update(self._buffers[-1][self._filled : self._filled + nbytes])
        self._filled += nbytes
        self._missing -= nbytes
        self._check_end()

    def result(self) -> Any:
        """Return the batch. Its tensors and arrays are writable and own their memory. Call this once only.

        Raises:
            ProtocolError: If the batch is not complete, or its parts do not fit together.
            UnknownTypeError: If the batch is intact but contains a type that this process does not have.
        """
        if not self.done:
            raise ProtocolError(f"a batch ended early: {self._missing} of {self.nbytes} bytes are missing")
        buffers = iter(self._buffers)
        # Drop the buffers, because the decoder must not keep the batch alive.
        self._buffers = []
        leaves = [shape.filled(next(buffers) if shape.nbytes else memoryview(b"")) for shape in self._shapes]
        return unflatten(self._tree, leaves)

    def _take_header(self, header: pb.BatchHeader) -> None:
        """Check the header of a batch and keep its values. Allocates no memory for the payload."""
        # Check versions and sizes before anything is allocated.
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
            raise ProtocolError(
                f"the leaves of a batch have {nbytes} bytes, but its header says {header.payload_bytes}"
            )
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
        self.num_queued, self.num_parts = header.num_queued, header.num_parts
        self._has_header = True

    def _take_blocks(self, header: pb.BatchHeader, shapes: Sequence[LeafShape]) -> None:
        """Check the header's fields about compression, before anything is allocated."""
        compression = compression_from_proto(header.compression)
        if compression is None:
            # The request named a compression. An endpoint leaves it out only if it lacks the package.
            self.lacks_compression = True
            return
        if self._codec is None or compression != self._compression:
            raise ProtocolError(f"a batch is compressed with {compression}, but {self._compression} was requested")
        # The header has the sizes of all blocks, so they are checked before anything is allocated. An endpoint can put
        # them into the header, because it compresses the whole batch before it sends the header.
        sizes = list(header.block_bytes)
        expected = [size for shape in shapes for size in raw_block_sizes(shape.nbytes)]
        if len(sizes) != len(expected):
            raise ProtocolError(f"a batch has {len(sizes)} compressed blocks, its leaves make {len(expected)}")
        for size, raw_size in zip(sizes, expected, strict=True):
            if size >= raw_size:  # such a block would have been sent uncompressed
                raise ProtocolError(f"a compressed block has {size} bytes, expected less than its {raw_size} of data")
            if size:  # 0 for a block that is not compressed
                self.saved_bytes += raw_size - size
        self._blocks = BlockReader(self._codec, sizes)

    def _block(self) -> memoryview:
        """Return the part of the leaf that the arriving block fills."""
        return self._buffers[-1][self._filled : self._filled + BLOCK_BYTES]

    def _check_end(self) -> None:
        """Raise `ChecksumError` if the batch is complete and damaged."""
        if self.done and self._hasher.intdigest() != self._expected_checksum:
            # With -1, `done` stays false, so `result` returns no damaged batch.
            self._missing = -1
            raise ChecksumError(f"a batch of {self.nbytes} bytes arrived damaged: its checksum differs")

    def _next_leaf(self) -> None:
        """Allocate the next leaf that has bytes. Empty leaves are made in `result`."""
        self._leaf_index += 1
        while not self._shapes[self._leaf_index].nbytes:
            self._leaf_index += 1
        shape = self._shapes[self._leaf_index]
        nbytes = shape.nbytes
        # The caller's function may return pinned memory, which is only for tensors, as in torch's own loader.
        buffer = self._allocate(nbytes) if shape.container == "tensor" else _allocate(nbytes)
        # The caller's function may return a buffer of another format, or a larger one.
        self._buffers.append((buffer if buffer.format == "B" else buffer.cast("B"))[:nbytes])
        self._filled = 0


def _digest(request: bytes) -> int:
    """Return the checksum that identifies the request in an answer, or 0 if the request arrived incomplete."""
    return xxhash.xxh3_64_intdigest(request) if request else 0


def _refused(message: pb.Refusal) -> Exception:
    """Return the exception for a refusal. A reason that no endpoint of this version sends gives a `ProtocolError`."""
    name = pb.Refusal.Reason.Name(message.reason) if message.reason in pb.Refusal.Reason.values() else ""
    if name not in Fault.__members__ or not Fault[name].value.is_refusal:
        return ProtocolError(f"an answer refuses for the unknown reason {message.reason}")
    return CallFailedError(Fault[name], " ".join(message.details.split())[:_MAX_DETAILS])


def encode_skips(skips: Skips | None) -> bytes:
    """Return a serialised ``Skips`` without epoch and host. Return empty bytes for None."""
    if skips is None:
        return b""
    listed = [pb.Skip(index=skip.index, exception=skip.exception) for skip in skips.listed]
    return pb.Skips(num_skipped=skips.num_skipped, listed=listed).SerializeToString()


def decode_skips(data: bytes, *, max_skipped: int) -> Skips | None:
    """Return the skipped samples, without epoch and host. Return None for empty bytes.

    Args:
        data: The bytes in the header.
        max_skipped: Largest number of skipped samples. 0 if the request does not allow skips.

    Raises:
        ProtocolError: If `encode_skips` could not have made these bytes for a request with this ``max_skipped``.
    """
    if not data:
        return None
    if len(data) > MAX_SKIPS_BYTES:
        raise ProtocolError(
            f"the skipped samples of a batch take {len(data)} bytes, at most {MAX_SKIPS_BYTES} are allowed"
        )
    message = parse(pb.Skips, data)
    if not 1 <= message.num_skipped <= max_skipped:
        raise ProtocolError(f"{message.num_skipped} samples of a batch were skipped, expected at most {max_skipped}")
    expected = min(message.num_skipped, MAX_LISTED)
    if len(message.listed) != expected:
        raise ProtocolError(f"{len(message.listed)} skipped samples are listed, expected {expected}")
    for skip in message.listed:
        for text in (skip.index, skip.exception):
            if len(text) > MAX_SKIP_CHARS or not text.isprintable():
                raise ProtocolError("a skipped sample is described by text that is too long or not printable")
    return Skips(
        num_skipped=message.num_skipped,
        listed=tuple([Skip(index=skip.index, exception=skip.exception) for skip in message.listed]),
    )
