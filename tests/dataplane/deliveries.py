"""Connections to a delivery: those of strangers, and those of readers that ask."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetero.dataplane.endpoint.transport import GREETING, Delivery
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import Limits
from hetero.wire.streams import Stream, connect

HasLeft = Callable[[], bool]
REQUEST = b"request"


def echo(request: bytes, _has_left: HasLeft) -> EncodedBatch:
    """Answer with the request."""
    return EncodedBatch({"request": np.frombuffer(request, np.uint8)}, request=request)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_threads() -> int:
    """Return how many threads of deliveries there are."""
    return sum(thread.name in ("delivery", "connection") for thread in threading.enumerate())


def stranger_of(served: Delivery, streams: contextlib.ExitStack, said: bytes = b"") -> socket.socket:
    stranger = streams.enter_context(socket.create_connection(("127.0.0.1", served.port), 10.0))
    stranger.sendall(said)
    return stranger


def connected(
    served: Delivery, streams: contextlib.ExitStack, make: Callable[[socket.socket], Stream] = Stream
) -> Stream:
    """Return a connection on which nothing was said yet."""
    return streams.enter_context(contextlib.closing(connect("127.0.0.1", served.port, make=make)))


def admitted(
    served: Delivery,
    streams: contextlib.ExitStack,
    ticket: bytes | None = None,
    make: Callable[[socket.socket], Stream] = Stream,
) -> Stream:
    """Return the connection of a reader; without ``ticket``, it gets one."""
    stream = connected(served, streams, make)
    stream.send_raw(GREETING + (served.admit() if ticket is None else ticket))
    return stream


def receive(stream: Stream, request: bytes = REQUEST) -> Any:
    """Return the batch that comes next."""
    message = stream.receive_message(Limits().max_answer_bytes)
    assert message is not None, "the connection ended"
    decoder = BatchDecoder(request=request)
    decoder.take_message(message)
    while not decoder.done:
        decoder.filled(stream.receive_into(decoder.room()))
    return decoder.result()


def ask(stream: Stream, request: bytes = REQUEST) -> Any:
    stream.send(request)
    return receive(stream, request)


def echoed(stream: Stream, request: bytes = REQUEST) -> bytes:
    """Ask where `echo` answers."""
    return bytes(ask(stream, request)["request"])
