"""TCP connections that carry requests and batches: bounded messages, payload without copies, deadlines.

A message is its length (4 bytes, little-endian) and its bytes. Payload has no frame: both sides know its size.
Calls block in the kernel, without the interpreter's lock and for at most a second at a time, which is
how often a deadline, or `Stream.shut_down` by another thread, is looked at where the kernel does not tell at once.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from hetero.errors import PortError, ProtocolError

__all__ = ["DeadlineError", "Stream", "connect", "listen"]

_LENGTH = struct.Struct("<I")
_SLICE = struct.pack("ll", 1, 0)  # a struct timeval of one second
_BUFFER_BYTES = 64 * 2**10
_WAKE_BYTES = 256 * 2**10  # as many must have come to wake a thread that waits for far more
_DIRECT_BYTES = 16 * 2**10  # less than this is received through the buffer: one call of the system for many
_MAX_PIECES = 512  # of one call; the system takes 1,024
_KEEPALIVE_S = 10
_NUM_PROBES = 3
_CONNECT_TIMEOUT_S = 5.0


class DeadlineError(TimeoutError):
    """A deadline passed: the caller's, not one of the system's."""


class Stream:
    """One connection. For one thread at a time, but `shut_down` and `is_ended` may be called from any, at any time.

    What `hetero.wire.tls_streams.TlsStream` does otherwise is `_connect`, `_send`, `_receive`, `_receive_in_bulk` and
    `has_leftover`.

    Args:
        given: The socket, which it owns from now on.
    """

    def __init__(self, given: socket.socket) -> None:
        self._socket = given
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # of what the buffer holds
        self._is_shut_down = False
        self._closing = threading.Lock()  # a descriptor that was given back may be another connection's at once
        given.settimeout(None)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE),
            (socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE),
            # A host that lost its power must not hold a thread: see also `Attend`, which notices it earlier, and a
            # stopped process. No TCP_USER_TIMEOUT: it ends the connection to a process that merely does not read (a
            # trainer in a long call that holds the interpreter's lock), however alive its host is.
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES),
        ):
            given.setsockopt(level, option, value)

    def send(self, message: bytes, payload: Sequence[memoryview] = (), *, deadline_s: float = math.inf) -> None:
        """Send a message, and payload after it from where it lies; blocks until the kernel has all of it.

        Args:
            message: Of at most 4 GiB.
            payload: Of format ``B``, not empty.
            deadline_s: In `time.monotonic` seconds.

        Raises:
            OSError: The connection failed or was shut down; `DeadlineError` after the deadline.
        """
        pieces = [memoryview(_LENGTH.pack(len(message)) + message), *payload]
        if sum(map(len, pieces)) <= _BUFFER_BYTES:
            pieces = [memoryview(b"".join(pieces))]
        self._send(pieces, deadline_s)

    def send_raw(self, data: bytes, *, deadline_s: float = math.inf) -> None:
        """Send bytes that are no message; see `send`."""
        self._send([memoryview(data)], deadline_s)

    def receive_message(self, max_bytes: int, *, deadline_s: float = math.inf) -> bytes | None:
        """Return the next message; None if the other side ended the connection before it. Blocks.

        Raises:
            ProtocolError: If it is longer than ``max_bytes``; nothing is allocated then.
            OSError: As `send`, also for an end inside of the message.
        """
        prefix = bytearray(_LENGTH.size)
        if not self._fill(memoryview(prefix), deadline_s, may_end=True):
            return None
        (size,) = _LENGTH.unpack(prefix)
        if size > max_bytes:
            raise ProtocolError(f"a message of {size} bytes is announced, at most {max_bytes} are allowed")
        if size <= self._end - self._begin:
            self._begin += size
            return bytes(self._buffer[self._begin - size : self._begin])
        message = bytearray(size)
        self._fill(memoryview(message), deadline_s)
        return bytes(message)

    def receive_into(self, room: memoryview, *, deadline_s: float = math.inf) -> int:
        """Receive payload: fill ``room``, which is not empty; return its length. Blocks.

        Raises:
            OSError: As `send`, also if the connection ends before.
        """
        self._fill(room, deadline_s)
        return len(room)

    def wait_for_data(self, *, deadline_s: float = math.inf) -> None:
        """Block until there is something to receive.

        Raises:
            OSError: As `receive_into`.
        """
        while self._begin == self._end:
            if not self._refill(deadline_s):
                raise ConnectionResetError("the connection ended in the middle of an answer")

    @property
    def has_leftover(self) -> bool:
        """Whether something was received that nobody has asked for."""
        return self._begin < self._end

    def is_ended(self) -> bool:
        """Tell whether the other side ended the connection, or it failed; does not block."""
        return self._peek() == b""

    def is_quiet(self) -> bool:
        """Tell whether the connection is there, and nothing has come that nobody asked for; does not block."""
        return not self.has_leftover and self._peek() is None

    def shut_down(self) -> None:
        """End the connection: calls that block in it fail, in any thread; idempotent."""
        self._is_shut_down = True
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and give the socket back: only when no thread blocks in it; idempotent."""
        self.shut_down()  # a forked process may have a copy of the descriptor, which would keep it open
        with self._closing:
            self._socket.close()

    def _connect(self, place: tuple[str, int], deadline_s: float) -> None:
        give_up_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            self._check(deadline_s)
            code = self._socket.connect_ex(place)  # for as long as a send blocks; the next turn waits on
            if code in (0, errno.EISCONN):
                return
            if code not in (errno.EINPROGRESS, errno.EALREADY):
                raise OSError(code, os.strerror(code))
            if time.monotonic() >= give_up_s:
                raise TimeoutError(errno.ETIMEDOUT, f"no connection within {_CONNECT_TIMEOUT_S:g} s")

    def _send(self, pieces: list[memoryview], deadline_s: float) -> None:
        first = 0
        while first < len(pieces):
            self._check(deadline_s)
            try:
                # Scripts may have given SIGPIPE its default back, which is to end the process.
                sent = self._socket.sendmsg(pieces[first : first + _MAX_PIECES], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def _peek(self) -> bytes | None:
        """Return a byte that has come, none at the end of the connection, None if there is nothing."""
        with self._closing:
            try:
                return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                return b""

    def _fill(self, room: memoryview, deadline_s: float, *, may_end: bool = False) -> bool:
        """Fill ``room``; False if the connection ended before its first byte, where it may."""
        filled = 0
        while filled < len(room):
            if self._begin < self._end:
                size = min(len(room) - filled, self._end - self._begin)
                room[filled : filled + size] = self._buffer[self._begin : self._begin + size]
                self._begin += size
                filled += size
                continue
            if len(room) - filled < _DIRECT_BYTES:
                size = self._refill(deadline_s)
            elif len(room) - filled < 2 * _WAKE_BYTES:
                size = self._receive(room[filled:], socket.MSG_WAITALL, deadline_s)
                filled += size
            else:
                size = self._receive_in_bulk(room[filled:-_WAKE_BYTES], deadline_s)
                filled += size
            if not size:
                if may_end and not filled:
                    return False
                raise ConnectionResetError("the connection ended in the middle of an answer")
        return True

    def _receive_in_bulk(self, room: memoryview, deadline_s: float) -> int:
        """Receive while the kernel wakes this thread for so many bytes only; as many have to come after these."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
        try:
            return self._receive(room, socket.MSG_WAITALL, deadline_s)
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _refill(self, deadline_s: float) -> int:
        """Receive whatever is there into the buffer, which is empty; 0 at the end of the connection."""
        self._begin = self._end = 0
        self._end = self._receive(self._buffer, 0, deadline_s)
        return self._end

    def _receive(self, room: memoryview, flags: int, deadline_s: float) -> int:
        while True:
            self._check(deadline_s)
            try:
                return self._socket.recv_into(room, len(room), flags)
            except BlockingIOError:
                continue

    def _check(self, deadline_s: float) -> None:
        """Raise if this should end: before every call of the system, since a peer that trickles never blocks one."""
        if self._is_shut_down:
            raise ConnectionAbortedError("the connection was shut down")
        if deadline_s < math.inf and time.monotonic() >= deadline_s:
            raise DeadlineError("no answer in time")


def connect(
    address: str,
    port: int,
    *,
    deadline_s: float = math.inf,
    on_stream: Callable[[Stream], object] | None = None,
    make: Callable[[socket.socket], Stream] = Stream,
) -> Stream:
    """Return a connection to a numeric address; blocks for about 5 s at most, and 5 s for a handshake.

    Args:
        address: IPv4 or IPv6.
        port: There.
        deadline_s: In `time.monotonic` seconds.
        on_stream: Given the connection before it is there, so that another thread can shut it down.
        make: Makes the connection of a socket.

    Raises:
        OSError: If there is none, or it was shut down; `DeadlineError` after the deadline.
    """
    stream = make(socket.socket(_family(address), socket.SOCK_STREAM))
    try:
        if on_stream is not None:
            on_stream(stream)
        stream._connect((address, port), deadline_s)
    except BaseException:
        stream.close()
        raise
    return stream


def listen(address: str) -> socket.socket:
    """Return a socket that listens on a free port of one address.

    Raises:
        PortError: The address is not this host's.
    """
    try:
        return socket.create_server((address, 0), family=_family(address), backlog=1024)
    except OSError as error:
        raise PortError(f"cannot listen on {address}: {error}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
