"""Calls from a rank to its launcher without gRPC: protobuf messages over a Unix socket.

This socket is for ranks that fork (see `hetero.control.launcher_link`). It has an abstract name, so no file remains.
Each side accepts only a peer of the same user, or root, as the kernel reports it. This check alone is too weak. A
process in another container that shares the network sees the same abstract names, and it may be root there without
access to this job's files. Therefore the first frame of a connection is the job's token, if the job has one.

A frame is one byte, the length of the message, and the message. In a request the byte is the index of the method in
`METHODS`, or it marks the message as the token. In a reply it marks the message as the answer or as the text of a
refusal. Calls that have one answer follow each other on one connection. A watch has a separate connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

from hetero.control.security import Token
from hetero.errors import AuthenticationError, HeteroError
from hetero.wire.channels import MAX_REPLY_BYTES, MAX_REQUEST_BYTES
from hetero.wire.messages import parse
from hetero.wire.proto import control_pb2 as pb

__all__ = ["ADDRESS_PREFIX", "METHODS", "Caller", "HostSocket", "SocketLink"]

ADDRESS_PREFIX = "unix-abstract:"
METHODS = ("Register", "Report", "Watch")
"""Methods of the service ``Launcher``. The frame of a request contains the index of its method."""

_FRAME = struct.Struct("!BI")
_CUT = "the connection broke in the middle of a message"
_CREDENTIALS = struct.Struct("3i")
_ANSWER, _REFUSAL = 0, 1
_TOKEN = 255
_MAX_TOKEN_BYTES = 1024
_TOKEN_S = 5.0
"""Time limit for a connection to send the token."""
_CALL_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 4096
"""Maximum number of connections. A rank uses two, and ``--nproc-per-node`` is at most 1024."""
_JOIN_S = 1.0
_PAUSE_S = 0.05
"""Seconds to wait after a failed accept. File descriptors or threads may be available again after this time."""
_LOG_INTERVAL_S = 10.0

logger = logging.getLogger(__name__)


class Caller:
    """The caller of a launcher's method, with the part of ``grpc.ServicerContext`` that the launcher uses."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def is_active(self) -> bool:
        """Return whether the caller is still connected."""
        try:
            return bool(self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def abort(self, _code: object, details: str) -> NoReturn:
        """Answer the call with a refusal."""
        raise _RefusedError(details)


class _RefusedError(Exception):
    """A method rejects the request. The text is the reason."""


class HostSocket:
    """A launcher's end of the socket. Serves the ranks of its host until it is closed. A context manager.

    Args:
        call: Receives the name of a method, the request and the caller. Returns the serialised answers.
        token: The job's token. With None, a peer of this user, or root, is accepted without a token.
        on_unauthenticated: Called for each connection that does not send the token.
    """

    def __init__(
        self,
        call: Callable[[str, bytes, Caller], Iterable[bytes]],
        *,
        token: Token | None = None,
        on_unauthenticated: Callable[[], object] = lambda: None,
    ) -> None:
        self._call = call
        self._token = token
        self._on_unauthenticated = on_unauthenticated
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        self._next_log_s = float("-inf")
        name = f"hetero-{os.getpid()}-{secrets.token_hex(8)}"
        self.address = f"{ADDRESS_PREFIX}{name}"
        """The address for `SocketLink`."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{name}")
        self._listener.listen(socket.SOMAXCONN)
        self._thread = threading.Thread(target=self._accept, name="hetero-ranks", daemon=True)
        self._thread.start()

    def __enter__(self) -> HostSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect every rank. Idempotent."""
        with self._lock:
            self._is_closed = True
            connections = list(self._connections)
        for each in (self._listener, *connections):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on this socket
        self._thread.join(_JOIN_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                self._warn(error)
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                is_accepted = (
                    not self._is_closed and len(self._connections) < _MAX_CONNECTIONS and _is_own_user(connection)
                )
                if is_accepted:
                    self._connections.add(connection)
            if not is_accepted:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="hetero-rank", daemon=True).start()
            except RuntimeError as error:
                self._forget(connection)
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + _LOG_INTERVAL_S
            logger.warning("cannot accept the connection of a rank: %s; trying again", error)

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, HeteroError):
                if not self._is_authentic(connection):
                    self._on_unauthenticated()
                    return
                while (frame := _receive(connection, MAX_REQUEST_BYTES)) is not None:
                    self._answer(connection, *frame)
        finally:
            self._forget(connection)

    def _is_authentic(self, connection: socket.socket) -> bool:
        """Return whether the peer sends the token. Raise OSError if the connection ends before."""
        if self._token is None:
            return True
        try:
            frame = _receive(connection, _MAX_TOKEN_BYTES, deadline_s=time.monotonic() + _TOKEN_S)
        except (TimeoutError, HeteroError):
            return False
        connection.settimeout(None)
        if frame is None:
            raise ConnectionError("the connection ended before it sent a token")
        return self._token.matches(frame[1]) and frame[0] == _TOKEN

    def _answer(self, connection: socket.socket, number: int, data: bytes) -> None:
        if number >= len(METHODS):
            raise HeteroError(f"method {number} of a rank is unknown")
        try:
            for answer in self._call(METHODS[number], data, Caller(connection)):
                _send(connection, _ANSWER, answer)
        except _RefusedError as error:
            _send(connection, _REFUSAL, str(error).encode("utf-8", "replace"))


class SocketLink:
    """A rank's end of the socket. Implements `hetero.control.launcher_link.LauncherLink`.

    Args:
        address: Address of a `HostSocket`.
        token: The job's token, if it has one.
        rank: This rank, for messages.
    """

    def __init__(self, address: str, token: Token | None = None, *, rank: int) -> None:
        self._address = address
        self._token = token
        self._rank = rank
        self._calls: socket.socket | None = None
        self._watching: socket.socket | None = None

    def register(self, request: pb.RegisterRequest) -> pb.RegisterReply:
        """See `LauncherLink`."""
        try:
            return parse(pb.RegisterReply, self._call("Register", request))
        except OSError as error:
            raise HeteroError(f"rank {self._rank} cannot reach its launcher at {self._address}: {error}") from error

    def report(self, report: pb.RankReport) -> bool:
        """See `LauncherLink`."""
        try:
            self._call("Report", report)
        except (OSError, HeteroError):
            return False
        return True

    def watch(self, request: pb.WatchRequest) -> Iterator[pb.RankUpdate]:
        """See `LauncherLink`."""
        try:
            with self._connect() as connection:
                self._watching = connection
                _send(connection, METHODS.index("Watch"), request.SerializeToString())
                while True:
                    yield parse(pb.RankUpdate, _answer_of(_receive(connection, MAX_REPLY_BYTES)))
        except OSError as error:
            raise HeteroError(str(error)) from error
        finally:
            self._watching = None

    def cancel(self) -> None:
        """See `LauncherLink`."""
        watching = self._watching
        if watching is not None:
            with contextlib.suppress(OSError):
                watching.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See `LauncherLink`."""
        self.cancel()
        self._hang_up()

    def abandon(self) -> None:
        """See `LauncherLink`."""
        self._hang_up()
        if self._watching is not None:
            self._watching.close()  # without shutdown, because the parent reads from it
            self._watching = None

    def _hang_up(self) -> None:
        if self._calls is not None:
            self._calls.close()
            self._calls = None

    def _call(self, method: str, request: Any) -> bytes:
        if self._calls is None:
            self._calls = self._connect()
            self._calls.settimeout(_CALL_TIMEOUT_S)
        try:
            _send(self._calls, METHODS.index(method), request.SerializeToString())
            return _answer_of(_receive(self._calls, MAX_REPLY_BYTES))
        except OSError:
            self._hang_up()  # a late answer must not be read as the answer to the next call
            raise

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{self._address.removeprefix(ADDRESS_PREFIX)}")
            if not _is_own_user(connection):
                raise AuthenticationError(f"rank {self._rank}: the launcher at {self._address} belongs to another user")
            if self._token is not None:
                _send(connection, _TOKEN, self._token.reveal().encode("ascii"))
        except BaseException:
            connection.close()
            raise
        return connection


def _is_own_user(connection: socket.socket) -> bool:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _pid, user, _group = _CREDENTIALS.unpack(found)
    return user in (os.geteuid(), 0)


def _send(connection: socket.socket, number: int, data: bytes) -> None:
    connection.sendall(_FRAME.pack(number, len(data)) + data)


def _receive(connection: socket.socket, max_bytes: int, *, deadline_s: float | None = None) -> tuple[int, bytes] | None:
    """Return the first byte of the next frame and its message, or None if the peer has closed the connection.

    Args:
        connection: The connection.
        max_bytes: Largest message to accept.
        deadline_s: Deadline for the whole frame on the monotonic clock. It replaces the connection's timeout.

    Raises:
        HeteroError: If the message is larger than ``max_bytes``.
        OSError: If the connection breaks or a timeout passes.
    """
    head = _read(connection, _FRAME.size, deadline_s)
    if not head:
        return None
    if len(head) < _FRAME.size:
        raise ConnectionError(_CUT)
    number, length = _FRAME.unpack(head)
    if length > max_bytes:
        raise HeteroError(f"a message between a rank and its launcher has {length} bytes, expected at most {max_bytes}")
    data = _read(connection, length, deadline_s)
    if len(data) < length:
        raise ConnectionError(_CUT)
    return number, data


def _read(connection: socket.socket, num_bytes: int, deadline_s: float | None) -> bytes:
    """Return ``num_bytes`` bytes, or fewer if the connection ends first."""
    data = bytearray()
    while len(data) < num_bytes:
        if deadline_s is not None:
            rest_s = deadline_s - time.monotonic()
            if rest_s <= 0:
                raise TimeoutError("the peer took too long to send a message")
            connection.settimeout(rest_s)
        part = connection.recv(num_bytes - len(data))
        if not part:
            break
        data += part
    return bytes(data)


def _answer_of(frame: tuple[int, bytes] | None) -> bytes:
    if frame is None:
        raise ConnectionError("the launcher has closed the connection")
    number, data = frame
    if number != _ANSWER:
        raise HeteroError(f"the launcher rejected a message: {data.decode('utf-8', 'replace')}")
    return data
