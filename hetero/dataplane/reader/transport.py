"""The open connections between a reader process and one endpoint: a gRPC channel, and connections that carry batches.

Over the channel the reader attends, prepares and describes. The answer to Attend says where to connect for batches. The
Attend call ends when the endpoint process dies, is stopped, or cannot be reached (gRPC's keepalive). Each fetch has a
connection to itself. An idle connection is kept for a minute for later fetches.
"""

from __future__ import annotations

import contextlib
import functools
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

from google.protobuf.message import Message

from hetero.control.directory import EndpointRecord
from hetero.dataplane.endpoint.service import SERVICE
from hetero.dataplane.endpoint.transport import GREETING, TICKET_BYTES
from hetero.dataplane.reader.failures import CallFailedError, Fault
from hetero.errors import AuthenticationError, DatasetError, ProtocolError
from hetero.system.fault_injection import address_via
from hetero.wire import channels  # before grpc: channels sets its environment
from hetero.wire.framing import BatchDecoder, Refusal, RefusedError
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.messages import parse
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.streams import DeadlineError, Stream, connect
from hetero.wire.tls import Tls
from hetero.wire.tls_streams import TlsStream

import grpc  # isort: skip

__all__ = ["Call", "Link"]

_ATTEND_TIMEOUT_S = 60.0
_KEEP_IDLE_S = 60.0
_Reply = TypeVar("_Reply", bound=Message)

_STATUS_FAULTS = {
    grpc.StatusCode.UNAVAILABLE: Fault.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Fault.LATE,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Fault.BUSY,
    grpc.StatusCode.NOT_FOUND: Fault.UNPREPARED,
    grpc.StatusCode.FAILED_PRECONDITION: Fault.FOREIGN,
    grpc.StatusCode.INVALID_ARGUMENT: Fault.MALFORMED,
    grpc.StatusCode.UNIMPLEMENTED: Fault.MALFORMED,
    grpc.StatusCode.CANCELLED: Fault.UNREACHABLE,  # by `Link.close`: other cancellations raise their own fault
}
_REFUSAL_FAULTS = {
    Refusal.BUSY: Fault.BUSY,
    Refusal.UNPREPARED: Fault.UNPREPARED,
    Refusal.MALFORMED: Fault.MALFORMED,
    Refusal.BROKEN: Fault.BROKEN,
}


class Call(Protocol):
    """A fetch in progress."""

    def cancel(self) -> None:
        """Make the fetch fail with `Fault.CANCELLED`, unless it has ended. Called from any thread."""


class Link:
    """The connections to one endpoint, opened by the first call. Thread-safe.

    Args:
        record: The endpoint.
        metadata: Metadata of gRPC calls: the job's token and id.
        limits: Bounds of the memory that answers may make this process allocate.
        tls: This host's TLS, None for a job in plaintext.
    """

    def __init__(
        self, record: EndpointRecord, metadata: tuple[tuple[str, str], ...], limits: Limits, tls: Tls | None = None
    ) -> None:
        self._name = f"{record.endpoint_id} ({record.address})"
        address = address_via(record.address)
        self._address = address.rpartition(":")[0].strip("[]")
        self._host = record.host
        self._tls = tls
        self._metadata = metadata
        self._limits = limits
        self._lock = threading.Lock()  # guards the fields below
        self._attending = threading.Lock()  # held by the one thread that runs `attend`
        self._channel = channels.open_channel(address, name=record.host, tls=tls)
        self._attendance: Any = None
        self._port = 0
        self._hello = b""
        self._streams: set[Stream] = set()
        self._idle: list[tuple[float, Stream]] = []  # pairs of idle-since time and connection, last in first out
        self._end = ""  # why the link has ended

    def call(self, method: str, request: Message, reply: type[_Reply], timeout_s: float) -> _Reply:
        """Call a method of the service and return its answer. Blocks.

        Raises:
            CallFailedError: The call failed.
            AuthenticationError: The endpoint refuses the token.
        """
        with self._grpc_errors():
            data = self._channel.unary_unary(f"/{SERVICE}/{method}", None, None)(
                request.SerializeToString(), timeout=timeout_s, metadata=self._metadata
            )
        return _parse(reply, data, method)

    def attend(self) -> None:
        """Tell the endpoint, once, that this process uses it. Block until a connection for batches is there.

        Raises:
            CallFailedError, AuthenticationError: As in `call`. CallFailedError also if the link has ended.
        """
        with self._attending:
            if self._end:
                raise CallFailedError(Fault.UNREACHABLE, self._end)
            if self._attendance is not None:
                return
            is_late = threading.Event()

            def expire() -> None:
                is_late.set()
                call.cancel()

            timer = threading.Timer(_ATTEND_TIMEOUT_S, expire)  # the call itself has no time limit
            timer.daemon = True
            try:
                with self._grpc_errors():
                    call: Any = self._channel.unary_stream(f"/{SERVICE}/Attend", None, None)(
                        pb.AttendRequest(protocol=PROTOCOL).SerializeToString(), metadata=self._metadata
                    )
                    timer.start()
                    data = next(call, b"")
            except CallFailedError as error:
                if is_late.is_set():
                    raise CallFailedError(Fault.LATE, f"no answer to Attend within {_ATTEND_TIMEOUT_S:g} s") from error
                raise
            finally:
                timer.cancel()
            # The answer names the port for batches and the ticket that this process has to show there.
            try:
                reply = _parse(pb.AttendReply, data, "Attend")
                if not 0 < reply.port < 2**16 or len(reply.ticket) != TICKET_BYTES:
                    raise CallFailedError(Fault.BROKEN, "its answer to Attend names no port or no ticket")
            except CallFailedError:
                call.cancel()
                raise
            self._attendance, self._port, self._hello = call, reply.port, GREETING + reply.ticket
            # gRPC runs this at once if the call has ended meanwhile.
            call.add_done_callback(lambda ended: self._drop(f"the endpoint ended: {ended.details() or ended.code()}"))
            self._try_port()

    def fetch(self, request: bytes, decoder: BatchDecoder, *, timeout_s: float, on_call: Callable[[Call], None]) -> int:
        """Send a request for a batch and receive the batch into ``decoder``. Blocks. Only after `attend`.

        Args:
            request: A ``FetchRequest``.
            decoder: A new decoder. It is complete when this returns.
            timeout_s: Bound of the whole fetch.
            on_call: Called with the call, for other threads to cancel it.

        Returns:
            The bytes of the answer before compression.

        Raises:
            DatasetError: The user's code raised on the endpoint.
            ProtocolError: The answer breaks the protocol or arrived damaged.
            CallFailedError: The call failed.
        """
        deadline_s = time.monotonic() + timeout_s
        call = _StreamCall()
        on_call(call)
        is_in_step = False  # whether the next answer on this connection will belong to the next request
        try:
            stream, message = self._ask(call, request, deadline_s)
            decoder.take_message(message)
            while not decoder.done:
                if decoder.needs_memory:
                    stream.wait_for_data(deadline_s=deadline_s)
                decoder.filled(stream.receive_into(decoder.room(), deadline_s=deadline_s))
            if stream.has_leftover:
                raise ProtocolError(f"{self._name} sends more than it was asked for")
            is_in_step = True
            return len(message) + decoder.nbytes
        except DatasetError:
            is_in_step = True
            raise
        except RefusedError as error:
            is_in_step = True
            raise CallFailedError(_REFUSAL_FAULTS[error.refusal], error.details) from error
        except DeadlineError as error:
            raise CallFailedError(Fault.LATE, f"none within {timeout_s:g} s") from error
        except OSError as error:
            fault = Fault.UNREACHABLE if call.is_sent else Fault.UNSENT
            raise CallFailedError(Fault.CANCELLED if call.is_cancelled else fault, self._end or str(error)) from error
        finally:
            self._give_back(call, is_usable=is_in_step)

    def close(self) -> None:
        """End everything. Calls in progress fail. Idempotent. Blocks until gRPC has closed the channel."""
        self._drop("the connection was closed")
        self._channel.close()

    def _try_port(self) -> None:
        """Open the connection for the first fetch, because an endpoint that cannot deliver batches is of no use."""
        call = _StreamCall()
        is_usable = False
        try:
            self._connect(call, math.inf)
            is_usable = True
        except OSError as error:
            self._drop(f"no connection for batches: {error}")
            self._attendance.cancel()
            raise CallFailedError(Fault.UNREACHABLE, self._end) from error
        finally:
            self._give_back(call, is_usable=is_usable)

    def _ask(self, call: _StreamCall, request: bytes, deadline_s: float) -> tuple[Stream, bytes]:
        """Send the request. Return the connection, which the call holds, and the answer's message."""
        stream = self._reuse(call)
        if stream is not None:
            try:
                return stream, self._exchange(call, stream, request, deadline_s)
            except (ConnectionResetError, BrokenPipeError):
                # Either the endpoint died, perhaps because of this request. Then its port accepts no connections now.
                # Or the endpoint lives and only an idle connection has ended. Then no request is to blame, and asking
                # twice does no harm.
                self._give_back(call, is_usable=False)
        stream = self._connect(call, deadline_s)
        return stream, self._exchange(call, stream, request, deadline_s)

    def _exchange(self, call: _StreamCall, stream: Stream, request: bytes, deadline_s: float) -> bytes:
        call.is_sent = True
        stream.send(request, deadline_s=deadline_s)
        message = stream.receive_message(self._limits.max_answer_bytes, deadline_s=deadline_s)
        if message is None:
            raise ConnectionResetError("the endpoint closed the connection")
        return message

    def _reuse(self, call: _StreamCall) -> Stream | None:
        """Make the call hold an idle connection and return it, None if all are in use."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                _, stream = self._idle.pop()
            call.hold(stream)
            if stream.is_quiet() or call.is_cancelled:
                return stream
            self._give_back(call, is_usable=False)  # the connection has ended, or sent data that was not asked for

    def _connect(self, call: _StreamCall, deadline_s: float) -> Stream:
        """Make the call hold a new connection and return it.

        Raises:
            OSError: The connection could not be opened.
        """

        def register(stream: Stream) -> None:
            with self._lock:
                if self._end or not self._hello:
                    raise ConnectionAbortedError(self._end or "there is no connection yet")
                self._streams.add(stream)
            call.hold(stream)

        make: Callable[[socket.socket], Stream] = Stream
        if self._tls is not None:
            make = functools.partial(TlsStream, session=self._tls.client_session(self._host))
        stream = connect(self._address, self._port, deadline_s=deadline_s, on_stream=register, make=make)
        stream.send_raw(self._hello, deadline_s=deadline_s)
        return stream

    def _give_back(self, call: _StreamCall, *, is_usable: bool) -> None:
        """Take the connection from the call. Keep it if it is usable, else close it. Close old idle ones too."""
        stream = call.let_go()
        if stream is None:
            return
        now_s = time.monotonic()
        closed = []
        with self._lock:
            if is_usable and not call.is_cancelled and not self._end:
                self._idle.append((now_s, stream))
            else:
                closed.append(stream)
            while self._idle and self._idle[0][0] < now_s - _KEEP_IDLE_S:
                closed.append(self._idle.pop(0)[1])
            self._streams.difference_update(closed)
        for each in closed:
            each.close()

    def _drop(self, why: str) -> None:
        """End the connections. A call that uses one fails at once and gives it back. May run in gRPC's thread."""
        with self._lock:
            if self._end:
                return
            self._end = why
            idle = [stream for _, stream in self._idle]
            self._idle.clear()
            self._streams.difference_update(idle)
            for stream in self._streams:
                stream.shut_down()
        for stream in idle:
            stream.close()

    @contextlib.contextmanager
    def _grpc_errors(self) -> Iterator[None]:
        """Translate gRPC's exceptions to this package's. The only place that does. Wrap nothing but the call."""
        try:
            yield
        except grpc.RpcError as error:
            code = error.code()  # type: ignore[attr-defined, unused-ignore]
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise AuthenticationError(
                    f"{self._name} refuses this job's token: give every host of the job the same one"
                ) from error
            raise CallFailedError(_STATUS_FAULTS.get(code, Fault.BROKEN), channels.short_details(error)) from error
        except ValueError as error:  # gRPC raises this if the channel was closed meanwhile
            raise CallFailedError(Fault.UNREACHABLE, "the connection was closed") from error


def _parse(kind: type[_Reply], data: bytes, method: str) -> _Reply:
    try:
        return parse(kind, data)
    except ProtocolError as error:
        raise CallFailedError(Fault.BROKEN, f"its answer to {method} is no message of the protocol") from error


class _StreamCall:
    """A fetch that another thread may cancel without ending the next fetch on the same connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self.is_cancelled = False
        self.is_sent = False
        """Whether the endpoint may have received the request."""

    def hold(self, stream: Stream) -> None:
        """Set the connection that the fetch uses."""
        with self._lock:
            self._stream = stream
            if self.is_cancelled:
                stream.shut_down()

    def let_go(self) -> Stream | None:
        """Return the connection that the fetch used. From now on `cancel` leaves that connection alone."""
        with self._lock:
            stream, self._stream = self._stream, None
            return stream

    def cancel(self) -> None:
        """See `Call`."""
        with self._lock:
            self.is_cancelled = True
            if self._stream is not None:
                self._stream.shut_down()
