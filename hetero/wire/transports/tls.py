"""TCP connections under TLS.

OpenSSL encrypts and decrypts buffers in memory, and `SocketConnection` calls a plain socket. Deadlines, peeking, and
shutting down from another thread therefore work as without TLS. `ssl.SSLSocket` is not used, because it supports
neither MSG_PEEK nor MSG_NOSIGNAL. Also, its ``shutdown`` drops the session, and a receiving thread then continues in
plaintext.

Neither side sends close_notify, because the receiver knows all lengths and notices an early end without it.
"""

from __future__ import annotations

import contextlib
import errno
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hetero.wire.tls import WELCOME, Tls, TlsError, TlsSession
from hetero.wire.transports.interface import CONNECT_TIMEOUT_S, Connection, DeadlineError, UnauthenticatedPeer
from hetero.wire.transports.sockets import SocketConnection, SocketPeer
from hetero.wire.transports.tcp import TCP_OPTIONS, TcpTransport

__all__ = ["TlsConnection", "TlsTransport"]

# Bytes received by one system call.
_RECEIVE_BYTES = 128 * 2**10
# Bytes encrypted at once before they are sent.
_SEND_BYTES = 256 * 2**10
_RECORD_BYTES = 16 * 2**10
_BROKEN_OFF = "it ended the connection during the TLS handshake: does it have --tls-dir, and the same authority?"


class TlsTransport(TcpTransport):
    """TCP under mutual TLS.

    Args:
        tls: This host's TLS.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls

    def _make_peer(self, accepted: socket.socket) -> UnauthenticatedPeer:
        return _TlsPeer(accepted, self._tls.server_session())

    def _make_connection(self, given: socket.socket, host: str) -> SocketConnection:
        return TlsConnection(given, self._tls.client_session(host))


class _TlsPeer(SocketPeer):
    """A peer under TLS. The handshake proceeds in `receive`."""

    def __init__(self, given: socket.socket, session: TlsSession) -> None:
        super().__init__(given)
        self._session = session
        self._is_open = False

    def receive(self, max_bytes: int) -> bytes | None:
        """See `UnauthenticatedPeer.receive`."""
        encrypted = super().receive(_RECORD_BYTES)
        if not encrypted:  # nothing has arrived, or the peer has left
            return encrypted
        # During the handshake, return None and not empty bytes, which would mean that the peer has left.
        return self._decrypt(encrypted, max_bytes) or None

    def admit(self) -> Connection:
        """See `UnauthenticatedPeer.admit`."""
        return TlsConnection(self._socket, self._session)

    def _decrypt(self, data: bytes, max_bytes: int) -> bytes:
        """Continue the handshake with the received bytes. When it is complete, return decrypted bytes."""
        self._session.take(data)
        decrypted = bytearray(max_bytes)
        size = 0
        try:
            self._is_open = self._is_open or self._session.shake_hands()
            if self._is_open:
                size = self._session.decrypt(memoryview(decrypted))
        finally:  # after a failure, this tells the peer the reason
            answer = self._session.outgoing()
            if answer:
                # These are a few KB. If the peer reads, they fit into the send buffer, so this does not block.
                with contextlib.suppress(OSError):
                    self._socket.send(answer, socket.MSG_NOSIGNAL)
        return bytes(decrypted[:size])


class TlsConnection(SocketConnection):
    """A connection under TLS.

    Args:
        given: The socket, which the connection owns from now on.
        session: The client's session before `open`, or the server's after the handshake.
    """

    def __init__(self, given: socket.socket, session: TlsSession) -> None:
        super().__init__(given, TCP_OPTIONS)
        self._session = session
        self._arrived = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def has_leftover(self) -> bool:
        """Whether bytes were received that the caller has not requested."""
        return super().has_leftover or self._session.has_more

    def open(self, place: Any, deadline_s: float) -> None:
        """Connect the socket and complete the handshake. See `SocketConnection.open`."""
        super().open(place, deadline_s)
        give_up_s = time.monotonic() + CONNECT_TIMEOUT_S
        try:
            self._shake_hands(min(deadline_s, give_up_s))
        except DeadlineError:
            # The earlier of the two times has passed: the caller's deadline, or the bound of the handshake.
            if deadline_s < give_up_s:
                raise
            raise TimeoutError(errno.ETIMEDOUT, f"no TLS handshake within {CONNECT_TIMEOUT_S:g} s") from None
        except (ConnectionResetError, BrokenPipeError) as error:
            raise TlsError(_BROKEN_OFF) from error

    def _shake_hands(self, deadline_s: float) -> None:
        """Complete the handshake as the client, and wait for `WELCOME`. Blocks."""
        while True:
            try:
                is_complete = self._session.shake_hands()
            except TlsError:
                # Send OpenSSL's alert first, because the other side must be able to log the failure too.
                with contextlib.suppress(OSError):
                    self._flush(deadline_s)
                raise
            self._flush(deadline_s)
            if is_complete:
                break
            if not self._take_more(deadline_s):
                raise TlsError(_BROKEN_OFF)
        # In TLS 1.3 the client's handshake ends before the server has checked the client's certificate. So wait for
        # `WELCOME`. Without it, the client would see a refusal only later, as a reset without a reason.
        welcome = bytearray(len(WELCOME))
        self.receive_into(memoryview(welcome), deadline_s=deadline_s)
        if welcome != WELCOME:
            raise TlsError("it speaks TLS, but is not an endpoint of hetero")

    def _flush(self, deadline_s: float) -> None:
        """Send the bytes that the session has for the other side."""
        waiting = self._session.outgoing()
        if waiting:
            super()._send([memoryview(waiting)], deadline_s)

    def _take_more(self, deadline_s: float) -> int:
        """Receive available bytes into the session. Return their number, 0 at the end of the connection."""
        size = super()._receive(self._arrived, deadline_s)
        self._session.take(self._arrived[:size])
        return size

    def _send(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        """Encrypt the pieces and send them. See `Connection._send`."""
        for piece in _joined(pieces):
            for begin in range(0, len(piece), _SEND_BYTES):
                self._check(deadline_s)
                encrypted = self._session.encrypt(piece[begin : begin + _SEND_BYTES])
                super()._send([memoryview(encrypted)], deadline_s)

    def _send_now(self, pieces: list[memoryview]) -> Callable[[], None] | None:
        self._check(math.inf)
        encrypted = b"".join(self._session.encrypt(piece) for piece in _joined(pieces))
        return super()._send_now([memoryview(encrypted)])

    def _receive_now(self, room: memoryview) -> int | None:
        """Decrypt data that has arrived. See `Connection._receive_now`."""
        while True:
            size = self._session.decrypt(room)
            if size:
                return size
            taken = super()._receive_now(self._arrived)
            if not taken:
                return taken
            self._session.take(self._arrived[:taken])

    def _receive(self, room: memoryview, deadline_s: float, *, is_whole: bool = False) -> int:
        """Receive and decrypt data. See `Connection._receive`."""
        # Do not use SO_RCVLOWAT, because the kernel does not count bytes that OpenSSL has already read.
        filled = 0
        while True:
            filled += self._session.decrypt(room[filled:])
            if filled == len(room) or (filled and not is_whole):
                return filled
            if not self._take_more(deadline_s):
                return filled


def _joined(pieces: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the pieces, with neighbouring small ones joined, because each separate write makes a TLS record."""
    small: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        if small and (len(piece) >= _RECORD_BYTES or num_bytes >= _RECORD_BYTES):
            yield memoryview(b"".join(small))
            small, num_bytes = [], 0
        if len(piece) >= _RECORD_BYTES:
            yield piece
        else:
            small.append(piece)
            num_bytes += len(piece)
    if small:
        yield memoryview(b"".join(small))
