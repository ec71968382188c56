"""The connections over which an endpoint delivers batches.

One thread accepts, and hears out whoever connects: a connection that does not show a valid ticket at
once is closed, without ever having had a thread. Handshakes of TLS go on in it as their bytes arrive, about a
millisecond of work each: who stops in the middle of one holds up nobody. Each admitted connection has a thread,
which reads a request, has it answered, sends, and reads the next. Tickets live as long as their reader attends
(`hetero.dataplane.endpoint.service`).
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
"""Precedes the ticket."""
TICKET_BYTES = 32

_HELLO_BYTES = len(GREETING) + TICKET_BYTES
_HELLO_TIMEOUT_S = 5.0  # for TLS, too
_TLS_BYTES = 2**14  # of a handshake, at once
_MAX_STRANGERS = 128
_MAX_CONNECTIONS = 1024  # each has a thread, also while its reader wants nothing: readers keep few that are idle
_TURN_AWAY_S = 5.0  # for a connection beyond them to ask, and hear that it has to come back
_TURN_AWAY_BYTES = 2**20  # who asks for more finds the connection closed
_ACCEPT_AGAIN_S = 0.05  # nothing tells when a descriptor is free again
_LOG_INTERVAL_S = 10.0
_POLL_S = 0.5

Answerer: TypeAlias = Callable[[bytes, Callable[[], bool]], EncodedBatch | bytes | None]
"""Given a request, and how to ask whether its sender has left: a batch, another answer, or None for the latter."""

logger = logging.getLogger(__name__)


class _Hello:
    """What a stranger has said, and until when it has time for the rest.

    Args:
        session: TLS of the connection; None: plaintext.
    """

    def __init__(self, session: TlsSession | None) -> None:
        self.said = b""
        self.session = session
        self._is_open = False
        self.deadline_s = time.monotonic() + _HELLO_TIMEOUT_S

    def receive(self, stranger: socket.socket) -> bytes | None:
        """Return what it says now; None if that is nothing yet, b"" if it has left. Does not block.

        Raises:
            TlsError: It fails a check.
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
        finally:  # where it fails, this says why
            answer = session.outgoing()
            if answer:
                with contextlib.suppress(OSError):  # a few KB: there is room for them where somebody reads
                    stranger.send(answer, socket.MSG_NOSIGNAL)
        return bytes(said[:size])

    @property
    def is_wrong(self) -> bool:
        return not (self.said + GREETING[len(self.said) :]).startswith(GREETING)


class _RareWarning:
    """Logs at most once in 10 s. For one thread."""

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
        address: Numeric; its port is free choice.
        answer: Called in the thread of a connection; raises nothing.
        max_requests: In work at the same time; beyond that they are refused as `Refusal.BUSY`. Connections that are
            idle do not count here, but do among the 1,024 that may be open.
        tls: Of this host: readers must show a certificate of the job before anything else. None: plaintext.

    Raises:
        PortError: The address cannot be bound.
        OSError: Descriptors ran out.
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
        """Whether nothing more is delivered."""
        self._strangers: dict[socket.socket, _Hello] = {}
        self._fetch_fault, self._send_fault = faults_at("Fetch"), faults_at("send")
        self._warn_of_turned_out, self._warn_of_failed = _RareWarning(), _RareWarning()
        self._listener = listen(address)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port: int = self._listener.getsockname()[1]
        self.num_batches = 0
        """Batches sent completely."""
        self.num_turned_out = 0
        """Connections that showed no ticket of this job."""

    def start(self) -> None:
        """Begin to accept."""
        threading.Thread(target=self._accept, name="delivery", daemon=True).start()

    def admit(self) -> bytes:
        """Return a new ticket."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        with self._changed:
            self._tickets[ticket] = set()
        return ticket

    def dismiss(self, ticket: bytes) -> None:
        """End a ticket and the connections that it opened."""
        with self._changed:
            streams = self._tickets.pop(ticket, set())
        for stream in streams:
            stream.shut_down()

    def stop(self, grace_s: float) -> None:
        """Give answers in progress ``grace_s`` seconds, end; idempotent, blocks.

        Meanwhile whoever asks, on an old connection or a new one, is told to come back: the end of a connection would
        look like that of the endpoint, and readers would give up the answers they wait for.
        """
        with self._changed:
            self._is_draining = True
            self._changed.wait_for(lambda: not self._num_busy, grace_s)
            self.is_stopped = True
            tickets = list(self._tickets)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for ticket in tickets:
            self.dismiss(ticket)

    # Strangers

    def _accept(self) -> None:
        with contextlib.closing(self._listener), self._selector:
            while not self.is_stopped:
                for key, _ in self._selector.select(_POLL_S):
                    if key.fileobj is self._listener:
                        self._take_stranger()
                    elif key.fileobj in self._strangers:  # not if it had to make room in this turn
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
        except OSError as error:  # the peer has gone again, or descriptors ran out: then it stays readable
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
            self._hear_out(stranger)  # nearly always it is there already

    @contextlib.contextmanager
    def _at_its_own_risk(self, stranger: socket.socket) -> Iterator[None]:
        """Whatever fails costs this stranger its connection, and the thread that accepts goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - memory that ran out, say
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
            # Nothing of what it said is logged: those are the stranger's words.
            self._warn_of_turned_out(
                "turned out a connection without a ticket of this job (%d so far)", self.num_turned_out
            )
        self._turn_out(stranger)

    def _forget(self, stranger: socket.socket) -> None:
        if self._strangers.pop(stranger, None) is not None:
            with contextlib.suppress(KeyError):  # registering it may be what failed
                self._selector.unregister(stranger)

    def _turn_out(self, stranger: socket.socket) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_RDWR)  # a process that the data set forked may have a copy
        stranger.close()

    # Admitted connections

    def _admit_stream(self, stranger: socket.socket, hello: _Hello) -> bool:
        """Give a connection with a valid ticket a thread; False if it has none."""
        shown = hello.said[len(GREETING) :]
        with self._changed:
            ticket = next((known for known in self._tickets if hmac.compare_digest(known, shown)), None)
            if ticket is None:
                return False
            # Not before: it takes memory.
            stream = Stream(stranger) if hello.session is None else TlsStream(stranger, hello.session)
            is_full = self._num_connections >= _MAX_CONNECTIONS
            self._num_connections += 1
            self._tickets[ticket].add(stream)
        thread = threading.Thread(target=self._serve, args=(stream, ticket, is_full), name="connection", daemon=True)
        try:
            thread.start()
        except BaseException:  # the host has no more threads, say
            self._retire(stream, ticket)
            raise
        return True

    def _serve(self, stream: Stream, ticket: bytes, is_full: bool) -> None:
        try:
            if is_full:
                # Closing before would look like a failed connection.
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
        """Answer one request; False if the connection is of no use any more."""
        try:
            request = stream.receive_message(MAX_FETCH_BYTES)
        except ProtocolError as error:
            stream.send(encode_refusal(Refusal.MALFORMED, str(error)))
            return False
        if request is None:
            return False
        if self._fetch_fault is not None and not self._survives(self._fetch_fault, stream, request):
            return False
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

    # Faults on purpose

    def _survives(self, strike: Strike, stream: Stream, request: bytes) -> bool:
        """Do wrong with a request; False if that was the end of the connection."""
        fault = strike()
        if fault is not None and fault.action == "busy":
            stream.send(encode_refusal(Refusal.BUSY, "on purpose", request=request))
        return fault is None

    def _spoil(self, strike: Strike, stream: Stream, answer: EncodedBatch) -> None:
        """Do wrong with an answer.

        Raises:
            ConnectionAbortedError: It was sent, damaged, and that is to be the end of the connection.
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
