"""The connections over which an endpoint delivers batches.

One thread accepts, and hears out whoever connects: a connection that does not show a valid ticket at
once is closed, without ever having had a thread. Each admitted one has a thread, which reads a request, has it
answered, sends, and reads the next. Tickets live as long as their reader attends (`hetero.dataplane.service`).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from hetero.errors import ProtocolError
from hetero.wire.channels import MAX_REQUEST_BYTES
from hetero.wire.framing import EncodedBatch, Refusal, encode_refusal
from hetero.wire.streams import Stream, listen

__all__ = ["GREETING", "TICKET_BYTES", "Delivery"]

GREETING = b"hetero"
"""Precedes the ticket."""
TICKET_BYTES = 32

_HELLO_BYTES = len(GREETING) + TICKET_BYTES
_HELLO_TIMEOUT_S = 5.0
_MAX_STRANGERS = 128
_MAX_CONNECTIONS = 1024  # each has a thread, also while its reader wants nothing
_ACCEPT_AGAIN_S = 0.05
_POLL_S = 0.5

Answerer: TypeAlias = Callable[[bytes, Callable[[], bool]], EncodedBatch | bytes | None]
"""Given a request, and how to ask whether its sender has left: a batch, another answer, or None for the latter."""

logger = logging.getLogger(__name__)


class _Hello:
    """What a stranger has said, and until when it has time for the rest."""

    def __init__(self) -> None:
        self.said = b""
        self.deadline_s = time.monotonic() + _HELLO_TIMEOUT_S

    @property
    def is_wrong(self) -> bool:
        return not (self.said + GREETING[len(self.said) :]).startswith(GREETING)


class Delivery:
    """Accepts connections from `start` to `stop`. Thread-safe.

    Args:
        address: Numeric; its port is free choice.
        answer: Called in the thread of a connection; raises nothing.
        max_requests: In work at the same time; beyond that they are refused as `Refusal.BUSY`. Connections that are
            idle do not count: readers keep them, and would keep others out for ever.

    Raises:
        PortError: The address cannot be bound.
    """

    def __init__(self, address: str, answer: Answerer, *, max_requests: int) -> None:
        self._answer = answer
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._tickets: dict[bytes, set[Stream]] = {}
        self._num_connections = 0
        self._num_busy = 0
        self._is_draining = False
        self.is_stopped = False
        """Whether nothing more is delivered."""
        self._strangers: dict[socket.socket, _Hello] = {}
        self._listener = listen(address)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.num_batches = 0
        """Batches sent completely."""

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
        """Accept nothing more, give answers in progress ``grace_s`` seconds, end; idempotent, blocks."""
        with self._changed:
            self._is_draining = True
            for streams in self._tickets.values():
                for stream in streams:
                    stream.drain()
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self._changed.wait_for(lambda: not self._num_busy, grace_s)
            tickets = list(self._tickets)
        self.is_stopped = True
        for ticket in tickets:
            self.dismiss(ticket)

    # Strangers

    def _accept(self) -> None:
        with contextlib.closing(self._listener), selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_draining:
                for key, _ in selector.select(_POLL_S):
                    if key.fileobj is self._listener:
                        self._take_stranger(selector)
                    elif key.fileobj in self._strangers:  # not if it had to make room in this turn
                        self._hear_out(key.fileobj, selector)
                now_s = time.monotonic()
                while self._strangers and next(iter(self._strangers.values())).deadline_s <= now_s:
                    self._forget(next(iter(self._strangers)), selector).close()
            for stranger in list(self._strangers):
                self._forget(stranger, selector).close()

    def _take_stranger(self, selector: selectors.BaseSelector) -> None:
        try:
            stranger, _ = self._listener.accept()
        except OSError as error:  # the peer has gone again, or descriptors ran out: then it stays readable
            logger.debug("accept failed: %s", error)
            time.sleep(_ACCEPT_AGAIN_S)
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._forget(next(iter(self._strangers)), selector).close()
        stranger.setblocking(False)
        self._strangers[stranger] = _Hello()
        selector.register(stranger, selectors.EVENT_READ)
        self._hear_out(stranger, selector)  # nearly always it is there already

    def _hear_out(self, stranger: socket.socket, selector: selectors.BaseSelector) -> None:
        hello = self._strangers[stranger]
        try:
            said = stranger.recv(_HELLO_BYTES - len(hello.said))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        hello.said += said
        if said and not hello.is_wrong and len(hello.said) < _HELLO_BYTES:
            return
        self._forget(stranger, selector)
        if len(hello.said) < _HELLO_BYTES or hello.is_wrong or not self._admit_stream(stranger, hello.said):
            stranger.close()

    def _forget(self, stranger: socket.socket, selector: selectors.BaseSelector) -> socket.socket:
        selector.unregister(stranger)
        del self._strangers[stranger]
        return stranger

    # Admitted connections

    def _admit_stream(self, stranger: socket.socket, hello: bytes) -> bool:
        """Give a connection with a valid ticket a thread; False if it has none."""
        shown = hello[len(GREETING) :]
        try:
            stream = Stream(stranger)
        except OSError:  # reset meanwhile
            return False
        with self._changed:
            ticket = next((known for known in self._tickets if hmac.compare_digest(known, shown)), None)
            if ticket is None or self._is_draining:
                return False
            is_full = self._num_connections >= _MAX_CONNECTIONS
            self._num_connections += 1
            self._tickets[ticket].add(stream)
        thread = threading.Thread(target=self._serve, args=(stream, ticket, is_full), name="connection", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the host has no more threads
            logger.warning("a connection was closed: %s", error)
            self._retire(stream, ticket)
        return True

    def _serve(self, stream: Stream, ticket: bytes, is_full: bool) -> None:
        try:
            if is_full:
                stream.receive_message(MAX_REQUEST_BYTES)  # closing before would look like a failed connection
                stream.send(encode_refusal(Refusal.BUSY, f"{_MAX_CONNECTIONS} connections are open already"))
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
            request = stream.receive_message(MAX_REQUEST_BYTES)
        except ProtocolError as error:
            stream.send(encode_refusal(Refusal.REJECTED, str(error)))
            return False
        if request is None:
            return False
        with self._changed:
            is_busy = self._num_busy >= self._max_requests
            self._num_busy += not is_busy
        if is_busy:
            stream.send(encode_refusal(Refusal.BUSY, f"{self._max_requests} requests are in work already"))
            return True
        try:
            answer = self._answer(request, stream.is_ended)
            if answer is None:
                return False
            if isinstance(answer, EncodedBatch):
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
