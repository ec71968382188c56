"""A data host that joins a running job, and its form on the wire."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from hetero.cluster.document import HOST_NAME, MAX_GROUP_NAME, MAX_TEXT
from hetero.errors import ProtocolError
from hetero.wire.proto import control_pb2 as pb

__all__ = ["MAX_JOINED", "JoinedHost", "check_address", "joined_from_proto", "joined_to_proto"]

MAX_JOINED = 1024
"""Maximum number of data hosts that have joined a job and have not left."""
_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHost:
    """A data host that has joined a running job. The description of the cluster does not have it."""

    host: str
    address: str
    """``address:port`` of its launcher. Empty if the host's name gives it, as for hosts of the description."""
    group: str
    instance_type: str


def joined_to_proto(joined: JoinedHost) -> pb.JoinedHost:
    """Return the message for ``joined``."""
    return pb.JoinedHost(
        host=joined.host, address=joined.address, group=joined.group, instance_type=joined.instance_type
    )


def joined_from_proto(message: pb.JoinedHost) -> JoinedHost:
    """Return the host in ``message``.

    Raises:
        ProtocolError: If a text is malformed or too long.
    """
    if not HOST_NAME.fullmatch(message.host):
        raise ProtocolError(f"a joined host has the name {message.host!r:.80}; expected a host name or address")
    if message.address:
        check_address(message.address)
    for what, text, max_chars in (
        ("group", message.group, MAX_GROUP_NAME),
        ("instance type", message.instance_type, MAX_TEXT),
    ):
        if len(text) > max_chars or not text.isprintable():
            raise ProtocolError(
                f"joined host {message.host} has the {what} {text!r:.80}; "
                f"expected at most {max_chars} printable characters"
            )
    return JoinedHost(
        host=message.host, address=message.address, group=message.group, instance_type=message.instance_type
    )


def check_address(text: str) -> None:
    """Check that a text is a numeric address and a port.

    Raises:
        ProtocolError: If it is not.
    """
    match = _ADDRESS.fullmatch(text)
    try:
        if match is None or not 0 < int(match[3]) < 1 << 16:
            raise ValueError
        ipaddress.ip_address(match[1] or match[2])
    except ValueError:
        raise ProtocolError(f"found the address {text!r:.80}; expected a numeric address and a port") from None
