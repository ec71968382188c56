"""Transports, which carry requests and batches. Each is one module behind the same interface.

interface.py    what a transport is, and messages between the two ends of a connection
greeter.py      accepts connections, and admits the peers that show that they belong to the job
sockets.py      the parts that all transports over stream sockets share
tcp.py          TCP
tls.py          TCP under TLS

A reader connects to an endpoint, and a rank connects to its launcher. Endpoint and launcher admit a peer after the peer
has shown that it belongs to the job.

To add a transport, write its module, choose it in `choose_transport`, and add its kind to the tests of all transports.
"""

from __future__ import annotations

from hetero.wire.tls import Tls
from hetero.wire.transports.interface import Transport
from hetero.wire.transports.tcp import TcpTransport
from hetero.wire.transports.tls import TlsTransport

__all__ = ["choose_transport"]


def choose_transport(tls: Tls | None) -> Transport:
    """Return the transport of a process. Endpoints and readers of a job make the same choice.

    Args:
        tls: This host's TLS, None for a job in plaintext.
    """
    return TcpTransport() if tls is None else TlsTransport(tls)
