"""What the transport under a framework costs by itself: bytes over TCP, frames and messages over gRPC."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import messages
import numpy as np
import ready_batches

from transports import ServedTransport

import grpc  # isort: skip

FRAME_BYTES = 2 * 2**20
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


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
        options = [*_UNLIMITED, ("SingleThreadedUnaryStream", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{facts['port']}", options=options) as channel:
            for frame in channel.unary_stream("/probe/Read", None, None)(b""):
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
        parse = messages.batch_class().FromString
        with grpc.insecure_channel(f"127.0.0.1:{facts['port']}", options=_UNLIMITED) as channel:
            for message in channel.unary_stream("/probe/Read", None, parse)(b""):
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
    return _serve_stream(lambda: itertools.cycle(frames), None)


def serve_grpc_protobuf(config: Mapping[str, Any]) -> Any:
    """Stream messages, each made anew."""
    batch = ready_batches.ready_batch(config["nbytes"])
    batch_class = messages.batch_class()

    def read() -> Iterator[Any]:
        while True:
            yield batch_class(leaves=[batch.tobytes()])

    return _serve_stream(read, batch_class.SerializeToString)


@contextlib.contextmanager
def _serve_stream(read: Callable[[], Iterator[Any]], serialize: Callable[[Any], bytes] | None) -> Iterator[Any]:
    handlers = {"Read": grpc.unary_stream_rpc_method_handler(lambda _request, _context: read(), None, serialize)}
    server = grpc.server(
        ThreadPoolExecutor(2), handlers=[grpc.method_handlers_generic_handler("probe", handlers)], options=_UNLIMITED
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield {"port": port}
    server.stop(0)
