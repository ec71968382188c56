"""Connections of no use: silent ones, incomplete ones, and ones that never read."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from hetero.wire.limits import GREETING, SESSION_TOKEN_BYTES
from tests.support.attacks import http2

Place = tuple[str, int]
KINDS = (
    "silent at the port for batches",
    "half a greeting",
    "silent at the port for calls",
    "half a preface",
    "HTTP/2 without a call",
    "HTTP/2 with calls that are refused, unread",
    "batches that are asked for and never read",
)
_CALLS = 20


def _refused(place: Place) -> socket.socket:
    calls = b"".join(
        http2.call("/hetero.v1.Data/Prepare", [(b"authorization", b"Bearer no")], stream=1 + 2 * number)
        for number in range(_CALLS)
    )
    return http2.opened(place, calls)


def _said(place: Place, data: bytes) -> socket.socket:
    connection = socket.create_connection(place, 20.0)
    with contextlib.suppress(OSError):
        connection.sendall(data)
    return connection


class UnauthenticatedPeers:
    """The connections, as a context manager.

    Args:
        calls: Where calls are answered.
        batches: Where batches are.
        number: Of connections.
        asking: What a holder of a session token says to be sent a batch: those that never read are insiders.
        receive_bytes: Of the kernel's buffers of those that never read.
    """

    def __init__(
        self, calls: Place, batches: Place, number: int, *, asking: bytes = b"", receive_bytes: int = 4096
    ) -> None:
        self._calls, self._batches = calls, batches
        self._number = number
        self._asking = asking
        self._receive_bytes = receive_bytes
        self.connections: list[tuple[str, socket.socket]] = []

    def _greedy(self) -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
        connection.settimeout(20.0)
        connection.connect(self._batches)
        connection.sendall(self._asking)
        return connection

    def open(self) -> None:
        """Open all of them, kind by kind in turn."""
        makers: Sequence[Callable[[], socket.socket]] = (
            lambda: _said(self._batches, b""),
            lambda: _said(self._batches, (GREETING + bytes(SESSION_TOKEN_BYTES))[:20]),
            lambda: _said(self._calls, b""),
            lambda: _said(self._calls, http2.PREFACE[:9]),
            lambda: http2.opened(self._calls),
            lambda: _refused(self._calls),
            self._greedy if self._asking else lambda: _said(self._batches, b""),
        )
        for number in range(self._number):
            kind = number % len(KINDS)
            with contextlib.suppress(OSError):  # turned away: that is for the caller to count
                self.connections.append((KINDS[kind], makers[kind]()))

    def living(self) -> Counter[str]:
        """Count those that the other side has not ended. Reads nothing, which would make room."""
        return Counter(kind for kind, connection in self.connections if not _is_ended(connection))

    def close(self) -> None:
        """End them."""
        for _, connection in self.connections:
            connection.close()
        self.connections.clear()

    def __enter__(self) -> UnauthenticatedPeers:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_ended(connection: socket.socket) -> bool:
    """Tell whether the other side ended it, whatever lies unread before the end."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return info[0] != 1  # anything but ESTABLISHED


def main(arguments: Sequence[str]) -> None:
    """Run as a process: open when a line comes on standard input, tell how many, close at its end."""
    host, calls, batches, number, asking = arguments
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    peers = UnauthenticatedPeers((host, int(calls)), (host, int(batches)), int(number), asking=bytes.fromhex(asking))
    for line in sys.stdin:
        if line.strip() == "open":
            peers.open()
        elif line.strip() == "close":
            peers.close()
        sys.stdout.write(f"{sum(peers.living().values())}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
