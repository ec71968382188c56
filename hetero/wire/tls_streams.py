"""`Stream` under TLS.

OpenSSL works between two buffers in memory. The socket stays a plain one, and `Stream`'s own calls use it. Deadlines,
peeking, and shutting down from another thread therefore work as without TLS. `ssl.SSLSocket` supports neither MSG_PEEK
nor MSG_NOSIGNAL. Its ``shutdown`` also drops the session, and a thread that is receiving then continues in plaintext.

Neither side sends close_notify. All lengths are announced, so an early end is noticed without it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterator, Sequence

from hetero.wire.streams import DeadlineError, Stream
from hetero.wire.tls import WELCOME, TlsError, TlsSession

__all__ = ["TlsStream"]

_RECEIVE_BYTES = 128 * 2**10  # received by one system call
_SEND_BYTES = 256 * 2**10  # encrypted at once before they are sent
_RECORD_BYTES = 16 * 2**10
_HANDSHAKE_TIMEOUT_S = 5.0
_BROKEN_OFF = "it ended the connection during the TLS handshake: does it have --tls-dir, and the same authority?"


class TlsStream(Stream):
    """A connection under TLS.

    Args:
        given: The socket, which the stream owns from now on.
        session: The client's session before `hetero.wire.streams.connect`, or the server's after the handshake.
    """

    def __init__(self, given: socket.socket, session: TlsSession) -> None:
        super().__init__(given)
        self._session = session
        self._arrived = memoryview(bytearray(_RECEIVE_BYTES))

    @property
    def has_leftover(self) -> bool:
        """Whether bytes were received that the caller has not requested."""
        return super().has_leftover or self._session.has_more

    def _connect(self, place: tuple[str, int], deadline_s: float) -> None:
        super()._connect(place, deadline_s)
        give_up_s = time.monotonic() + _HANDSHAKE_TIMEOUT_S
        try:
            self._shake_hands(min(deadline_s, give_up_s))
        except DeadlineError:
            if give_up_s > deadline_s:
                raise
            raise TimeoutError(errno.ETIMEDOUT, f"no TLS handshake within {_HANDSHAKE_TIMEOUT_S:g} s") from None
        except (ConnectionResetError, BrokenPipeError) as error:
            raise TlsError(_BROKEN_OFF) from error

    def _shake_hands(self, deadline_s: float) -> None:
        while True:
            try:
                is_complete = self._session.shake_hands()
            except TlsError:
                with contextlib.suppress(OSError):  # the other side must be able to log the failure, too
                    self._flush(deadline_s)
                raise
            self._flush(deadline_s)
            if is_complete:
                break
            if not self._take_more(deadline_s):
                raise TlsError(_BROKEN_OFF)
        welcome = bytearray(len(WELCOME))
        self._fill(memoryview(welcome), deadline_s)
        if welcome != WELCOME:
            raise TlsError("it speaks TLS, but is no endpoint of hetero")

    def _flush(self, deadline_s: float) -> None:
        waiting = self._session.outgoing()
        if waiting:
            super()._send([memoryview(waiting)], deadline_s)

    def _take_more(self, deadline_s: float) -> int:
        """Receive available bytes into the session. Return their number, 0 at the end of the connection."""
        size = super()._receive(self._arrived, 0, deadline_s)
        self._session.take(self._arrived[:size])
        return size

    def _send(self, pieces: Sequence[memoryview], deadline_s: float) -> None:
        for piece in _joined(pieces):
            for begin in range(0, len(piece), _SEND_BYTES):
                self._check(deadline_s)
                encrypted = self._session.encrypt(piece[begin : begin + _SEND_BYTES])
                super()._send([memoryview(encrypted)], deadline_s)

    def _receive_in_bulk(self, room: memoryview, deadline_s: float) -> int:
        # SO_RCVLOWAT is not used, because the kernel does not count bytes that OpenSSL has already read.
        return self._receive(room, socket.MSG_WAITALL, deadline_s)

    def _receive(self, room: memoryview, flags: int, deadline_s: float) -> int:
        filled = 0
        while True:
            filled += self._session.decrypt(room[filled:])
            if filled == len(room) or (filled and not flags & socket.MSG_WAITALL):
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
