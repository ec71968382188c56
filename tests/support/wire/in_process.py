"""Connections between threads of one process, for tests: no network, no TLS, and buffers as small as a test needs.

Each ``InProcess`` object is a separate network. It connects only to its own listeners, and ignores addresses.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import socket
import threading
from collections import deque
from collections.abc import Callable

from hetero.wire.transports.interface import Connection, Listener, Transport, UnauthenticatedPeer
from hetero.wire.transports.sockets import SocketConnection, SocketPeer

__all__ = ["InProcess"]


class InProcess(Transport):
    """Connects with pairs of sockets without an address."""

    def __init__(self) -> None:
        self._ports = itertools.count(1)
        self._listeners: dict[int, _Listener] = {}

    def listen(self, address: str) -> Listener:
        """See `Transport.listen`. The address is ignored."""
        port = next(self._ports)
        self._listeners[port] = _Listener(port)
        return self._listeners[port]

    def connect(
        self,
        address: str,
        port: int,
        *,
        host: str = "",
        deadline_s: float = math.inf,
        on_connection: Callable[[Connection], object] = lambda connection: None,
    ) -> Connection:
        """See `Transport.connect`. Does not wait until the peer is accepted."""
        ours, theirs = socket.socketpair()
        connection = SocketConnection(ours)
        try:
            on_connection(connection)
            listener = self._listeners.get(port)
            if listener is None or not listener.take(theirs):
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except BaseException:
            connection.close()
            theirs.close()
            raise
        return connection


class _Listener(Listener):
    def __init__(self, port: int) -> None:
        self.port = port
        self._lock = threading.Lock()
        self._waiting: deque[socket.socket] = deque()
        self._news = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # counts the queued sockets
        self._is_shut_down = False

    def take(self, given: socket.socket) -> bool:
        """Queue a socket for `accept`, unless the listener is shut down. Return whether it was queued."""
        with self._lock:
            if not self._is_shut_down:
                self._waiting.append(given)
                os.eventfd_write(self._news, 1)
            return not self._is_shut_down

    def fileno(self) -> int:
        """See `Listener.fileno`."""
        return self._news

    def accept(self) -> UnauthenticatedPeer:
        """See `Listener.accept`."""
        os.eventfd_read(self._news)
        with self._lock:
            if not self._waiting:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return SocketPeer(self._waiting.popleft())

    def shut_down(self) -> None:
        """See `Listener.shut_down`."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """See `Listener.close`."""
        self.shut_down()
        with self._lock:
            if self._news >= 0:
                os.close(self._news)
                self._news = -1
            while self._waiting:
                self._waiting.popleft().close()
