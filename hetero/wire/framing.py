"""A nested batch <-> the frames of a response stream.

    header frame      protobuf ``Frame(header=...)``: version, structure, sizes, checksum;
                      of a small batch also the payload, and no other frame follows
    payload frames    protobuf ``Frame(payload=...)``, written and read by hand: the byte 0x12,
                      the length as a varint, the chunk
    failure frame     protobuf ``Frame(failure=...)`` instead of all of these

Any protobuf reader understands every frame, and Python runs protobuf over no payload but a small batch's.
The payload is the leaves' bytes one after the other; a frame may hold
many small leaves, and a large leaf spans many frames. Sender and receiver copy each byte once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from hetero.batches.leaves import Leaf, LeafShape
from hetero.batches.structure import Tree, UnsupportedBatchError, flatten, unflatten
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.requests import failure_from_proto, failure_to_proto
from hetero.wire.trees import decode_structure, encode_structure, parse

__all__ = ["BatchDecoder", "ChecksumError", "EncodedBatch", "encode_batch", "encode_failure"]

# First bytes of a Frame: field number << 3 | 2, "length-delimited".
_HEADER, _PAYLOAD, _FAILURE = 0x0A, 0x12, 0x1A
_DEFAULT_LIMITS = Limits()


class ChecksumError(ProtocolError):
    """A batch is not what was sent; asking again may help."""


class EncodedBatch:
    """The frames of one batch.

    Args:
        batch: See `hetero.batches.structure.flatten`.
        limits: Bounds of what is sent.
        num_queued: Requests that wait on this endpoint.
        compute_time_s: What the batch took.
        inline_small: Send a batch of at most ``limits.max_inline_payload_bytes`` as a single frame.
        lazy: Copy each frame's bytes when the frame is taken: nobody may change the batch until the last one was.
            Otherwise all are copied now, and the batch may change or go.

    Raises:
        UnsupportedBatchError: If something in the batch cannot be sent, or the batch exceeds a limit.
    """

    __slots__ = ("_header", "_payload", "nbytes")

    def __init__(
        self,
        batch: Any,
        *,
        limits: Limits = _DEFAULT_LIMITS,
        num_queued: int = 0,
        compute_time_s: float = 0.0,
        inline_small: bool = False,
        lazy: bool = False,
    ) -> None:
        tree, leaves = flatten(batch, limits)
        structure = encode_structure(tree, leaves)
        if len(structure) > limits.max_header_bytes:
            raise UnsupportedBatchError(
                f"batch: its keys, numbers and short strings take {len(structure)} bytes, "
                f"at most {limits.max_header_bytes} are allowed\n  Use tensors, arrays or longer lists."
            )
        self.nbytes: int = sum(leaf.nbytes for leaf in leaves)
        """Payload."""
        hasher = xxhash.xxh3_64(structure)
        self._payload: Iterator[bytes] = iter(())
        inline = b""
        if inline_small and self.nbytes <= limits.max_inline_payload_bytes:
            inline = b"".join([leaf.data for leaf in leaves])
            hasher.update(inline)
        elif lazy:
            for leaf in leaves:
                hasher.update(leaf.data)
            self._payload = _payload_frames(leaves, limits.frame_bytes)
        else:
            frames: deque[bytes] = deque()
            for frame in _payload_frames(leaves, limits.frame_bytes):
                # The frame, not the leaves: it is still in the cache, and it is what will be sent.
                hasher.update(_payload_chunk(frame))
                frames.append(frame)
            self._payload = _drain(frames)
        header = pb.BatchHeader(
            protocol=PROTOCOL,
            structure=structure,
            payload_bytes=self.nbytes,
            checksum=hasher.intdigest(),
            num_queued=num_queued,
            compute_time_s=compute_time_s,
            inline_payload=inline,
        )
        self._header = pb.Frame(header=header).SerializeToString()

    def frames(self) -> Iterator[bytes]:
        """Yield the header frame, then the payload frames, keeping none of these: for one pass."""
        yield self._header
        yield from self._payload


def encode_batch(
    batch: Any, *, limits: Limits = _DEFAULT_LIMITS, num_queued: int = 0, compute_time_s: float = 0.0
) -> Iterator[bytes]:
    """Return the frames of a batch; everything that can fail has happened when this returns.

    Raises:
        UnsupportedBatchError: See `EncodedBatch`.
    """
    return EncodedBatch(batch, limits=limits, num_queued=num_queued, compute_time_s=compute_time_s).frames()


def encode_failure(failure: SampleFailure) -> bytes:
    """Return the frame that says that the user's code raised."""
    return pb.Frame(failure=failure_to_proto(failure)).SerializeToString()


def _payload_frames(leaves: Sequence[Leaf], frame_bytes: int) -> Iterator[bytes]:
    """Yield the leaves' bytes as frames, each copied when it is asked for."""
    for pieces, size in _chunks(leaves, frame_bytes):
        yield b"".join((_payload_prefix(size), *pieces))


def _drain(frames: deque[bytes]) -> Iterator[bytes]:
    """Yield what is there and let go of it, so that its memory serves the next batch."""
    while frames:
        yield frames.popleft()


def _chunks(leaves: Sequence[Leaf], frame_bytes: int) -> Iterator[tuple[list[memoryview], int]]:
    """Yield pieces of leaves that fill one frame, and their bytes."""
    pieces: list[memoryview] = []
    size = 0
    for leaf in leaves:
        begin = 0
        while begin < leaf.nbytes:
            piece = leaf.data[begin : begin + frame_bytes - size]
            pieces.append(piece)
            size += len(piece)
            begin += len(piece)
            if size == frame_bytes:
                yield pieces, size
                pieces, size = [], 0
    if pieces:
        yield pieces, size


def _payload_prefix(size: int) -> bytes:
    """Return what precedes a payload of this size in a ``Frame``."""
    prefix = bytearray([_PAYLOAD])
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return bytes(prefix)


def _payload_chunk(frame: bytes) -> memoryview:
    """Return the payload of a frame that `_payload_prefix` begins and nothing follows."""
    # Four bytes of length reach 256 MiB, 64 times what a message can have.
    size = 0
    for position, byte in enumerate(frame[1:5]):
        size |= (byte & 0x7F) << 7 * position
        if byte < 0x80:
            begin = position + 2
            if len(frame) != begin + size or size == 0 or (position > 0 and byte == 0):
                break
            return memoryview(frame)[begin:]
    raise ProtocolError(f"a payload frame of {len(frame)} bytes does not hold the {size} that it announces")


def _allocate(nbytes: int) -> memoryview:
    """Return a writable buffer; unlike bytearray, NumPy does not clear it first."""
    return np.empty(nbytes, np.uint8).data


class BatchDecoder:
    """Rebuilds one batch from its frames, trusting none of them.

    Args:
        limits: Nothing beyond them is accepted, or allocated.
        allocate: Returns a writable buffer of so many bytes, for one leaf; pinned memory, say.
    """

    def __init__(self, limits: Limits = _DEFAULT_LIMITS, *, allocate: Callable[[int], memoryview] = _allocate) -> None:
        self._limits = limits
        self._allocate = allocate
        self._header_seen = False
        self._tree: Tree = None
        self._shapes: list[LeafShape] = []
        self._buffers: list[memoryview] = []
        self._leaf_index = -1  # of the leaf that is being filled: the last of the buffers
        self._filled = 0  # bytes of that leaf
        self._missing = 0  # bytes of payload
        self._expected_checksum = 0
        self._hasher = xxhash.xxh3_64()
        self._has_batch = False
        self._batch: Any = None
        self.nbytes = 0
        """Payload; 0 before the header has come."""
        self.num_queued = 0
        """Requests that waited on the endpoint."""
        self.compute_time_s = 0.0
        """What the batch took there."""

    @property
    def done(self) -> bool:
        """Whether the batch is complete and its checksum right."""
        return self._header_seen and self._missing == 0

    def feed(self, frame: bytes) -> None:
        """Take the next message of the stream.

        Raises:
            DatasetError: If it says that the user's code raised.
            ChecksumError: If it is the last one and the batch is not what was sent.
            ProtocolError: If `encode_batch` would not have sent this here. The decoder is of no use any more.
        """
        if len(frame) > self._limits.max_frame_bytes:
            raise ProtocolError(f"a frame has {len(frame)} bytes, at most {self._limits.max_frame_bytes} are allowed")
        kind = frame[0] if frame else None
        if kind == _PAYLOAD:
            self._take_payload(_payload_chunk(frame))
        elif self._header_seen:
            raise ProtocolError(f"a frame that begins with {kind} follows the header, expected payload")
        elif kind == _HEADER:
            self._take_header(frame)
        elif kind == _FAILURE:
            self._take_failure(frame)
        else:
            raise ProtocolError(f"a frame begins with {kind}, which is no frame of this protocol")
        if self.done and self._hasher.intdigest() != self._expected_checksum:
            self._missing = -1
            raise ChecksumError(f"a batch of {self.nbytes} bytes arrived damaged: its checksum differs")

    def result(self) -> Any:
        """Return the batch, whose tensors and arrays are writable and own their memory.

        Raises:
            ProtocolError: If it is not complete, or its parts do not make a batch here.
        """
        if not self.done:
            raise ProtocolError(f"a batch ended early: {self._missing} of {self.nbytes} bytes are missing")
        if not self._has_batch:
            buffers = iter(self._buffers)
            leaves = [
                Leaf(
                    container=shape.container,
                    dtype=shape.dtype,
                    shape=shape.shape,
                    nbytes=shape.nbytes,
                    data=next(buffers) if shape.nbytes else memoryview(b""),
                )
                for shape in self._shapes
            ]
            self._batch = unflatten(self._tree, leaves)
            self._has_batch = True
            self._buffers = []
        return self._batch

    def _take_header(self, frame: bytes) -> None:
        message = parse(pb.Frame, frame)
        if message.WhichOneof("part") != "header":
            raise ProtocolError("a frame holds more than one part")
        header = message.header
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
                "  Use smaller batches, or send uint8 and normalise on the accelerator."
            )
        if not 0 <= header.compute_time_s < float("inf"):
            raise ProtocolError(f"a batch took {header.compute_time_s} s")
        inline = header.inline_payload
        if len(inline) > self._limits.max_inline_payload_bytes or len(inline) not in (0, nbytes):
            raise ProtocolError(f"a header brings {len(inline)} bytes of payload, but the batch has {nbytes}")
        self._tree, self._shapes = tree, shapes
        self._expected_checksum = header.checksum
        self._hasher.update(header.structure)
        self.nbytes = self._missing = nbytes
        self.num_queued, self.compute_time_s = header.num_queued, header.compute_time_s
        self._header_seen = True
        if inline:
            self._take_payload(memoryview(inline))

    def _take_failure(self, frame: bytes) -> None:
        if len(frame) > self._limits.max_failure_bytes:
            raise ProtocolError(f"a failure has {len(frame)} bytes, more than {self._limits.max_failure_bytes}")
        message = parse(pb.Frame, frame)
        if message.WhichOneof("part") != "failure":
            raise ProtocolError("a frame holds more than one part")
        raise DatasetError(failure_from_proto(message.failure))

    def _take_payload(self, chunk: memoryview) -> None:
        if len(chunk) > self._missing:
            what = f"{self._missing} are missing" if self._header_seen else "no header has come"
            raise ProtocolError(f"a payload frame brings {len(chunk)} bytes, but {what}")
        self._hasher.update(chunk)
        self._missing -= len(chunk)
        begin = 0
        while begin < len(chunk):
            if self._leaf_index < 0 or self._filled == self._shapes[self._leaf_index].nbytes:
                self._next_leaf()
            buffer = self._buffers[-1]
            size = min(len(chunk) - begin, len(buffer) - self._filled)
            buffer[self._filled : self._filled + size] = chunk[begin : begin + size]
            self._filled += size
            begin += size

    def _next_leaf(self) -> None:
        """Allocate the next leaf that has bytes: not before its first byte has come."""
        self._leaf_index += 1
        while not self._shapes[self._leaf_index].nbytes:
            self._leaf_index += 1
        nbytes = self._shapes[self._leaf_index].nbytes
        buffer = self._allocate(nbytes)
        self._buffers.append((buffer if buffer.format == "B" else buffer.cast("B"))[:nbytes])
        self._filled = 0
