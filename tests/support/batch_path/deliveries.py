"""Connections to a delivery: those of unauthenticated peers, and those of readers that ask."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hetero.endpoint.delivery import Delivery
from hetero.endpoint.replies import Reply
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import GREETING, Limits
from hetero.wire.transports.interface import Connection
from hetero.wire.transports.tcp import TcpTransport
from tests.support.wire.in_process import InProcess

Connect = Callable[..., Connection]
"""As `hetero.wire.transports.interface.Transport.connect`."""
TCP = TcpTransport()
NETWORK = InProcess()
"""For tests of endpoints and readers over any transport. Its buffers hold less than 1 MiB."""
REQUEST = b"request"


def echo(request: bytes, _reply: Reply) -> EncodedBatch:
    """Answer with the request."""
    return EncodedBatch({"request": np.frombuffer(request, np.uint8)}, request=request)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_threads() -> int:
    """Return how many threads of deliveries there are."""
    return sum(thread.name in ("delivery", "connection") for thread in threading.enumerate())


def peer_of(served: Delivery, streams: contextlib.ExitStack, said: bytes = b"") -> socket.socket:
    peer = streams.enter_context(socket.create_connection(("127.0.0.1", served.port), 10.0))
    peer.sendall(said)
    return peer


def connected(served: Delivery, streams: contextlib.ExitStack, connect: Connect | None = None) -> Connection:
    """Return a new connection that has sent nothing yet: over the delivery's own transport, unless another is given."""
    connect = connect or (NETWORK if served.greeter._listener in NETWORK._listeners.values() else TCP).connect
    return streams.enter_context(contextlib.closing(connect("127.0.0.1", served.port)))


def admitted(
    served: Delivery,
    streams: contextlib.ExitStack,
    session_token: bytes | None = None,
    connect: Connect | None = None,
) -> Connection:
    """Return the connection of a reader. Without ``session_token``, it gets one."""
    stream = connected(served, streams, connect)
    stream.send_raw(GREETING + (served.admit() if session_token is None else session_token))
    return stream


def receive(stream: Connection, request: bytes = REQUEST) -> Any:
    """Return the batch that comes next."""
    message = stream.receive_message(Limits().max_answer_bytes)
    assert message is not None, "the connection ended"
    decoder = BatchDecoder(request=request)
    decoder.take_message(message)
    while not decoder.done:
        decoder.filled(stream.receive_into(decoder.room()))
    return decoder.result()


def ask(stream: Connection, request: bytes = REQUEST) -> Any:
    stream.send(request)
    return receive(stream, request)


def echoed(stream: Connection, request: bytes = REQUEST) -> bytes:
    """Ask where `echo` answers."""
    return bytes(ask(stream, request)["request"])
