"""The parts that all transports over stream sockets share: connections without copies, peers, and listeners.

Calls block in the kernel without holding the interpreter's lock, for at most one second at a time. So a blocked thread
notices its deadline within a second. It also notices a `SocketConnection.shut_down` by another thread within a second,
if the kernel does not wake it at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from hetero.wire.transports.interface import CONNECT_TIMEOUT_S, Connection, Listener, UnauthenticatedPeer

__all__ = ["SocketConnection", "SocketListener", "SocketPeer"]

# A struct timeval of one second.
_SLICE = struct.pack("ll", 1, 0)
# If a thread waits for many more bytes, the kernel wakes it when this many have arrived.
_WAKE_BYTES = 256 * 2**10
# Largest number of pieces in one system call. The kernel's limit is 1,024.
_MAX_PIECES = 512
_SEND_NOW = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_PEEK_NOW = socket.MSG_PEEK | socket.MSG_DONTWAIT
"""The flags are combined once here, because ``|`` of these enumerations is slow Python code."""


class SocketConnection(Connection):
    """A connection over a stream socket.

    Args:
        given: The socket, which the connection owns from now on.
        options: Options of the socket: level, option and value.
    """

    def __init__(self, given: socket.socket, options: Iterable[tuple[int, int, int]] = ()) -> None:
        super().__init__()
        self._socket = given
        # Guards the descriptor. As soon as this connection is closed, a new connection may get the same descriptor.
        self._closing = threading.Lock()
        # Calls return after one second (`_SLICE`) at the latest. Python's own timeout would need a second system call.
        given.settimeout(None)
        given.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE)
        given.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE)
        for level, option, value in options:
            given.setsockopt(level, option, value)

    def fileno(self) -> int:
        """See `Connection.fileno`."""
        return self._socket.fileno()

    def shut_down(self) -> None:
        """See `Connection.shut_down`."""
        self._is_shut_down = True
        # The system refuses this for a socket that is not connected or is closed already.
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Connection.close`."""
        # Shut down first. If a forked process has a copy of the descriptor, closing alone has no effect.
        self.shut_down()
        with self._closing:
            self._socket.close()

    def open(self, place: Any, deadline_s: float) -> None:
        """Connect the socket.

        Args:
            place: Address of the socket to connect to.
            deadline_s: Deadline in `time.monotonic` seconds.

        Raises:
            OSError: As for `hetero.wire.transports.interface.Transport.connect`.
        """
        give_up_s = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            self._check(deadline_s)
            # SO_SNDTIMEO ends this call after one second, so the deadline is checked again. Further calls wait for the
            # same attempt. EISCONN means success too.
            code = self._socket.connect_ex(place)
            if code in (0, errno.EISCONN):
                return
            if code not in (errno.EINPROGRESS, errno.EALREADY):
                raise OSError(code, os.strerror(code))
            if time.monotonic() >= give_up_s:
                raise TimeoutError(errno.ETIMEDOUT, f"no connection within {CONNECT_TIMEOUT_S:g} s")

    def _send(self, pieces: list[memoryview], deadline_s: float) -> None:
        """See `Connection._send`."""
        while pieces:
            self._check(deadline_s)
            try:
                # MSG_NOSIGNAL is needed, because a script may have restored SIGPIPE's default action, which ends the
                # process.
                sent = self._socket.sendmsg(pieces[:_MAX_PIECES], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:  # a second is over, so check the deadline again
                continue
            pieces = _after(pieces, sent)

    def _send_now(self, pieces: list[memoryview]) -> Callable[[], None] | None:
        """See `Connection._send_now`."""
        self._check(math.inf)
        try:
            while pieces:
                sent = self._socket.sendmsg(pieces[:_MAX_PIECES], (), _SEND_NOW)
                pieces = _after(pieces, sent)
        except BlockingIOError:
            # Do not call the method of a subclass, which would encrypt the pieces a second time.
            return functools.partial(SocketConnection._send, self, pieces, math.inf)
        return None

    def _peek(self) -> bytes | None:
        """See `Connection._peek`."""
        # Without the lock, another thread could close the descriptor now, and a new connection could have it.
        with self._closing:
            try:
                return self._socket.recv(1, _PEEK_NOW)
            except BlockingIOError:  # nothing has arrived
                return None
            except OSError:  # a failed connection counts as ended
                return b""

    def _receive_now(self, room: memoryview) -> int | None:
        """See `Connection._receive_now`."""
        try:
            return self._socket.recv_into(room, len(room), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def _receive(self, room: memoryview, deadline_s: float, *, is_whole: bool = False) -> int:
        """See `Connection._receive`."""
        flags = socket.MSG_WAITALL if is_whole else 0
        # To save wake-ups, the kernel wakes this thread only when `_WAKE_BYTES` have arrived. Leave the last
        # `_WAKE_BYTES` for another call. If fewer bytes were missing, the kernel would wait for more than will arrive.
        has_much = is_whole and len(room) >= 2 * _WAKE_BYTES
        if has_much:
            room = room[:-_WAKE_BYTES]
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
        try:
            while True:
                self._check(deadline_s)
                try:
                    return self._socket.recv_into(room, len(room), flags)
                except BlockingIOError:  # a second is over, so check the deadline again
                    continue
        finally:
            if has_much:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)


class SocketPeer(UnauthenticatedPeer):
    """A peer at the other end of a stream socket.

    Args:
        given: The socket, which the peer owns from now on.
        options: Options of the socket once the peer is admitted.
    """

    def __init__(self, given: socket.socket, options: Iterable[tuple[int, int, int]] = ()) -> None:
        given.setblocking(False)
        self._socket = given
        self._options = options

    def fileno(self) -> int:
        """See `UnauthenticatedPeer.fileno`."""
        return self._socket.fileno()

    def receive(self, max_bytes: int) -> bytes | None:
        """See `UnauthenticatedPeer.receive`."""
        try:
            return self._socket.recv(max_bytes)
        except BlockingIOError:
            return None
        except OSError:  # a failed connection counts as ended
            return b""

    def admit(self) -> Connection:
        """See `UnauthenticatedPeer.admit`."""
        return SocketConnection(self._socket, self._options)

    def close(self) -> None:
        """See `UnauthenticatedPeer.close`."""
        with contextlib.suppress(OSError):
            # Shut down first. If a forked process has a copy of the descriptor, closing alone has no effect.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class SocketListener(Listener):
    """A listening stream socket.

    Args:
        given: The socket, which the listener owns from now on.
        port: The port for `Transport.connect`.
        peer: Makes the peer of an accepted socket.
    """

    def __init__(self, given: socket.socket, port: int, peer: Callable[[socket.socket], UnauthenticatedPeer]) -> None:
        given.setblocking(False)
        self._socket = given
        self._peer = peer
        self.port = port

    def fileno(self) -> int:
        """See `Listener.fileno`."""
        return self._socket.fileno()

    def accept(self) -> UnauthenticatedPeer:
        """See `Listener.accept`."""
        accepted, _ = self._socket.accept()
        try:
            return self._peer(accepted)
        except BaseException:  # for example when memory runs out
            accepted.close()
            raise

    def shut_down(self) -> None:
        """See `Listener.shut_down`."""
        with contextlib.suppress(OSError):
            # This wakes the thread that waits for peers.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `Listener.close`."""
        self._socket.close()


def _after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return the pieces without their first ``num_bytes`` bytes."""
    # Count the pieces that lie completely in these bytes. The next piece may lie there in part.
    num_whole = 0
    while num_whole < len(pieces) and num_bytes >= len(pieces[num_whole]):
        num_bytes -= len(pieces[num_whole])
        num_whole += 1
    rest = pieces[num_whole:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
