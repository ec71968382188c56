"""The connections over which an endpoint delivers batches.

A `hetero.wire.transports.greeter.Greeter` accepts connections, and closes those whose first bytes hold no valid session
token. Each admitted connection has its own thread, which reads the requests. This thread also sends the answers, except
the answers that another thread sends later (`hetero.endpoint.replies.LATER`). A session token is valid during the
reader's call of Attend (`hetero.endpoint.service`).
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from hetero.endpoint.replies import Answer, Later, Reply
from hetero.errors import ProtocolError
from hetero.system.fault_injection import Strike, faults_at
from hetero.system.waits import CALL_TIMEOUT_S
from hetero.wire.faults import Fault
from hetero.wire.framing import EncodedBatch, encode_refusal
from hetero.wire.limits import MAX_FETCH_BYTES, MAX_PARSED_BYTES, SESSION_TOKEN_BYTES
from hetero.wire.transports.greeter import Greeter
from hetero.wire.transports.interface import Connection, Transport, UnauthenticatedPeer

__all__ = ["Delivery"]

_MAX_CONNECTIONS = 1024
"""Largest number of admitted connections. Each connection has a thread even while it is idle, so this bounds the
threads. Readers keep few idle connections. See attack A9. benchmarks/bench_unauthenticated.py opens 500 connections
that send nothing."""

Answerer: TypeAlias = Callable[[bytes, Reply], Answer | Later]
"""Called with a request. Returns the answer, or `LATER` if it will call `Reply.send`."""

logger = logging.getLogger(__name__)


class Delivery:
    """Accepts connections from `start` to the end of `stop`. Thread-safe.

    Args:
        address: Numeric address to bind. The system chooses the port.
        answer: Called with each request, in the connection's thread. Raises nothing.
        max_requests: Largest number of requests in progress. Further requests are refused as `Fault.BUSY`. Idle
            connections do not count here, but at most 1,024 connections may be open.
        transport: How readers connect.

    Raises:
        PortError: The address cannot be bound.
        OSError: No descriptors are left.
    """

    def __init__(self, address: str, answer: Answerer, *, max_requests: int, transport: Transport) -> None:
        self._answer = answer
        self._max_requests = max_requests
        # The lock is not reentrant, so no finalizer or signal handler may need it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._session_tokens: dict[bytes, set[Connection]] = {}
        """The valid session tokens, each with the open connections that have shown it."""
        self._dismissed: deque[bytes] = deque(maxlen=_MAX_CONNECTIONS)
        """The latest session tokens that were valid earlier."""
        self._num_connections = 0
        self._num_busy = 0
        self._is_draining = False
        """Whether `stop` was called, so new requests are refused."""
        self.is_stopped = False
        """Whether the grace period of `stop` has ended."""
        # Faults that tests inject. None without such faults.
        self._fetch_fault, self._send_fault = faults_at("Fetch"), faults_at("send")
        self.greeter = Greeter(
            transport.listen(address),
            self._admit,
            name="delivery",
            expected="a session token",
            # If a reader lost its link while this host was frozen, a connection with its old token may still be
            # waiting. Such a connection is no attack.
            was_valid=self._dismissed.__contains__,
        )
        self.port = self.greeter.port
        self.num_batches = 0
        """Batches that were sent completely."""

    def start(self) -> None:
        """Start to accept connections."""
        self.greeter.start()

    def admit(self) -> bytes:
        """Make a session token and return it."""
        # Each reader has a session token of its own. The job's token is never sent over these connections.
        session_token = secrets.token_bytes(SESSION_TOKEN_BYTES)
        with self._lock:
            self._session_tokens[session_token] = set()
        return session_token

    @property
    def num_busy(self) -> int:
        """Requests in progress."""
        with self._lock:
            return self._num_busy

    def dismiss(self, session_token: bytes) -> None:
        """Invalidate a session token and close the connections that used it."""
        with self._lock:
            connections = self._session_tokens.pop(session_token, set())
            # Remember the token. The greeter then does not count a later connection with it as unauthenticated.
            self._dismissed.append(session_token)
        # Do not close the connections here, because their threads may still block in them.
        for connection in connections:
            connection.shut_down()

    def stop(self, grace_s: float) -> None:
        """Wait up to ``grace_s`` seconds for answers in progress, then close all connections. Idempotent. Blocks.

        During the grace period, new requests are refused as `Fault.BUSY`, on old and new connections. If the
        connections were closed at once, readers would treat the endpoint as dead and give up the answers that they wait
        for.
        """
        with self._lock:
            self._is_draining = True
            self._changed.wait_for(lambda: not self._num_busy, grace_s)
            self.is_stopped = True
            session_tokens = list(self._session_tokens)
        self.greeter.stop()
        for session_token in session_tokens:
            self.dismiss(session_token)

    # Admitted connections

    def _admit(self, peer: UnauthenticatedPeer, shown: bytes) -> bool:
        """Start a thread for the connection if its session token is valid. Return whether it is."""
        with self._lock:
            # `compare_digest` takes the same time for all wrong tokens, so a peer learns nothing about the right ones.
            session_token = next((known for known in self._session_tokens if hmac.compare_digest(known, shown)), None)
            if session_token is None:
                return False
            # Admit the peer only after the check of its token, because `admit` allocates memory.
            connection = peer.admit()
            has_too_many = self._num_connections >= _MAX_CONNECTIONS
            self._num_connections += 1
            self._session_tokens[session_token].add(connection)
        thread = threading.Thread(
            target=self._serve, args=(connection, session_token, has_too_many), name="connection", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            # The thread cannot start, for example because the host has run out of threads. Close the connection here,
            # because no thread will do it. The greeter logs the error and goes on to accept connections.
            self._retire(connection, session_token)
            raise
        return True

    def _serve(self, connection: Connection, session_token: bytes, has_too_many: bool) -> None:
        """Answer the requests of a connection and close it. With ``has_too_many``, only refuse its first request.

        Runs in the connection's thread.
        """
        try:
            if has_too_many:
                # Answer before closing, because a reader counts a connection that closes at once as a lost endpoint. If
                # the request is too long to be read here, the connection is closed, and the reader tries again.
                deadline_s = time.monotonic() + CALL_TIMEOUT_S
                asked = connection.receive_message(MAX_PARSED_BYTES, deadline_s=deadline_s) or b""
                why_not = f"{_MAX_CONNECTIONS} connections are open already"
                connection.send(encode_refusal(Fault.BUSY, why_not, request=asked))
                return
            self._converse(connection)
        except (OSError, ProtocolError) as error:
            logger.debug("a connection failed: %s", error)
        finally:
            self._retire(connection, session_token)

    def _retire(self, connection: Connection, session_token: bytes) -> None:
        """Close a connection, and forget it."""
        with self._lock:
            self._num_connections -= 1
            # `dismiss` may have removed the session token already.
            self._session_tokens.get(session_token, set()).discard(connection)
        connection.close()

    def _converse(self, connection: Connection) -> None:
        """Answer requests until the connection cannot be used again."""
        reply: Reply | None = None
        try:
            while True:
                refusal = None
                try:
                    request = connection.receive_message(MAX_FETCH_BYTES)
                except ProtocolError as error:
                    request, refusal = b"", encode_refusal(Fault.MALFORMED, str(error))
                # Send nothing before the earlier answer is complete. A reader of hetero waits for that answer before
                # its next request, but another sender may not. If the reader has left, end.
                if request is None or (reply is not None and not reply.wait()):
                    return
                if refusal is not None:
                    # The rest of the request is unread, so the two sides do not agree on where the next request begins.
                    connection.send(refusal)
                    return
                if self._fetch_fault is not None and not self._survives(self._fetch_fault, connection, request):
                    return
                # Forget the earlier reply, because a second call of its `wait` would block.
                reply = None
                why_not = self._accept_or_refuse()
                if why_not:
                    # Keep the connection open. When a refusal ended the connection, each attempt at an overloaded
                    # endpoint cost a new connection, with a handshake and a thread.
                    connection.send(encode_refusal(Fault.BUSY, why_not, request=request))
                    continue
                damage = None if self._send_fault is None else self._damaged
                reply = Reply(connection, on_end=self._end_request, damage=damage)
                answer = self._answer(request, reply)
                if not isinstance(answer, Later) and not reply.send_here(answer):
                    return
        finally:
            # No other thread may use the connection after this, because the caller closes it.
            if reply is not None:
                reply.give_up()

    def _accept_or_refuse(self) -> str:
        """Return why a request is refused. If it is accepted, count it as in progress, and return an empty text."""
        with self._lock:
            if self._is_draining:
                return "the endpoint is about to end"
            if self._num_busy >= self._max_requests:
                return f"{self._max_requests} requests are in progress already"
            self._num_busy += 1
            return ""

    def _end_request(self, is_batch: bool) -> None:
        """Count a request as ended. ``is_batch`` is true if a batch was sent."""
        with self._lock:
            self.num_batches += is_batch
            self._num_busy -= 1
            # Only `stop` waits for this.
            if self._is_draining:
                self._changed.notify_all()

    # Faults for tests

    def _survives(self, strike: Strike, connection: Connection, request: bytes) -> bool:
        """Return True if no fault for tests strikes now. Otherwise the connection must end.

        The fault "busy" is a refusal, which is sent first. The fault "unavailable" only ends the connection.
        """
        fault = strike()
        if fault is not None and fault.action == "busy":
            connection.send(encode_refusal(Fault.BUSY, "on purpose", request=request))
        return fault is None

    def _damaged(self, answer: EncodedBatch) -> tuple[bytes, Sequence[memoryview]] | None:
        """Return the message and the payload of an answer with damage, if a fault for tests strikes now. Else None."""
        assert self._send_fault is not None
        fault = self._send_fault()
        if fault is None:
            return None
        message, payload = bytearray(answer.message), [memoryview(bytearray(piece)) for piece in answer.payload]
        if fault.action == "corrupt":
            # Flip one bit in the longest buffer, which may be the message.
            longest = max([memoryview(message), *payload], key=len)
            longest[fault.place(len(longest))] ^= 1
        elif payload:
            # The fault "truncate": drop the second half of the last buffer. A message without payload stays whole.
            payload[-1] = payload[-1][: len(payload[-1]) // 2]
        # Half of a buffer of one byte is empty, and a connection sends no empty buffers.
        return bytes(message), [piece for piece in payload if piece]
