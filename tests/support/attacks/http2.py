"""HTTP/2 by hand: what no gRPC library would send."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Sequence

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, GOAWAY = 0, 1, 4, 6, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _text(data: bytes) -> bytes:
    """Return a string of HPACK, not compressed."""
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, length = len(data) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + data


def headers(fields: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a block of headers, none of them indexed."""
    return b"".join(b"\x10" + _text(name) + _text(value) for name, value in fields)


def call(method: str, extra: Sequence[tuple[bytes, bytes]], *, stream: int = 1, ends: bool = False) -> bytes:
    """Return what opens a gRPC call."""
    block = headers(
        [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", b"endpoint"),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            *extra,
        ]
    )
    pieces = [block[at : at + 16_000] for at in range(0, len(block), 16_000)]
    flags = _END_STREAM if ends else 0
    first = frame(HEADERS, flags | (_END_HEADERS if len(pieces) == 1 else 0), stream, pieces[0])
    others = [
        frame(9, _END_HEADERS if at == len(pieces) - 2 else 0, stream, part) for at, part in enumerate(pieces[1:])
    ]
    return first + b"".join(others)


def opened(place: tuple[str, int], said: bytes = b"") -> socket.socket:
    """Return a connection after the preface, settings and more have been sent."""
    connection = socket.create_connection(place, 20.0)
    with contextlib.suppress(OSError):  # the server may have had enough before it has all
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b"") + said)
    return connection


def answer(connection: socket.socket, until: Sequence[bytes], timeout_s: float = 300.0) -> bytes:
    """Return what comes, up to one of the texts or the end of the connection."""
    received = b""
    deadline_s = time.monotonic() + timeout_s
    connection.settimeout(0.5)
    while time.monotonic() < deadline_s and not any(text in received for text in until):
        try:
            data = connection.recv(65_536)
        except TimeoutError:
            continue
        except OSError:
            break
        if not data:
            break
        received += data
    return received


def kinds(received: bytes) -> list[int]:
    """Return the kinds of the received frames."""
    found = []
    while len(received) >= 9:
        size = int.from_bytes(received[:3], "big")
        found.append(received[3])
        received = received[9 + size :]
    return found
