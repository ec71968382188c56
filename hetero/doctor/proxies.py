"""Proxies for HTTP: the one that gRPC would use. Connections between the hosts use none."""

from __future__ import annotations

from urllib.parse import urlsplit

from hetero.doctor.finding import Finding, ok
from hetero.doctor.surroundings import Surroundings
from hetero.wire.channels import PROXY_VARIABLES

__all__ = ["examine"]


def examine(surroundings: Surroundings) -> list[Finding]:
    """Report which proxy is set.

    hetero configures its channels without a proxy. TensorFlow's channels use one: with http_proxy set, a worker of
    tf.data.service 2.21 connected to the proxy instead of its dispatcher. Therefore launchers exclude the addresses of
    a job from the proxy (`without_proxy`).
    """
    environ = surroundings.environ
    name = next((name for name in PROXY_VARIABLES if environ.get(name)), None)
    if name is None:
        return [ok("none of grpc_proxy, https_proxy and http_proxy is set")]
    what = f"{name} is {_without_secrets(environ[name])}"
    return [ok(f"{what}; connections between the hosts of a job do not use it, nor do TensorFlow's that it starts")]


def _without_secrets(url: str) -> str:
    """Return a proxy's scheme, host and port, without the user and the password that may precede them."""
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        return "a malformed URL"
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.scheme else f"{parts.hostname}{port}"
