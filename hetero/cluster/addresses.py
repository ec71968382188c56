"""Resolves host names to addresses."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetero.errors import ClusterError

__all__ = ["resolve_address"]


def resolve_address(
    host: str, *, hosts_file: str | None = None, resolver: Callable[..., Sequence[Any]] = socket.getaddrinfo
) -> str:
    """Return the numeric address of a host, IPv4 if it has one.

    Nothing is cached, because a platform may publish a name minutes after the job has started. Callers retry.

    Args:
        host: A host name, or an address, which is returned as it is.
        hosts_file: A file in the format of ``/etc/hosts`` that replaces the resolver. Defaults to
            ``HETERO_HOSTS_FILE``, which `hetero simulate` sets for its hosts.
        resolver: A function with the signature of `socket.getaddrinfo`. The default blocks until the system's resolver
            answers.

    Raises:
        ClusterError: If the name cannot be resolved now.
    """
    if _is_address(host):
        return host
    hosts_file = hosts_file or os.environ.get("HETERO_HOSTS_FILE")
    if hosts_file:
        return _look_up(host, Path(hosts_file))
    try:
        found = resolver(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ClusterError(f"name resolution (DNS) of host {host!r} failed: {error}") from error
    # Reversed, because the first address of each family must win.
    by_family = {family: str(address[0]) for family, _, _, _, address in reversed(found)}
    for family in (socket.AF_INET, socket.AF_INET6):
        if family in by_family:
            return by_family[family]
    raise ClusterError(f"name resolution (DNS) of host {host!r} gave no IPv4 or IPv6 address")


def _look_up(host: str, path: Path) -> str:
    """Return the address of a host in a hosts file, IPv4 if it has one.

    Raises:
        ClusterError: If the file cannot be read, or does not list the host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ClusterError(f"cannot read the hosts file {path} (HETERO_HOSTS_FILE): {error}") from error
    fields = [line.partition("#")[0].split() for line in lines]
    addresses = [names[0] for names in fields if host in names[1:] and _is_address(names[0])]
    if not addresses:
        raise ClusterError(f"host {host!r} is not in the hosts file {path} (HETERO_HOSTS_FILE)")
    return next((address for address in addresses if ":" not in address), addresses[0])


def _is_address(text: str) -> bool:
    """Return whether a text is a numeric IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
