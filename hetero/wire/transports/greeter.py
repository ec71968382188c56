"""Accepts the connections of a listener, and admits the peers that show that they belong to the job.

The first bytes of a connection are `GREETING` and 32 bytes that only a process of the job knows. One thread accepts
connections and reads these bytes. This thread also does the TLS handshakes, which take about a millisecond of work
each. The thread never waits for the bytes of one peer, so a peer that stops in the middle of a handshake does not delay
other peers. If a peer shows other bytes, or does not show the bytes in time, it gets no answer.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import threading
import time
from collections.abc import Callable, Iterator

from hetero.system.waits import LOG_INTERVAL_S, POLL_S, SHORT_POLL_S
from hetero.wire.limits import GREETING, SESSION_TOKEN_BYTES
from hetero.wire.tls import TlsError
from hetero.wire.transports.interface import CONNECT_TIMEOUT_S, Listener, UnauthenticatedPeer

__all__ = ["Greeter"]

_HELLO_BYTES = len(GREETING) + SESSION_TOKEN_BYTES
_MAX_PEERS = 128

logger = logging.getLogger(__name__)


class _Hello:
    """The bytes that an unauthenticated peer has sent, and the deadline for the rest, TLS included."""

    def __init__(self) -> None:
        self.received = b""
        self.deadline_s = time.monotonic() + CONNECT_TIMEOUT_S

    @property
    def is_wrong(self) -> bool:
        """Whether the bytes cannot be the start of a greeting. False before the first byte."""
        return not (self.received.startswith(GREETING) or GREETING.startswith(self.received))


class _RareWarning:
    """Logs a warning at most every 10 s. For use by one thread."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def __call__(self, text: str, *facts: object) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOG_INTERVAL_S
            logger.warning(text, *facts)


class Greeter:
    """Accepts connections from `start` to `stop`. Thread-safe.

    Args:
        listener: The listener, which the greeter owns from now on.
        admit: Called with a peer and the bytes that it has shown, on the greeter's thread. Returns whether it has
            admitted the peer.
        name: Name of the thread.
        expected: Name of the bytes that a peer must show, for the log.
        was_valid: Returns whether these bytes were valid earlier. A peer with such bytes is rejected, but not counted
            as unauthenticated.
    """

    def __init__(
        self,
        listener: Listener,
        admit: Callable[[UnauthenticatedPeer, bytes], bool],
        *,
        name: str,
        expected: str,
        was_valid: Callable[[bytes], bool] = lambda _shown: False,
    ) -> None:
        self._listener = listener
        self._admit = admit
        self._name = name
        self._expected = expected
        self._was_valid = was_valid
        self._is_stopped = False
        self._peers: dict[UnauthenticatedPeer, _Hello] = {}
        """Peers that have not sent their whole greeting, the oldest first."""
        self._warn_of_rejected, self._warn_of_failed = _RareWarning(), _RareWarning()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self.port = listener.port
        self.num_rejected = 0
        """Connections rejected because they failed TLS or did not show the right bytes."""

    def start(self) -> None:
        """Start to accept connections."""
        threading.Thread(target=self._accept, name=self._name, daemon=True).start()

    def stop(self) -> None:
        """Accept no more connections, and close those that are not admitted. Idempotent. Does not block."""
        self._is_stopped = True
        # This wakes the accepting thread, which closes the port. Without it, the port stayed open for up to half a
        # second.
        self._listener.shut_down()

    def _accept(self) -> None:
        """Accept peers and read their first bytes until `stop`. Runs in the greeter's thread."""
        with contextlib.closing(self._listener), self._selector:
            while not self._is_stopped:
                for key, _ in self._selector.select(POLL_S):
                    if key.fileobj is self._listener:
                        self._accept_peer()
                    elif key.fileobj in self._peers:  # otherwise it was closed to make room for a newer peer
                        with self._closing_on_failure(key.fileobj):
                            self._read_greeting(key.fileobj)
                now_s = time.monotonic()
                # Check the deadlines in each round, the earliest first. When they were checked only after a second
                # without events, a peer that sent single bytes all the time was never late.
                while self._peers and next(iter(self._peers.values())).deadline_s <= now_s:
                    self._reject(next(iter(self._peers)))
            for peer in list(self._peers):
                self._reject(peer)

    def _accept_peer(self) -> None:
        """Accept one connection. If too many peers are waiting, reject the oldest."""
        try:
            peer = self._listener.accept()
        except Exception as error:  # noqa: BLE001 - if descriptors or memory run out, the listener stays readable
            if not self._is_stopped:
                self._warn_of_failed("cannot accept connections: %s", error)
            # Wait a moment and try again, because no event reports that a descriptor is free again.
            time.sleep(SHORT_POLL_S)
            return
        if len(self._peers) >= _MAX_PEERS:
            self._reject(next(iter(self._peers)))
        with self._closing_on_failure(peer):
            self._peers[peer] = _Hello()
            self._selector.register(peer, selectors.EVENT_READ)
            # Read at once, because the bytes have nearly always arrived already.
            self._read_greeting(peer)

    @contextlib.contextmanager
    def _closing_on_failure(self, peer: UnauthenticatedPeer) -> Iterator[None]:
        """Close the peer's connection if the body raises. The exception does not end the accepting thread."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - for example when memory runs out
            self._warn_of_failed("a connection was closed: %r", error)
            self._reject(peer)

    def _read_greeting(self, peer: UnauthenticatedPeer) -> None:
        """Read the bytes that have arrived from a peer. Admit or reject the peer if this is enough to decide."""
        hello = self._peers[peer]
        try:
            received = peer.receive(_HELLO_BYTES - len(hello.received))
        except TlsError as error:
            self.num_rejected += 1
            self._warn_of_rejected("rejected a connection, TLS: %s (%d so far)", error, self.num_rejected)
            self._reject(peer)
            return
        if received is None:  # no byte has arrived
            return
        hello.received += received
        is_complete = len(hello.received) == _HELLO_BYTES
        # Empty bytes mean that the peer has left. Otherwise wait for the rest of a greeting that may still be right.
        if received and not hello.is_wrong and not is_complete:
            return
        self._forget(peer)
        shown = hello.received[len(GREETING) :]
        if is_complete and not hello.is_wrong and self._admit(peer, shown):
            return
        # A peer that has left before the end of its greeting does not count as unauthenticated.
        if hello.is_wrong or (is_complete and not self._was_valid(shown)):
            self.num_rejected += 1
            # Log none of the bytes that the peer sent, because it chose them.
            self._warn_of_rejected(
                "rejected a connection without %s of this job (%d so far)", self._expected, self.num_rejected
            )
        self._reject(peer)

    def _forget(self, peer: UnauthenticatedPeer) -> None:
        """Stop reading from a peer, without closing its connection."""
        if self._peers.pop(peer, None) is not None:
            # The peer may not have been registered yet.
            with contextlib.suppress(KeyError):
                self._selector.unregister(peer)

    def _reject(self, peer: UnauthenticatedPeer) -> None:
        self._forget(peer)
        peer.close()
