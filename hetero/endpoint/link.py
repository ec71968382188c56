"""The open connections between a reader process and one endpoint: a gRPC channel, and connections that carry batches.

The calls Attend and Prepare use the channel. The answer to Attend contains the port for batches. The Attend
call lasts until the endpoint process dies, is stopped, or cannot be reached (gRPC's keepalive). Fetches that run at the
same time use different connections. An idle connection is kept for a minute for later fetches.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from hetero.control.members.directory import EndpointRecord
from hetero.errors import AuthenticationError, DatasetError, ProtocolError
from hetero.system.fault_injection import address_via
from hetero.wire import channels  # before grpc: channels sets its environment
from hetero.wire.faults import CallFailedError, Fault, fault_of_status
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import GREETING, PROTOCOL, SERVICE, SESSION_TOKEN_BYTES, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.tls import Tls
from hetero.wire.transports import choose_transport
from hetero.wire.transports.interface import Connection, DeadlineError, Transport

import grpc  # isort: skip

__all__ = ["Call", "EndpointLink", "SentFetch"]

_ATTEND_TIMEOUT_S = 60.0
_KEEP_IDLE_S = 60.0
_MAX_BEGUN_BYTES = 16 * 2**10
"""Bytes of a request that the kernel takes at once on a new connection too."""
_TOO_MUCH = "more bytes arrived than the answer had announced"
_Reply = TypeVar("_Reply", bound=Message)
_Found = TypeVar("_Found")


class Call:
    """A fetch that another thread may cancel without ending the next fetch on the same connection.

    Args:
        give_back: Takes the connection from this call, and closes it or keeps it.
    """

    def __init__(self, give_back: Callable[..., None]) -> None:
        self.give_back = give_back
        self._lock = threading.Lock()
        self._connection: Connection | None = None  # the connection that the fetch uses now
        self.is_cancelled = False
        self.is_sent = False
        """Whether the endpoint may have received the request."""

    def hold(self, connection: Connection) -> None:
        """Set the connection that the fetch uses."""
        with self._lock:
            self._connection = connection
            if self.is_cancelled:
                connection.shut_down()

    def let_go(self) -> Connection | None:
        """Return the connection that the fetch used. From now on `cancel` does not shut that connection down."""
        with self._lock:
            connection, self._connection = self._connection, None
            return connection

    def give_up(self) -> None:
        """Close the connection of the fetch. No thread may be using it. Idempotent."""
        self.give_back(self, is_usable=False)

    def cancel(self) -> None:
        """Make the fetch fail with `Fault.CANCELLED`, unless it has ended. Called from any thread."""
        with self._lock:
            self.is_cancelled = True
            if self._connection is not None:
                self._connection.shut_down()


class EndpointLink:
    """The connections to one endpoint, opened by the first call. Thread-safe.

    Args:
        record: The endpoint.
        metadata: Metadata of gRPC calls: the job's token and id.
        limits: Bounds of the memory that answers may make this process allocate.
        tls: This host's TLS, None for a job in plaintext.
        transport: Transport for batches. None for the job's choice.
    """

    def __init__(
        self,
        record: EndpointRecord,
        metadata: tuple[tuple[str, str], ...],
        limits: Limits,
        tls: Tls | None = None,
        *,
        transport: Transport | None = None,
    ) -> None:
        self._name = f"{record.endpoint_id} ({record.address})"
        address = address_via(record.address)  # a rule for tests may lead the connections over another network
        self._address = address.rpartition(":")[0].strip("[]")
        self._host = record.host
        self._transport = choose_transport(tls) if transport is None else transport
        self._metadata = metadata
        self.limits = limits
        self._lock = threading.Lock()  # guards the fields below
        self._attending = threading.Lock()  # held by the one thread that runs `attend`
        self._channel = channels.open_channel(address, name=record.host, tls=tls)
        self._attendance: Any = None  # the call of Attend, None before it is answered
        self._port = 0  # the port for batches
        self._hello = b""  # the first bytes of a connection for batches, with the session token
        self._connections: set[Connection] = set()
        self._idle: list[tuple[float, Connection]] = []  # pairs of idle-since time and connection, last in first out
        self.why_ended = ""
        """Why the link has ended. Empty while it is open."""

    def call(self, method: str, request: Message, reply: type[_Reply], timeout_s: float) -> _Reply:
        """Call a method of the service and return its answer. Blocks.

        Raises:
            CallFailedError: The call failed.
            AuthenticationError: The endpoint refuses the token.
        """
        with self._grpc_errors(method):
            data = self._channel.unary_unary(f"/{SERVICE}/{method}", None, None)(  # None, because messages are bytes
                request.SerializeToString(), timeout=timeout_s, metadata=self._metadata
            )
            return parse(reply, data)

    def attend(self) -> None:
        """Register this process with the endpoint, unless it is registered. Block until a batch connection is open.

        Raises:
            CallFailedError, AuthenticationError: As in `call`. CallFailedError also if the link has ended.
        """
        with self._attending:
            if self.why_ended:
                raise CallFailedError(Fault.UNREACHABLE, self.why_ended)
            if self._attendance is not None:
                return
            # The call goes on after its answer, so it must not have a timeout. A timer cancels it if no answer comes.
            timer, begin_s = threading.Timer(_ATTEND_TIMEOUT_S, lambda: call.cancel()), time.monotonic()
            timer.daemon = True
            try:
                with self._grpc_errors("Attend"):
                    call: Any = self._channel.unary_stream(f"/{SERVICE}/Attend", None, None)(  # messages are bytes
                        pb.AttendRequest(protocol=PROTOCOL).SerializeToString(), metadata=self._metadata
                    )
                    timer.start()  # starts after `call` is assigned, because the timer uses it
                    data = next(call, b"")  # without an answer, `data` is empty and is rejected below
            except CallFailedError as error:
                if time.monotonic() - begin_s >= _ATTEND_TIMEOUT_S:
                    raise CallFailedError(Fault.LATE, f"no answer to Attend within {_ATTEND_TIMEOUT_S:g} s") from error
                raise
            finally:
                timer.cancel()
            # The answer names the port for batches and the session token that this process has to show there.
            try:
                with self._grpc_errors("Attend"):
                    reply = parse(pb.AttendReply, data)
                if not 0 < reply.port < 2**16 or len(reply.ticket) != SESSION_TOKEN_BYTES:
                    raise CallFailedError(Fault.BROKEN, "its answer to Attend lacks a valid port or session token")
            except CallFailedError:
                call.cancel()
                raise
            self._attendance, self._port, self._hello = call, reply.port, GREETING + reply.ticket
            # If the call has already ended, gRPC runs the callback at once.
            call.add_done_callback(lambda ended: self._drop(f"the endpoint ended: {ended.details() or ended.code()}"))
            self._try_port()

    def fetch(
        self,
        request: bytes,
        decoder: BatchDecoder,
        *,
        timeout_s: float,
        on_call: Callable[[Call], None],
        was_sent: bool = False,
    ) -> int:
        """Send a request for a batch and receive the batch into ``decoder``. Blocks. Only after `attend`.

        Args:
            request: A ``FetchRequest``.
            decoder: A new decoder. It is complete when this returns.
            timeout_s: Bound of the whole fetch.
            on_call: Called with the call. Other threads may cancel it.
            was_sent: Whether the endpoint may have received the request already, see `begin`.

        Returns:
            The bytes of the answer before compression.

        Raises:
            DatasetError: The user's code raised on the endpoint.
            ProtocolError: The answer breaks the protocol or arrived damaged.
            CallFailedError: The call failed.
        """
        deadline_s = time.monotonic() + timeout_s
        call = Call(self._give_back)
        call.is_sent = was_sent
        # This comes before anything blocks, because another thread may also cancel the attempt to connect.
        on_call(call)
        is_in_step = False  # whether the next answer on this connection will belong to the next request
        has_begun = False
        try:
            connection, message = self._ask(call, request, deadline_s)
            has_begun = True
            decoder.take_message(message)
            while not decoder.done:
                if decoder.needs_memory:
                    # Wait for data first, because a header alone must not make this process allocate memory.
                    connection.wait_for_data(deadline_s=deadline_s)
                decoder.filled(connection.receive_into(decoder.room(), deadline_s=deadline_s))
            if connection.has_leftover:
                raise ProtocolError(_TOO_MUCH)
            is_in_step = True
            return len(message) + decoder.nbytes
        except (DatasetError, CallFailedError):
            # The answer is a failure or a refusal. It has no payload, so the connection can be used again.
            is_in_step = True
            raise
        except DeadlineError as error:
            raise _late(timeout_s) from error
        except OSError as error:
            raise CallFailedError(_fault_of(call, has_begun), self.why_ended or str(error)) from error
        finally:
            self._give_back(call, is_usable=is_in_step)

    def begin(
        self,
        request: bytes,
        decoder: BatchDecoder,
        *,
        timeout_s: float,
        on_call: Callable[[Call], None],
        finish: Callable[[int], _Found],
    ) -> SentFetch[_Found] | None:
        """Send a request as `fetch` does, but only over an idle connection. Does not block.

        The arguments are the same as for `fetch`. For ``finish``, see `SentFetch`.

        Returns:
            The fetch. None if the request is long, if no connection is idle, or if the idle connection does not take
            the whole request at once. After None, the caller should `fetch` the batch.
        """
        if len(request) > _MAX_BEGUN_BYTES:
            return None
        call = Call(self._give_back)
        on_call(call)
        try:
            connection = self._reuse(call)
            if connection is not None and connection.send_now(request) is None:  # None, because all was sent
                call.is_sent = True
                return SentFetch(self, call, connection, decoder, timeout_s, finish)
        except OSError:
            pass  # the connection had ended
        finally:
            if not call.is_sent:  # perhaps a part of the request was sent, which an endpoint ignores
                self._give_back(call, is_usable=False)
        return None

    def close(self) -> None:
        """Close the channel and all connections. Calls in progress fail. Idempotent. Blocks until this is done."""
        self._drop("the connection was closed")
        self._channel.close()

    def _try_port(self) -> None:
        """Open the connection of the first fetch now, to find out whether the endpoint can deliver batches."""
        call = Call(self._give_back)
        is_usable = False
        try:
            self._connect(call, math.inf)  # needs no deadline, because it fails after about 10 s at the latest
            is_usable = True
        except OSError as error:
            self._drop(f"no connection for batches: {error}")
            self._attendance.cancel()  # end the Attend call too, because the link has ended
            raise CallFailedError(Fault.UNREACHABLE, self.why_ended) from error
        finally:
            self._give_back(call, is_usable=is_usable)  # keep the connection for the first fetch, or close it

    def _ask(self, call: Call, request: bytes, deadline_s: float) -> tuple[Connection, bytes]:
        """Send the request. Return the answer's message, and the connection, which the call still holds."""
        connection = self._reuse(call)
        if connection is not None:
            try:
                return connection, self._exchange(call, connection, request, deadline_s)
            except (ConnectionResetError, BrokenPipeError):
                # If the endpoint died, perhaps because of this request, `_connect` fails below, and the request is not
                # sent again. If only the idle connection had ended, the request is not to blame and is sent again.
                self._give_back(call, is_usable=False)
        connection = self._connect(call, deadline_s)
        return connection, self._exchange(call, connection, request, deadline_s)

    def _exchange(self, call: Call, connection: Connection, request: bytes, deadline_s: float) -> bytes:
        """Send the request and return the answer's message."""
        call.is_sent = True
        connection.send(request, deadline_s=deadline_s)
        message = connection.receive_message(self.limits.max_answer_bytes, deadline_s=deadline_s)
        if message is None:
            raise ConnectionResetError("the endpoint closed the connection")
        return message

    def _reuse(self, call: Call) -> Connection | None:
        """Return an idle connection, which the call then holds. Return None if no connection is idle."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                _, connection = self._idle.pop()
            call.hold(connection)
            # If the call is cancelled, `hold` has shut the connection down. Return it, because its use ends the fetch
            # with an OSError. Otherwise the loop would close all idle connections.
            if connection.is_quiet() or call.is_cancelled:
                return connection
            self._give_back(call, is_usable=False)  # the connection has ended, or sent data that was not asked for

    def _connect(self, call: Call, deadline_s: float) -> Connection:
        """Open a connection, give it to the call, and return it.

        Raises:
            OSError: The connection could not be opened.
        """

        def register(connection: Connection) -> None:
            """Let `close` and `Call.cancel` end the attempt to connect. Raise if the link has ended, or has no port."""
            with self._lock:
                if self.why_ended or not self._hello:
                    raise ConnectionAbortedError(self.why_ended or "there is no connection yet")
                self._connections.add(connection)
            call.hold(connection)

        # Register the connection before it is open, because `cancel` and `close` must also end the attempt to connect.
        connection = self._transport.connect(
            self._address, self._port, host=self._host, deadline_s=deadline_s, on_connection=register
        )
        connection.send_raw(self._hello, deadline_s=deadline_s)
        return connection

    def _give_back(self, call: Call, *, is_usable: bool) -> None:
        """Take the connection from the call. Keep it if it is usable, else close it. Close old idle connections."""
        connection = call.let_go()
        if connection is None:
            return
        now_s = time.monotonic()
        closed = []
        with self._lock:
            if is_usable and not call.is_cancelled and not self.why_ended:
                self._idle.append((now_s, connection))
            else:
                closed.append(connection)
            while self._idle and self._idle[0][0] < now_s - _KEEP_IDLE_S:
                closed.append(self._idle.pop(0)[1])
            self._connections.difference_update(closed)
        for each in closed:
            each.close()

    def _drop(self, why: str) -> None:
        """Shut down the connections. A call that uses one fails at once and closes it. May run in gRPC's thread."""
        with self._lock:
            if self.why_ended:
                return
            self.why_ended = why
            idle = [connection for _, connection in self._idle]
            self._idle.clear()
            self._connections.difference_update(idle)
            for connection in self._connections:
                connection.shut_down()
        for connection in idle:
            connection.close()

    @contextlib.contextmanager
    def _grpc_errors(self, method: str) -> Iterator[None]:
        """Translate the exceptions of a gRPC call, and of parsing its answer, to hetero's exceptions."""
        try:
            yield
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined, unused-ignore]
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise AuthenticationError(
                    f"{self._name} rejects this job's token: give every host of the job the same token"
                ) from error
            raise CallFailedError(fault_of_status(code.name), channels.short_details(error)) from error
        except ProtocolError as error:
            raise CallFailedError(Fault.BROKEN, f"its answer to {method} is not a valid message") from error
        except ValueError as error:  # gRPC raises this if the channel was closed during the call
            raise CallFailedError(Fault.UNREACHABLE, "the connection was closed") from error


@dataclass(eq=False)
class SentFetch(Generic[_Found]):
    """A fetch whose request is sent. The caller receives the answer when it arrives. For one thread at a time.

    Args:
        link: The link of the connection.
        call: The call, which holds the connection.
        connection, decoder, timeout_s: As in `EndpointLink.fetch`.
        finish: Called when the answer is complete, with its bytes before compression. `receive` returns its result.
    """

    _link: EndpointLink
    _call: Call
    _connection: Connection
    _decoder: BatchDecoder
    _timeout_s: float
    _finish: Callable[[int], _Found]
    _message_bytes: int | None = None
    """Bytes of the answer's message. None until the message has arrived completely."""

    def __post_init__(self) -> None:
        self._deadline_s = time.monotonic() + self._timeout_s

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when data arrives or the connection ends."""
        return self._connection.fileno()

    def receive(self) -> _Found | None:
        """Receive the data that has arrived. Does not block. Do not call it after it has returned an answer or raised.

        Returns:
            The answer, or None if more has to arrive.

        Raises:
            DatasetError, ProtocolError, CallFailedError: As in `EndpointLink.fetch`.
            ConnectionResetError, BrokenPipeError: The connection ended before the answer, perhaps because it was idle.
                The caller should `fetch` the batch, which uses another connection.
        """
        is_in_step = True  # whether the next answer on this connection will belong to the next request
        is_over = True
        try:
            if not self._has_arrived():
                if self.is_late:
                    raise _late(self._timeout_s)
                is_over = False
                return None
            if self._connection.has_leftover:
                raise ProtocolError(_TOO_MUCH)
            return self._finish((self._message_bytes or 0) + self._decoder.nbytes)
        except (DatasetError, CallFailedError) as error:
            # After LATE, the answer may still arrive, and the next request on this connection would get it.
            is_in_step = not (isinstance(error, CallFailedError) and error.fault is Fault.LATE)
            raise
        except OSError as error:
            is_in_step = False
            fault = _fault_of(self._call, self._message_bytes is not None)
            # Perhaps only the idle connection had ended, so the caller tries another one.
            if isinstance(error, ConnectionResetError | BrokenPipeError) and fault is Fault.UNREACHABLE:
                raise
            raise CallFailedError(fault, self._link.why_ended or str(error)) from error
        except BaseException:
            is_in_step = False
            raise
        finally:
            if is_over:
                self._call.give_back(self._call, is_usable=is_in_step)

    @property
    def is_late(self) -> bool:
        """Whether the time of the fetch is over."""
        return time.monotonic() >= self._deadline_s

    def give_up(self) -> None:
        """Close the connection. Idempotent."""
        self._call.give_up()

    def _has_arrived(self) -> bool:
        """Receive the data that has arrived. Return whether the answer is complete."""
        connection, decoder = self._connection, self._decoder
        if self._message_bytes is None:
            message = connection.receive_message_now(self._link.limits.max_answer_bytes)
            if message is None:
                return False
            self._message_bytes = len(message)
            decoder.take_message(message)
        while not decoder.done:
            if decoder.needs_memory and not connection.has_arrived:
                return False  # a header alone must not make this process allocate memory
            size = connection.receive_now(decoder.room())
            if not size:
                return False
            decoder.filled(size)
        return True


def _fault_of(call: Call, has_begun: bool) -> Fault:
    """Return the fault of a fetch whose connection failed. ``has_begun``: whether a part of the answer has arrived."""
    if call.is_cancelled:
        return Fault.CANCELLED
    if has_begun:
        return Fault.CUT_OFF
    return Fault.UNREACHABLE if call.is_sent else Fault.UNSENT


def _late(timeout_s: float) -> CallFailedError:
    return CallFailedError(Fault.LATE, f"waited {timeout_s:g} s")
