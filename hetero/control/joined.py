"""A data host that joins a running job, and its form on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import ProtocolError
from hetero.wire.proto import control_pb2 as pb

__all__ = ["MAX_JOINED", "JoinedHost", "joined_from_proto", "joined_to_proto"]

MAX_JOINED = 1024
"""Maximum number of data hosts that have joined a job and have not left."""
_MAX_CHARS = 300


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
        ProtocolError: If a text is too long.
    """
    longest = max(map(len, (message.host, message.address, message.group, message.instance_type)))
    if longest > _MAX_CHARS:
        raise ProtocolError(f"a joined host has a text of {longest} characters, expected at most {_MAX_CHARS}")
    return JoinedHost(
        host=message.host, address=message.address, group=message.group, instance_type=message.instance_type
    )
