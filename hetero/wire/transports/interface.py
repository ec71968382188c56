"""The interface of a transport, for readers and endpoints, and messages over a connection.

A reader calls `Transport.connect`. An endpoint calls `Transport.listen`, accepts peers, and admits those that show a
session token. Both then have a `Connection`.

A message is sent as its length (4 bytes, little-endian) and its bytes. Payload is sent without a length because both
sides know its size. A transport defines only how bytes are sent and received.
"""

from __future__ import annotations

import math
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hetero.errors import ProtocolError

__all__ = ["CONNECT_TIMEOUT_S", "Connection", "DeadlineError", "Listener", "Transport", "UnauthenticatedPeer"]

CONNECT_TIMEOUT_S = 5.0
"""Seconds to connect, then for a TLS handshake, and for an accepted peer to show that it belongs to the job."""
_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 64 * 2**10
# Fewer bytes than this are received through the buffer, to save system calls.
_DIRECT_BYTES = 16 * 2**10


class DeadlineError(TimeoutError):
    """The caller's deadline passed. A timeout of the operating system is a plain `TimeoutError`."""


class Connection(ABC):
    """One connection. One thread at a time may send, and one may receive. Any thread may call `shut_down`, `is_ended`.

    A transport defines `_send`, `_receive`, `_peek`, `shut_down` and `close`. It calls `_check` before it waits, and at
    least once a second while it waits.
    """

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._begin = self._end = 0  # where the unread part of the buffer begins and ends
        self._is_shut_down = False
        self._arriving = bytearray()  # the part of a message that `receive_message_now` has received

    def send(self, message: bytes, payload: Sequence[memoryview] = (), *, deadline_s: float = math.inf) -> None:
        """Send a message and then payload, without copying a large payload. Block until the kernel has taken all of it.

        Args:
            message: Message of at most 4 GiB.
            payload: Buffers of format ``B`` that are not empty.
            deadline_s: Deadline in `time.monotonic` seconds.

        Raises:
            OSError: If the connection failed or was shut down. `DeadlineError` after the deadline.
        """
        self._send(_joined_if_small(message, payload), deadline_s)

    def send_now(self, message: bytes, payload: Sequence[memoryview] = ()) -> Callable[[], None] | None:
        """Send as `send` does, but only what the kernel takes at once. Does not block.

        Returns:
            A function that sends the rest and may block, or None if all was sent. It raises as `send` does.

        Raises:
            OSError: As in `send`.
        """
        return self._send_now(_joined_if_small(message, payload))

    def send_raw(self, data: bytes, *, deadline_s: float = math.inf) -> None:
        """Send bytes without the length of a message. Otherwise like `send`."""
        self._send([memoryview(data)], deadline_s)

    def receive_message(self, max_bytes: int, *, deadline_s: float = math.inf) -> bytes | None:
        """Return the next message, or None if the other side ended the connection first. Blocks.

        Raises:
            ProtocolError: If the message is longer than ``max_bytes``. Memory is not allocated in this case.
            OSError: As in `send`, and if the connection ends in the middle of the message.
        """
        prefix = bytearray(_LENGTH.size)
        if not self.receive_into(memoryview(prefix), deadline_s=deadline_s, may_end=True):
            return None
        size = _size(prefix, max_bytes)
        # A short message is usually in the buffer completely, and can be copied at once.
        if size <= self._end - self._begin:
            self._begin += size
            return bytes(self._buffer[self._begin - size : self._begin])
        message = bytearray(size)
        self.receive_into(memoryview(message), deadline_s=deadline_s)
        return bytes(message)

    def receive_message_now(self, max_bytes: int) -> bytes | None:
        """Return the next message, or None if not all of it has arrived. Does not block.

        After this has returned None, call no other method that receives until it returns a message.

        Raises:
            ProtocolError, OSError: As in `receive_message`, and OSError also if the other side ended the connection.
        """
        # Begin with the bytes of this message that earlier calls have received. The loop extends this object in place,
        # so the bytes stay for the next call.
        arrived = self._arriving
        while True:
            # First receive the length of the message, then as many bytes as this length announces.
            wanted = _LENGTH.size
            if len(arrived) >= _LENGTH.size:
                wanted += _size(arrived[: _LENGTH.size], max_bytes)
                if len(arrived) == wanted:
                    break
            room = memoryview(bytearray(wanted - len(arrived)))
            size = self.receive_now(room)
            if not size:
                return None
            arrived += room[:size]
        self._arriving = bytearray()
        return bytes(arrived[_LENGTH.size :])

    def receive_now(self, room: memoryview) -> int:
        """Receive payload that has arrived into ``room``. Return its length, 0 if nothing has arrived. Does not block.

        Unless this returns 0, more may have arrived.

        Raises:
            OSError: If the connection failed, was shut down, or ended.
        """
        # Return the bytes in the buffer first. If the buffer is empty, receive many bytes directly. Receive few bytes
        # through the buffer, to save system calls.
        if self._begin == self._end:
            if len(room) >= _DIRECT_BYTES:
                return self._take_arrived(room)
            self._begin, self._end = 0, self._take_arrived(self._buffer)
        size = min(len(room), self._end - self._begin)
        room[:size] = self._buffer[self._begin : self._begin + size]
        self._begin += size
        return size

    def _take_arrived(self, room: memoryview) -> int:
        """Receive the data that has arrived. Return its length, 0 for no data. Raises as `receive_now` does."""
        # None means that nothing has arrived, and 0 that the other side has ended the connection.
        size = self._receive_now(room)
        if size is None and self._is_shut_down:
            raise ConnectionAbortedError("the connection was shut down")
        if size == 0:
            raise ConnectionResetError("the connection ended in the middle of an answer")
        return size or 0

    @property
    def has_arrived(self) -> bool:
        """Whether a byte can be received at once. Does not block."""
        return self.has_leftover or self._peek() is not None

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor that becomes readable when bytes arrive, or the connection ends.

        After `receive_now` has returned 0, all bytes that arrived before have been received.
        """

    def receive_into(self, room: memoryview, *, deadline_s: float = math.inf, may_end: bool = False) -> int:
        """Receive payload until ``room`` is full, and return its length. ``room`` must not be empty. Blocks.

        With ``may_end``, return 0 if the connection ends before the first byte.

        Raises:
            OSError: As in `send`, and if the connection ends first.
        """
        filled = 0
        while filled < len(room):
            # Take the bytes in the buffer first.
            if self._begin < self._end:
                size = min(len(room) - filled, self._end - self._begin)
                room[filled : filled + size] = self._buffer[self._begin : self._begin + size]
                self._begin += size
                filled += size
                continue
            # If few bytes are missing, fill the buffer, and the next round takes them. Receive many bytes directly.
            if len(room) - filled < _DIRECT_BYTES:
                size = self._refill(deadline_s)
            else:
                size = self._receive(room[filled:], deadline_s, is_whole=True)
                filled += size
            if not size:
                if may_end and not filled:
                    return 0
                raise ConnectionResetError("the connection ended in the middle of an answer")
        return filled

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

    @abstractmethod
    def shut_down(self) -> None:
        """End the connection, so blocked calls fail in every thread. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """End the connection and free what it holds. Call this only when no thread blocks in it. Idempotent."""

    @abstractmethod
    def _send(self, pieces: list[memoryview], deadline_s: float) -> None:
        """Send all pieces in order. Blocks."""

    @abstractmethod
    def _send_now(self, pieces: list[memoryview]) -> Callable[[], None] | None:
        """Send what the kernel takes at once. Return a function that sends the rest, None if all was sent."""

    @abstractmethod
    def _receive(self, room: memoryview, deadline_s: float, *, is_whole: bool = False) -> int:
        """Receive into ``room`` and return the number of bytes, 0 at the end of the connection. Blocks.

        Return as soon as bytes have arrived. With ``is_whole``, wait for more if that saves system calls.
        """

    @abstractmethod
    def _receive_now(self, room: memoryview) -> int | None:
        """Receive what has arrived. Return its length, 0 at the end of the connection, None if nothing has arrived.

        Bytes that arrived before the connection was shut down may be received. Does not block.
        """

    @abstractmethod
    def _peek(self) -> bytes | None:
        """Return an arrived byte, or empty bytes at the end of the connection, or None if nothing has arrived."""

    def _refill(self, deadline_s: float) -> int:
        """Receive available bytes into the empty buffer. Return their number, 0 at the end of the connection."""
        self._begin = self._end = 0
        self._end = self._receive(self._buffer, deadline_s)
        return self._end

    def _check(self, deadline_s: float) -> None:
        """Raise if the connection was shut down or the deadline has passed.

        Call this before every system call. A system call itself does not time out if the peer sends a few bytes at a
        time.
        """
        if self._is_shut_down:
            raise ConnectionAbortedError("the connection was shut down")
        if deadline_s < math.inf and time.monotonic() >= deadline_s:
            raise DeadlineError("no answer in time")


def _joined_if_small(message: bytes, payload: Sequence[memoryview]) -> list[memoryview]:
    """Return the pieces to send for a message and its payload. Join small ones, because one piece is sent faster."""
    pieces = [memoryview(_LENGTH.pack(len(message)) + message), *payload]
    return [memoryview(b"".join(pieces))] if sum(map(len, pieces)) <= _BUFFER_BYTES else pieces


def _size(prefix: bytearray | memoryview, max_bytes: int) -> int:
    """Return the length of the message that a prefix announces."""
    (size,) = _LENGTH.unpack(prefix)
    if size > max_bytes:
        raise ProtocolError(f"a message of {size} bytes is announced, at most {max_bytes} are allowed")
    return int(size)


class UnauthenticatedPeer(ABC):
    """An accepted connection whose peer has not shown a session token. It takes little memory. For one thread."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor that becomes readable when bytes arrive."""

    @abstractmethod
    def receive(self, max_bytes: int) -> bytes | None:
        """Return bytes that have arrived, None if the peer sent no more yet, b"" if it has left. Does not block.

        Raises:
            TlsError: If a check of TLS fails.
        """

    @abstractmethod
    def admit(self) -> Connection:
        """Return the connection, which continues after the received bytes. Close the connection instead of the peer."""

    @abstractmethod
    def close(self) -> None:
        """End the connection. Idempotent."""


class Listener(ABC):
    """A port where an endpoint accepts peers. For one thread, except `shut_down`."""

    port: int
    """The port that `Transport.connect` needs, 1 to 65,535."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a peer connects, and after `shut_down`."""

    @abstractmethod
    def accept(self) -> UnauthenticatedPeer:
        """Return the next peer. Does not block.

        Raises:
            OSError: If no peer waits, for example because it has left, or if no descriptors are free.
        """

    @abstractmethod
    def shut_down(self) -> None:
        """Accept no more peers. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Free what the listener holds. Idempotent."""


class Transport(ABC):
    """Makes the connections that carry requests and batches. Thread-safe."""

    @abstractmethod
    def listen(self, address: str) -> Listener:
        """Return a listener at a free port of one numeric address.

        Raises:
            PortError: If the address does not belong to this host.
        """

    @abstractmethod
    def connect(
        self,
        address: str,
        port: int,
        *,
        host: str = "",
        deadline_s: float = math.inf,
        on_connection: Callable[[Connection], object] = lambda connection: None,
    ) -> Connection:
        """Return a connection to a listener. Block for about 5 s at most, plus 5 s for a TLS handshake.

        Args:
            address: Numeric address of the endpoint.
            port: Port of the listener.
            host: Name of the endpoint's host, for transports that check it.
            deadline_s: Deadline in `time.monotonic` seconds.
            on_connection: Called with the connection before it is open. Another thread can then shut it down.

        Raises:
            OSError: If the connection fails or is shut down. `DeadlineError` after the deadline.
        """
