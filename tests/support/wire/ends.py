"""Both ends of a connection, over every transport, for test modules of several folders."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hetero.wire.transports.interface import Connection, Listener, Transport
from hetero.wire.transports.tcp import TcpTransport
from hetero.wire.transports.tls import TlsTransport
from tests.support.wire.in_process import InProcess
from tests.support.wire.job_certificates import opener, tls

KINDS = ["tcp", "tls", "in_process"]
connect, listen = TcpTransport().connect, TcpTransport().listen


def accept(listener: Listener) -> Connection:
    """Accept a peer, complete its handshake if it has one, and admit it.

    Raises:
        TlsError: The handshake failed, and the other side got the reason.
    """
    _wait(listener)
    peer = listener.accept()
    try:
        while not getattr(peer, "_is_open", True):
            _wait(peer)
            if peer.receive(0) == b"":
                raise ConnectionResetError("the client left during the handshake")
    except BaseException:
        peer.close()
        raise
    return peer.admit()


def _wait(given: object) -> None:
    assert select.select([given], [], [], 30.0)[0]


@contextlib.contextmanager
def opened(kind: str) -> Iterator[tuple[Connection, Connection]]:
    """Give the reader's and the endpoint's end of a connection."""
    transports: dict[str, Transport] = {"tcp": TcpTransport(), "tls": TlsTransport(tls()), "in_process": InProcess()}
    transport = transports[kind]
    connect = opener(tls(host="algo-2"), "algo-1") if kind == "tls" else transport.connect
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(contextlib.closing(transport.listen("127.0.0.1")))
        accepted = stack.enter_context(ThreadPoolExecutor(1)).submit(accept, listener)
        first = stack.enter_context(contextlib.closing(connect("127.0.0.1", listener.port)))
        second = stack.enter_context(contextlib.closing(accepted.result(100)))
        yield first, second
