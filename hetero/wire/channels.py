"""Options of gRPC channels and servers, each with its reason.

Import this module before ``grpc``, because it turns off gRPC's fork support and most of gRPC's log. hetero forks only
processes without channels. If other code forks, gRPC's fork handlers would deadlock or abort the process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetero.cluster import find_platform
from hetero.documents.text import shortened
from hetero.errors import PortError
from hetero.wire.tls import Tls, diagnose

if TYPE_CHECKING:
    import grpc
    import psutil

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# gRPC logs a line for every failed handshake, so an unauthenticated peer could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "MAX_REPLY_BYTES",
    "MAX_REQUEST_BYTES",
    "PROXY_VARIABLES",
    "bind",
    "client_options",
    "find_owner",
    "join_address",
    "open_channel",
    "server_options",
    "short_details",
    "without_proxy",
]

MAX_REPLY_BYTES = 4 * 2**20
"""Largest answer of a server. Batches are not sent over gRPC."""
MAX_REQUEST_BYTES = 2**20
"""Largest request to a server. Requests do not carry payload."""
HANDSHAKE_MS = 10_000
MAX_IDLE_MS = 60_000
MAX_CONNECTIONS = 4096
"""Largest number of connections of one server, more than any job has ranks and hosts. `HANDSHAKE_MS` and `MAX_IDLE_MS`
end the connections of unauthenticated peers."""

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Proxy variables that gRPC reads, in its order. It reads them only in lower case."""
_PORT_ADVICE = "end what holds the port, or give every host of the job another --port"

Option = tuple[str, int]

_KEEPALIVE: tuple[Option, ...] = (
    # Keepalive notices a silent peer (power loss, partition, SIGSTOP) in 15 s. The kernel would take 15 minutes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Newer gRPC cores wait a minute for the answer to any ping (bandwidth estimation also sends pings) and send no
    # keepalive during this minute. Without this option a stopped peer was noticed only after 61 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    # Keepalive also runs between calls, because a stalled trainer must notice a lost peer before its next request.
    ("grpc.keepalive_permit_without_calls", 1),
)


def client_options() -> tuple[Option, ...]:
    """Return the options of a channel to an endpoint or launcher."""
    return (
        # hetero does not send larger messages.
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        *_KEEPALIVE,
        # 0 removes gRPC's limit on keepalive pings between calls.
        ("grpc.http2.max_pings_without_data", 0),
        # The default backs off to 120 s, much longer than an endpoint needs to restart. A second is short for another
        # reason too: hosts of a job that has failed because their versions of hetero differ stay for only 4 s. Within
        # this time, each other host has to connect, and learn why the job has failed.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # gRPC also uses this option as the time limit of one connection attempt, so it may be larger than the option
        # above. With the default of 20 s, a host that drops packets is noticed late.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # Otherwise http_proxy and similar variables lead connections between hosts of the job through a proxy (grpc
        # issues 9989, 11896, 15942).
        ("grpc.enable_http_proxy", 0),
        # TXT look-ups for a service config are off, because all addresses are numeric.
        ("grpc.service_config_disable_resolution", 1),
        # hetero itself retries, on another endpoint.
        ("grpc.enable_retries", 0),
        # Every channel has a separate connection, so closing one channel never disturbs another.
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options(*, max_streams: int = 1024) -> tuple[Option, ...]:
    """Return the options of a server.

    Args:
        max_streams: Calls in progress on one connection, >= 1.
    """
    return (
        # Otherwise two servers on one port silently share its connections. The second bind must fail instead.
        ("grpc.so_reuseport", 0),
        # Requests are tiny. A small bound limits the memory that an unauthenticated peer can take.
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", MAX_REPLY_BYTES),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", max_streams),
        # The server must allow the clients' keepalive (10 s), else it answers with GOAWAY too_many_pings. 0 strikes
        # mean that no number of pings is too many.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Drops the connections of silent clients, with all their calls.
        *_KEEPALIVE,
        # Limits the TLS and HTTP/2 handshakes of a new connection. The default is two minutes.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        # Limits how long a connection may be without calls. hetero's own connections always have calls: launchers call
        # Heartbeat, readers Attend.
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        # gRPC cores that know this option reject further connections. Others accept until descriptors run out.
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    )


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make other libraries' gRPC channels connect to hosts of the job without a proxy.

    The result is empty if no proxy is set. An entry of ``no_grpc_proxy`` matches all addresses that end with its text,
    and in newer gRPC cores also a network. The job's connections go to numeric addresses. An IPv4 address ends with a
    digit, so this function adds each of the ten digits as an entry, and ``::/0`` for all IPv6 addresses. The digits
    also match names that end with a digit. Other names, and connections without gRPC, still use the proxy.
    """
    if not any(environ.get(name) for name in PROXY_VARIABLES):
        return {}
    stated = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    return {"no_grpc_proxy": ",".join([*filter(None, [stated]), *"0123456789", "::/0"])}


def join_address(address: str, port: int | str) -> str:
    """Return ``address:port`` in gRPC's format, with an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def open_channel(target: str, *, name: str, tls: Tls | None) -> grpc.Channel:
    """Return a channel to an endpoint or launcher, without connecting yet.

    Args:
        target: Numeric ``address:port``.
        name: The host's name. The host's certificate must contain it.
        tls: This host's certificate. If given, the channel never uses plaintext.
    """
    import grpc

    if tls is None:
        return grpc.insecure_channel(target, options=client_options())
    authority, certificate, key = tls.reveal()
    # gRPC must look for the host's name in the certificate, and not for the numeric address.
    return grpc.secure_channel(
        target,
        grpc.ssl_channel_credentials(authority, key, certificate),
        options=(*client_options(), ("grpc.ssl_target_name_override", name)),
    )


def bind(server: grpc.Server, address: str, port: int = 0, *, tls: Tls | None = None) -> int:
    """Bind a server to one address.

    Args:
        server: A server that has not been started.
        address: Numeric address of this host, never all interfaces.
        port: The port. 0 picks a free one.
        tls: This host's certificate. If given, clients must use TLS and show a certificate of the job.

    Returns:
        The port.

    Raises:
        PortError: If the address does not belong to this host, or if the port is taken. The message names the process
            that has the port if possible.
    """
    import grpc

    target = join_address(address, port)
    bound = 0
    # If the server cannot listen there, gRPC raises RuntimeError, and the port stays 0.
    with contextlib.suppress(RuntimeError):
        if tls is None:
            bound = server.add_insecure_port(target)
        else:
            authority, certificate, key = tls.reveal()
            credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
            bound = server.add_secure_port(target, credentials)
    # Check the port that gRPC has got too, because a job must not use a port of another process.
    if bound == 0 or (port and bound != port):
        owner = find_owner(address, port)
        who = f": {owner} listens on it" if owner else ""
        advice = f"; {_PORT_ADVICE}" if port else ""
        raise PortError(f"cannot bind {target}{who}{advice}")
    return bound


def short_details(error: grpc.RpcError) -> str:
    """Return one line of about 200 characters at most: the details of a failed call, or the TLS check that failed."""
    # The class `grpc.RpcError` itself lacks the method ``details``.
    details = getattr(error, "details", None)
    text = " ".join(str((details() if callable(details) else None) or error).split())
    found = diagnose(text)
    if found is not None:
        return f"TLS: {found.text}"
    if text.startswith("failed to connect") and text.endswith("Socket closed"):
        # gRPC gives only this text if a client without TLS, or with other certificates, connects to a TLS server.
        text += "; does it demand TLS (--tls-dir), or refuse this host's certificate?"
    return shortened(text, 200)


def find_owner(address: str, port: int) -> str:
    """Return a description of the process that listens on a port, or an empty text if this user cannot see one."""
    # Port 0 asks for any free port, so no process can have taken it.
    if port == 0:
        return ""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.status != psutil.CONN_LISTEN or not entry.pid or not entry.laddr:
                continue
            # gRPC listens on dual-stack sockets, which show IPv4 addresses as mapped IPv6 addresses.
            if entry.laddr.port == port and entry.laddr.ip.removeprefix("::ffff:") in (address, "0.0.0.0", "::"):
                return _describe(psutil.Process(entry.pid))
    return ""


def _describe(process: psutil.Process) -> str:
    """Return a description of a process. For a process of hetero it includes the id of its job."""
    from psutil import Error

    command = " ".join(process.cmdline())
    job_id = None
    if "hetero" in command:
        # Another user's environment cannot be read.
        with contextlib.suppress(Error):
            environment = process.environ()
            job_id = environment.get("HETERO_JOB_ID") or find_platform(environment).job_name()
    of_job = f" of the job {job_id}" if job_id else ""
    return f"process {process.pid} ({command[:80]}){of_job}"
