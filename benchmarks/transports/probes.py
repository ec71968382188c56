"""What the transport under a framework costs by itself: bytes over TCP, frames and messages over gRPC."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from feeds import ready_batches

from transports import ServedTransport, messages

FRAME_BYTES = 2 * 2**20


class RawTcp(ServedTransport):
    """Length-prefixed bytes, received into one buffer."""

    server = "raw-tcp"

    def receive(self, facts: Any) -> Iterator[Any]:
        """Yield the buffer."""
        nbytes = self.config["nbytes"]
        buffer = np.empty(nbytes, np.uint8)
        view, prefix = buffer.data, bytearray(8)
        with socket.create_connection(("127.0.0.1", facts["port"])) as connection:
            while True:
                connection.recv_into(prefix, 8, socket.MSG_WAITALL)
                received = 0
                while received < struct.unpack("<Q", prefix)[0]:
                    received += connection.recv_into(view[received:])
                yield buffer


class GrpcRaw(ServedTransport):
    """Frames of one endless stream without serializers, copied into one buffer."""

    server = "grpc-raw"

    def receive(self, facts: Any) -> Iterator[Any]:
        """Yield the buffer."""
        nbytes = self.config["nbytes"]
        buffer = np.empty(nbytes, np.uint8)
        view, filled = buffer.data, 0
        with messages.read(facts["port"], None, ("SingleThreadedUnaryStream", 1)) as frames:
            for frame in frames:
                view[filled : filled + len(frame)] = frame
                filled += len(frame)
                if filled == nbytes:
                    yield buffer
                    filled = 0


class GrpcProtobuf(ServedTransport):
    """A protobuf message with a bytes field per batch."""

    server = "grpc-protobuf"

    def receive(self, facts: Any) -> Iterator[Any]:
        """Yield an array over each message's bytes."""
        with messages.read(facts["port"], messages.batch_class().FromString) as stream:
            for message in stream:
                yield np.frombuffer(message.leaves[0], np.uint8)


@contextlib.contextmanager
def serve_tcp(config: Mapping[str, Any]) -> Iterator[Any]:
    """Send to one connection."""
    batch = ready_batches.ready_batch(config["nbytes"])
    prefix = struct.pack("<Q", len(batch))

    def run() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(prefix)
                connection.sendall(batch.data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=run, daemon=True).start()
        yield {"port": listener.getsockname()[1]}


def serve_grpc_raw(config: Mapping[str, Any]) -> Any:
    """Stream frames that are there already."""
    batch = ready_batches.ready_batch(config["nbytes"]).tobytes()
    frames = [batch[begin : begin + FRAME_BYTES] for begin in range(0, len(batch), FRAME_BYTES)]
    return messages.serve(lambda: itertools.cycle(frames), None)


def serve_grpc_protobuf(config: Mapping[str, Any]) -> Any:
    """Stream messages, each made anew."""
    batch = ready_batches.ready_batch(config["nbytes"])
    batch_class = messages.batch_class()

    def read() -> Iterator[Any]:
        while True:
            yield batch_class(leaves=[batch.tobytes()])

    return messages.serve(read, batch_class.SerializeToString)
