"""The connections over which an endpoint delivers batches.

One thread accepts connections and reads the first bytes of each. A connection whose first bytes hold no valid ticket is
closed without ever having a thread. TLS handshakes proceed in the accepting thread as their bytes arrive, with about a
millisecond of work each. A peer that stops in the middle of a handshake delays no other. Each admitted connection has a
thread. It reads a request, has it answered, sends the answer, and reads the next request. A ticket is valid while its
reader attends (`hetero.dataplane.endpoint.service`).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import math
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from hetero.errors import ProtocolError
from hetero.system.fault_injection import Strike, faults_at
from hetero.wire.framing import EncodedBatch, Refusal, encode_refusal
from hetero.wire.limits import MAX_FETCH_BYTES
from hetero.wire.streams import Stream, listen
from hetero.wire.tls import Tls, TlsError, TlsSession
from hetero.wire.tls_streams import TlsStream

__all__ = ["GREETING", "TICKET_BYTES", "Delivery"]

GREETING = b"hetero"
"""First bytes of a connection, before the ticket."""
TICKET_BYTES = 32

_HELLO_BYTES = len(GREETING) + TICKET_BYTES
_HELLO_TIMEOUT_S = 5.0  # includes the TLS handshake
_TLS_BYTES = 2**14  # read of a handshake at once
_MAX_STRANGERS = 128
_MAX_CONNECTIONS = 1024  # each has a thread, even while it is idle, but readers keep few idle connections
_TURN_AWAY_S = 5.0  # for a connection beyond them to send a request, and to receive the refusal
_TURN_AWAY_BYTES = 2**20  # a longer request finds the connection closed
_ACCEPT_AGAIN_S = 0.05  # no event tells when a descriptor becomes free
_LOG_INTERVAL_S = 10.0
_POLL_S = 0.5

Answerer: TypeAlias = Callable[[bytes, Callable[[], bool]], EncodedBatch | bytes | None]
"""Called with a request, and with a function that returns whether its sender has left.

It returns a batch, another answer, or None if the sender has left.
"""

logger = logging.getLogger(__name__)


class _Hello:
    """The bytes that an unauthenticated peer has sent, and the deadline for the rest.

    Args:
        session: TLS of the connection, None for plaintext.
    """

    def __init__(self, session: TlsSession | None) -> None:
        self.said = b""
        self.session = session
        self._is_open = False
        self.deadline_s = time.monotonic() + _HELLO_TIMEOUT_S

    def receive(self, stranger: socket.socket) -> bytes | None:
        """Return the bytes that have arrived, None if there are none yet, b"" if the peer has left. Does not block.

        Raises:
            TlsError: The peer fails a check.
        """
        wanted = _HELLO_BYTES - len(self.said)
        try:
            data = stranger.recv(wanted if self.session is None else _TLS_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        if self.session is None or not data:
            return data
        return self._decipher(self.session, data, stranger, wanted) or None

    def _decipher(self, session: TlsSession, data: bytes, stranger: socket.socket, wanted: int) -> bytes:
        session.take(data)
        said = bytearray(wanted)
        size = 0
        try:
            self._is_open = self._is_open or session.shake_hands()
            if self._is_open:
                size = session.decrypt(memoryview(said))
        finally:  # after a failure, this tells the peer the reason
            answer = session.outgoing()
            if answer:
                with contextlib.suppress(OSError):  # a few KB, which fit into the buffer unless the peer does not read
                    stranger.send(answer, socket.MSG_NOSIGNAL)
        return bytes(said[:size])

    @property
    def is_wrong(self) -> bool:
        return not (self.said + GREETING[len(self.said) :]).startswith(GREETING)


class _RareWarning:
    """Logs a warning at most once in 10 s. For one thread."""

    def __init__(self) -> None:
        self._next_s = -math.inf

    def __call__(self, text: str, *facts: object) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _LOG_INTERVAL_S
            logger.warning(text, *facts)


class Delivery:
    """Accepts connections from `start` to the end of `stop`. Thread-safe.

    Args:
        address: Numeric address to bind. The system chooses the port.
        answer: Called in the thread of a connection. Raises nothing.
        max_requests: Bound of the requests in progress at the same time. Further requests are refused as
            `Refusal.BUSY`. Idle connections do not count here, but they count among the 1,024 that may be open.
        tls: This host's TLS. Readers must show a certificate of the job before anything else. None: plaintext.

    Raises:
        PortError: The address cannot be bound.
        OSError: No descriptors are left.
    """

    def __init__(self, address: str, answer: Answerer, *, max_requests: int, tls: Tls | None = None) -> None:
        self._answer = answer
        self._tls = tls
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._tickets: dict[bytes, set[Stream]] = {}
        self._num_connections = 0
        self._num_busy = 0
        self._is_draining = False
        self.is_stopped = False
        """Whether the delivery has ended for good."""
        self._strangers: dict[socket.socket, _Hello] = {}
        self._fetch_fault, self._send_fault = faults_at("Fetch"), faults_at("send")
        self._warn_of_turned_out, self._warn_of_failed = _RareWarning(), _RareWarning()
        self._listener = listen(address)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port: int = self._listener.getsockname()[1]
        self.num_batches = 0
        """Batches that were sent completely."""
        self.num_turned_out = 0
        """Connections rejected because they failed TLS or showed no valid ticket of this job."""

    def start(self) -> None:
        """Start to accept connections."""
        threading.Thread(target=self._accept, name="delivery", daemon=True).start()

    def admit(self) -> bytes:
        """Make a ticket and return it."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._changed:
            self._tickets[ticket] = set()
        return ticket

    def dismiss(self, ticket: bytes) -> None:
        """End a ticket, and the connections that used it."""
        with self._changed:
            streams = self._tickets.pop(ticket, set())
        for stream in streams:
            stream.shut_down()

    def stop(self, grace_s: float) -> None:
        """Give answers in progress ``grace_s`` seconds, then end. Idempotent. Blocks.

        Meanwhile all requests, on old and new connections, are refused as `Refusal.BUSY`. If the connections were
        closed instead, the readers would take the endpoint for dead, and would give up the answers that they wait for.
        """
        with self._changed:
            self._is_draining = True
            self._changed.wait_for(lambda: not self._num_busy, grace_s)
            self.is_stopped = True
            tickets = list(self._tickets)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        for ticket in tickets:
            self.dismiss(ticket)

    # Unauthenticated peers

    def _accept(self) -> None:
        with contextlib.closing(self._listener), self._selector:
            while not self.is_stopped:
                for key, _ in self._selector.select(_POLL_S):
                    if key.fileobj is self._listener:
                        self._take_stranger()
                    elif key.fileobj in self._strangers:  # it may have been closed in this turn to make room
                        with self._at_its_own_risk(key.fileobj):
                            self._hear_out(key.fileobj)
                now_s = time.monotonic()
                while self._strangers and next(iter(self._strangers.values())).deadline_s <= now_s:
                    self._turn_out(next(iter(self._strangers)))
            for stranger in list(self._strangers):
                self._turn_out(stranger)

    def _take_stranger(self) -> None:
        try:
            stranger, _ = self._listener.accept()
        except OSError as error:  # the peer has left, or no descriptors are left: then the listener stays readable
            if not self.is_stopped:
                self._warn_of_failed("cannot accept connections of readers: %s", error)
            time.sleep(_ACCEPT_AGAIN_S)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._turn_out(next(iter(self._strangers)))
        with self._at_its_own_risk(stranger):
            self._strangers[stranger] = _Hello(None if self._tls is None else self._tls.server_session())
            stranger.setblocking(False)
            self._selector.register(stranger, selectors.EVENT_READ)
            self._hear_out(stranger)  # nearly always the bytes have arrived already

    @contextlib.contextmanager
    def _at_its_own_risk(self, stranger: socket.socket) -> Iterator[None]:
        """Close the peer's connection if the body fails. The accepting thread goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - for example when memory runs out
            self._warn_of_failed("a connection was closed: %r", error)
            self._turn_out(stranger)

    def _hear_out(self, stranger: socket.socket) -> None:
        hello = self._strangers[stranger]
        try:
            said = hello.receive(stranger)
        except TlsError as error:
            self.num_turned_out += 1
            self._warn_of_turned_out("turned out a connection, TLS: %s (%d so far)", error, self.num_turned_out)
            self._turn_out(stranger)
            return
        if said is None:
            return
        hello.said += said
        is_complete = len(hello.said) == _HELLO_BYTES
        if said and not hello.is_wrong and not is_complete:
            return
        self._forget(stranger)
        if is_complete and not hello.is_wrong and self._admit_stream(stranger, hello):
            return
        if is_complete or hello.is_wrong:
            self.num_turned_out += 1
            # Log none of the bytes that the peer sent, because it chose them.
            self._warn_of_turned_out(
                "turned out a connection without a ticket of this job (%d so far)", self.num_turned_out
            )
        self._turn_out(stranger)

    def _forget(self, stranger: socket.socket) -> None:
        if self._strangers.pop(stranger, None) is not None:
            with contextlib.suppress(KeyError):  # perhaps it was never registered
                self._selector.unregister(stranger)

    def _turn_out(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_RDWR)  # a process that the data set forked may hold a copy
        stranger.close()

    # Admitted connections

    def _admit_stream(self, stranger: socket.socket, hello: _Hello) -> bool:
        """Start a thread for a connection with a valid ticket. Return False if the ticket is not valid."""
        shown = hello.said[len(GREETING) :]
        with self._changed:
            ticket = next((known for known in self._tickets if hmac.compare_digest(known, shown)), None)
            if ticket is None:
                return False
            # Only now, because it takes memory.
            stream = Stream(stranger) if hello.session is None else TlsStream(stranger, hello.session)
            is_full = self._num_connections >= _MAX_CONNECTIONS
            self._num_connections += 1
            self._tickets[ticket].add(stream)
        thread = threading.Thread(target=self._serve, args=(stream, ticket, is_full), name="connection", daemon=True)
        try:
            thread.start()
        except BaseException:  # for example when the host runs out of threads
            self._retire(stream, ticket)
            raise
        return True

    def _serve(self, stream: Stream, ticket: bytes, is_full: bool) -> None:
        try:
            if is_full:
                # Closing at once would look like a failed connection.
                deadline_s = time.monotonic() + _TURN_AWAY_S
                asked = stream.receive_message(_TURN_AWAY_BYTES, deadline_s=deadline_s) or b""
                why_not = f"{_MAX_CONNECTIONS} connections are open already"
                stream.send(encode_refusal(Refusal.BUSY, why_not, request=asked))
                return
            while self._serve_one(stream):
                pass
        except (OSError, ProtocolError) as error:
            logger.debug("a connection failed: %s", error)
        finally:
            self._retire(stream, ticket)

    def _retire(self, stream: Stream, ticket: bytes) -> None:
        with self._changed:
            self._num_connections -= 1
            self._tickets.get(ticket, set()).discard(stream)
        stream.close()

    def _serve_one(self, stream: Stream) -> bool:
        """Answer one request. Return False if the connection cannot be used again."""
        try:
            request = stream.receive_message(MAX_FETCH_BYTES)
        except ProtocolError as error:
            stream.send(encode_refusal(Refusal.MALFORMED, str(error)))
            return False
        if request is None:
            return False
        if self._fetch_fault is not None and not self._survives(self._fetch_fault, stream, request):
            return False
        # Count the request as in progress, or refuse it.
        with self._changed:
            why_not = ""
            if self._is_draining:
                why_not = "the endpoint is about to end"
            elif self._num_busy >= self._max_requests:
                why_not = f"{self._max_requests} requests are in work already"
            self._num_busy += not why_not
        if why_not:
            stream.send(encode_refusal(Refusal.BUSY, why_not, request=request))
            return True
        try:
            answer = self._answer(request, stream.is_ended)
            if answer is None:
                return False
            if isinstance(answer, EncodedBatch):
                if self._send_fault is not None:
                    self._spoil(self._send_fault, stream, answer)
                stream.send(answer.message, answer.payload)
                with self._changed:
                    self.num_batches += 1
            else:
                stream.send(answer)
            return True
        finally:
            with self._changed:
                self._num_busy -= 1
                self._changed.notify_all()

    # Faults for tests

    def _survives(self, strike: Strike, stream: Stream, request: bytes) -> bool:
        """Apply a fault to a request. Return False if that ends the connection."""
        fault = strike()
        if fault is not None and fault.action == "busy":
            stream.send(encode_refusal(Refusal.BUSY, "on purpose", request=request))
        return fault is None

    def _spoil(self, strike: Strike, stream: Stream, answer: EncodedBatch) -> None:
        """Apply a fault to an answer.

        Raises:
            ConnectionAbortedError: The answer was sent damaged, and the connection has to end.
        """
        fault = strike()
        if fault is None:
            return
        message, payload = bytearray(answer.message), [memoryview(bytearray(piece)) for piece in answer.payload]
        damaged = max([memoryview(message), *payload], key=len)
        if fault.action == "corrupt":
            damaged[fault.place(len(damaged))] ^= 1
        elif payload:
            payload[-1] = payload[-1][: len(payload[-1]) // 2]
        stream.send(bytes(message), [piece for piece in payload if piece])
        raise ConnectionAbortedError("on purpose")
