"""Options of gRPC channels and servers, each with its reason.

Import this module before ``grpc``: fork support has to be off when the library
starts, and its log quiet. hetero forks only where no channel exists, and gRPC's
fork handlers deadlock or abort in processes that fork for other reasons.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hetero.errors import PortError
from hetero.wire.tls import Tls, diagnose

if TYPE_CHECKING:
    import grpc
    import psutil

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# It has a line for every handshake that fails, so that a stranger could fill the log.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__all__ = [
    "MAX_REPLY_BYTES",
    "MAX_REQUEST_BYTES",
    "PROXY_VARIABLES",
    "add_port",
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
"""One answer of a server. Batches do not come over gRPC."""
MAX_REQUEST_BYTES = 2**20
"""One request to a server: index lists and facts, never payload."""
HANDSHAKE_MS = 10_000
MAX_IDLE_MS = 60_000
MAX_CONNECTIONS = 4096
"""Of one server: more than ranks and hosts of any job. Strangers leave after the two times above."""

PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""In the order in which gRPC looks at them; it reads no others, and these only in lower case."""
_PORT_ADVICE = "end what holds the port, or give every host of the job another --port"

Option = tuple[str, int]


def client_options() -> tuple[Option, ...]:
    """Return the options of a channel to an endpoint or launcher."""
    return (
        # Whatever is larger than this is not ours.
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        # A silent peer (power loss, partition, SIGSTOP) is noticed in 15 s instead of the kernel's quarter of an hour.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        # Newer cores wait a minute for any ping that is under way already (bandwidth estimation has its own) and
        # send no keepalive meanwhile: a stopped peer was noticed after 61 s with this left out.
        ("grpc.http2.ping_timeout_ms", 5_000),
        # Also between calls: a stalled trainer must find out before it asks again.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The default backs off to 120 s, far longer than an endpoint needs to restart. A host that ends because its
        # peers do not understand it waits two heartbeats for their calls (4 s): who backs off has to be back by then.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        # Doubles as the bound of one connection attempt; the default of 20 s hides a host that swallows packets.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # http_proxy and friends hijack connections between hosts of the job (grpc issues 9989, 11896, 15942).
        ("grpc.enable_http_proxy", 0),
        # No TXT look-ups for a service config: addresses here are plain numbers.
        ("grpc.service_config_disable_resolution", 1),
        # Retries are ours: they go to another endpoint.
        ("grpc.enable_retries", 0),
        # A connection of its own for every channel: closing one never disturbs another.
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options(*, max_streams: int = 1024) -> tuple[Option, ...]:
    """Return the options of a server.

    Args:
        max_streams: Calls in progress on one connection, >= 1.
    """
    return (
        # Two servers on one port share its connections silently; we want the second bind to fail.
        ("grpc.so_reuseport", 0),
        # Requests are tiny; a small bound shrinks what a stranger can make us hold.
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_send_message_length", MAX_REPLY_BYTES),
        ("grpc.max_metadata_size", 16 * 1024),
        ("grpc.max_concurrent_streams", max_streams),
        # Must allow the clients' keepalive (10 s), else the server answers it with GOAWAY too_many_pings.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        # Drop connections whose client fell silent, with all their calls.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Whoever connects has so long to speak TLS and HTTP/2 (the default is two minutes), and a connection may be
        # without calls so long. Ours never are: ranks watch, launchers beat, readers attend.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        # Cores that know it turn away what comes beyond; others take until descriptors run out.
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
    )


def without_proxy(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which gRPC of libraries that set no options connects to hosts of the job directly.

    Empty if no proxy is set. Connections of a job go to numeric addresses: an exception is the end of one, or, for
    newer cores, a network. Names that end in a digit are excepted as well, others and what is no gRPC are not.
    """
    if not any(environ.get(name) for name in PROXY_VARIABLES):
        return {}
    stated = environ.get("no_grpc_proxy") or environ.get("no_proxy") or ""
    return {"no_grpc_proxy": ",".join([*filter(None, [stated]), *"0123456789", "::/0"])}


def join_address(address: str, port: int | str) -> str:
    """Return ``address:port`` as gRPC takes it, an IPv6 address in brackets."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def open_channel(target: str, *, name: str, tls: Tls | None) -> grpc.Channel:
    """Return a channel to an endpoint or launcher; does not connect yet.

    Args:
        target: ``address:port``, numeric.
        name: The name of the host there, which its certificate must bear.
        tls: With it the channel is never in plaintext.
    """
    import grpc

    if tls is None:
        return grpc.insecure_channel(target, options=client_options())
    authority, certificate, key = tls.reveal()
    return grpc.secure_channel(
        target,
        grpc.ssl_channel_credentials(authority, key, certificate),
        options=(*client_options(), ("grpc.ssl_target_name_override", name)),
    )


def add_port(server: grpc.Server, target: str, tls: Tls | None) -> int:
    """Have a server listen; return the port, 0 if it cannot.

    Args:
        server: Not started yet.
        target: ``address:port``, numeric.
        tls: With it clients must speak TLS, and show a certificate of the job.
    """
    import grpc

    try:
        if tls is None:
            return server.add_insecure_port(target)
        authority, certificate, key = tls.reveal()
        credentials = grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True)
        return server.add_secure_port(target, credentials)
    except RuntimeError:
        return 0


def bind(server: grpc.Server, address: str, port: int = 0, *, tls: Tls | None = None) -> int:
    """Bind a server to one address.

    Args:
        server: A server that was not started yet.
        address: Numeric address of this host, never all interfaces.
        port: 0 picks a free one.
        tls: As in `add_port`.

    Returns:
        The port.

    Raises:
        PortError: The address is not this host's, or the port is taken; names the process that has it if possible.
    """
    target = join_address(address, port)
    bound = add_port(server, target, tls)
    if bound == 0 or (port and bound != port):
        owner = find_owner(address, port)
        advice = f"; {_PORT_ADVICE}" if port else ""
        raise PortError(f"cannot bind {target}{f': {owner} listens on it' if owner else ''}{advice}")
    return bound


def short_details(error: grpc.RpcError) -> str:
    """Return what a failed call says about itself, on one line of at most 200 characters; which check of TLS failed."""
    details = getattr(error, "details", None)
    text = " ".join(str((details() if callable(details) else None) or error).split())
    found = diagnose(text)
    if found is not None:
        return f"TLS: {found.text}"
    if text.startswith("failed to connect") and text.endswith("Socket closed"):
        # All that gRPC says where a client in plaintext, or with other certificates, meets a server under TLS.
        text += "; does it demand TLS (--tls-dir), or refuse this host's certificate?"
    return text if len(text) <= 200 else text[:197] + "..."


def find_owner(address: str, port: int) -> str:
    """Say which process listens on a port; empty if that is nobody, or nobody whom this user may see."""
    if port == 0:
        return ""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for entry in psutil.net_connections("tcp"):
            if entry.status != psutil.CONN_LISTEN or not entry.pid or not entry.laddr:
                continue
            # gRPC listens on sockets of both families, which show IPv4 addresses as mapped ones.
            if entry.laddr.port == port and entry.laddr.ip.removeprefix("::ffff:") in (address, "0.0.0.0", "::"):
                return _describe(psutil.Process(entry.pid))
    return ""


def _describe(process: psutil.Process) -> str:
    """Name a process; a launcher that was left over from another run is told by that run's id."""
    from psutil import Error

    command = " ".join(process.cmdline())
    run = None
    if "hetero" in command:
        with contextlib.suppress(Error):
            environment = process.environ()
            run = environment.get("HETERO_JOB_ID") or environment.get("TRAINING_JOB_NAME")
    return f"process {process.pid} ({command[:80]}){f' of the job {run}' if run else ''}"
