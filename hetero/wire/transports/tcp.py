"""TCP connections with keepalive and TCP_NODELAY."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable

from hetero.errors import PortError
from hetero.wire.transports.interface import Connection, Listener, Transport, UnauthenticatedPeer
from hetero.wire.transports.sockets import SocketConnection, SocketListener, SocketPeer

__all__ = ["TCP_OPTIONS", "TcpTransport"]

_KEEPALIVE_S = 10
_NUM_PROBES = 3

TCP_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # Keepalive frees a thread that waits for a host without power. The gRPC call Attend notices such a host earlier,
    # and also a stopped process. TCP_USER_TIMEOUT is not set, because it would end the connection to a live process
    # that does not read for a while (a trainer in a long call that holds the interpreter's lock).
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES),
)
"""Options of the socket of a connection."""


class TcpTransport(Transport):
    """TCP in plaintext. A subclass may make other peers and connections from the sockets."""

    def listen(self, address: str) -> Listener:
        """See `Transport.listen`."""
        try:
            given = socket.create_server((address, 0), family=_family(address), backlog=1024)
        except OSError as error:
            raise PortError(f"cannot listen on {address}: {error}") from error
        return SocketListener(given, given.getsockname()[1], self._make_peer)

    def connect(
        self,
        address: str,
        port: int,
        *,
        host: str = "",
        deadline_s: float = math.inf,
        on_connection: Callable[[Connection], object] = lambda connection: None,
    ) -> Connection:
        """See `Transport.connect`."""
        connection = self._make_connection(socket.socket(_family(address), socket.SOCK_STREAM), host)
        try:
            # Call this before `open`, because another thread may have to shut down the connection while it connects.
            on_connection(connection)
            connection.open((address, port), deadline_s)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_peer(self, accepted: socket.socket) -> UnauthenticatedPeer:
        return SocketPeer(accepted, TCP_OPTIONS)

    def _make_connection(self, given: socket.socket, _host: str) -> SocketConnection:
        return SocketConnection(given, TCP_OPTIONS)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
