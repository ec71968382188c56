"""TCP connections that carry requests and batches, with bounded messages, payload without copies, and deadlines.

A message is sent as its length (4 bytes, little-endian) and its bytes. Payload is sent without a length because both
sides know its size. Calls block in the kernel without holding the interpreter's lock, for at most one second at a time.
Deadlines are therefore checked every second. So is `Stream.shut_down` by another thread if the kernel does not wake the
blocked call at once.
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
_WAKE_BYTES = 256 * 2**10  # bytes that must have arrived to wake a thread that waits for far more
_DIRECT_BYTES = 16 * 2**10  # less than this is received through the buffer, to save system calls
_MAX_PIECES = 512  # pieces per system call, whose limit is 1,024
_KEEPALIVE_S = 10
_NUM_PROBES = 3
_CONNECT_TIMEOUT_S = 5.0


class DeadlineError(TimeoutError):
    """The caller's deadline passed. A timeout of the operating system is a plain `TimeoutError`."""


class Stream:
    """One connection. For one thread at a time, but any thread may call `shut_down` and `is_ended` at any time.

    `hetero.wire.tls_streams.TlsStream` overrides `_connect`, `_send`, `_receive`, `_receive_in_bulk` and
    `has_leftover`.

    Args:
        given: The socket, which the stream owns from now on.
    """

    def __init__(self, given: socket.socket) -> None:
        self._socket = given
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # unread part of the buffer
        self._is_shut_down = False
        # Guards the descriptor, because another connection may get its number as soon as it is closed.
        self._closing = threading.Lock()
        given.settimeout(None)
        for level, option, value in (
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.SOL_SOCKET, socket.SO_RCVTIMEO, _SLICE),
            (socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SLICE),
            # Keepalive frees a thread that waits for a host without power. `Attend` notices such a host earlier, and
            # also notices a stopped process. TCP_USER_TIMEOUT is not set, because it also ends the connection to a live
            # process that does not read for a while (a trainer in a long call that holds the interpreter's lock).
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 2),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES),
        ):
            given.setsockopt(level, option, value)

    def send(self, message: bytes, payload: Sequence[memoryview] = (), *, deadline_s: float = math.inf) -> None:
        """Send a message and then payload, without copying a large payload. Block until the kernel has all of it.

        Args:
            message: Message of at most 4 GiB.
            payload: Buffers of format ``B`` that are not empty.
            deadline_s: Deadline in `time.monotonic` seconds.

        Raises:
            OSError: If the connection failed or was shut down. `DeadlineError` after the deadline.
        """
        pieces = [memoryview(_LENGTH.pack(len(message)) + message), *payload]
        if sum(map(len, pieces)) <= _BUFFER_BYTES:
            pieces = [memoryview(b"".join(pieces))]
        self._send(pieces, deadline_s)

    def send_raw(self, data: bytes, *, deadline_s: float = math.inf) -> None:
        """Send bytes without the length of a message. Otherwise like `send`."""
        self._send([memoryview(data)], deadline_s)

    def receive_message(self, max_bytes: int, *, deadline_s: float = math.inf) -> bytes | None:
        """Return the next message, or None if the other side ended the connection first. Blocks.

        Raises:
            ProtocolError: If the message is longer than ``max_bytes``. Memory is not allocated in this case.
            OSError: As in `send`, and if the connection ends inside of the message.
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
        """Receive payload until ``room`` is full, and return its length. ``room`` must not be empty. Blocks.

        Raises:
            OSError: As in `send`, and if the connection ends first.
        """
        self._fill(room, deadline_s)
        return len(room)

    def wait_for_data(self, *, deadline_s: float = math.inf) -> None:
        """Block until there is something to receive.

        Raises:
            OSError: As in `receive_into`.
        """
        while self._begin == self._end:
            if not self._refill(deadline_s):
                raise ConnectionResetError("the connection ended in the middle of an answer")

    @property
    def has_leftover(self) -> bool:
        """Whether bytes were received that the caller has not requested."""
        return self._begin < self._end

    def is_ended(self) -> bool:
        """Return whether the connection has failed or the other side ended it. Does not block."""
        return self._peek() == b""

    def is_quiet(self) -> bool:
        """Return whether the connection is alive and without unrequested bytes. Does not block."""
        return not self.has_leftover and self._peek() is None

    def shut_down(self) -> None:
        """End the connection, so blocked calls fail in every thread. Idempotent."""
        self._is_shut_down = True
        with self._closing, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket. Call this only when no thread blocks in it. Idempotent."""
        self.shut_down()  # closing is not enough if a forked process has a copy of the descriptor
        with self._closing:
            self._socket.close()

    def _connect(self, place: tuple[str, int], deadline_s: float) -> None:
        give_up_s = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            self._check(deadline_s)
            code = self._socket.connect_ex(place)  # blocks for one second at most, then is repeated
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
                # MSG_NOSIGNAL, because a script may have restored SIGPIPE's default action, which ends the process.
                sent = self._socket.sendmsg(pieces[first : first + _MAX_PIECES], (), socket.MSG_NOSIGNAL)
            except BlockingIOError:
                continue
            while first < len(pieces) and sent >= len(pieces[first]):
                sent -= len(pieces[first])
                first += 1
            if sent:
                pieces[first] = pieces[first][sent:]

    def _peek(self) -> bytes | None:
        """Return an arrived byte, or empty bytes at the end of the connection, or None if nothing has arrived."""
        with self._closing:
            try:
                return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except OSError:
                return b""

    def _fill(self, room: memoryview, deadline_s: float, *, may_end: bool = False) -> bool:
        """Fill ``room``. Return False if the connection ended before the first byte and ``may_end`` is set."""
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
        """Receive with fewer wake-ups: the kernel wakes this thread only for ``_WAKE_BYTES`` at once.

        At least ``_WAKE_BYTES`` more must follow after ``room``, or the kernel would wait for bytes that never arrive.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _WAKE_BYTES)
        try:
            return self._receive(room, socket.MSG_WAITALL, deadline_s)
        finally:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    def _refill(self, deadline_s: float) -> int:
        """Receive available bytes into the empty buffer. Return their number, 0 at the end of the connection."""
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
        """Raise after a shutdown or the deadline.

        This runs before every system call. It cannot wait for a call to time out, because a peer that sends a few bytes
        at a time prevents that.
        """
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
    """Return a connection to a numeric address. Block for about 5 s at most, plus 5 s for a TLS handshake.

    Args:
        address: IPv4 or IPv6 address.
        port: Port at this address.
        deadline_s: Deadline in `time.monotonic` seconds.
        on_stream: Called with the stream before it is connected. Another thread can then shut it down.
        make: Makes the stream from a socket.

    Raises:
        OSError: If the connection fails or is shut down. `DeadlineError` after the deadline.
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
        PortError: If the address does not belong to this host.
    """
    try:
        return socket.create_server((address, 0), family=_family(address), backlog=1024)
    except OSError as error:
        raise PortError(f"cannot listen on {address}: {error}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
