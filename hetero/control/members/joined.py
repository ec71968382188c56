"""The record of a data host that has joined a running job, with its bounds."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated

from hetero.cluster.document import HOST_NAME, MAX_GROUP_NAME, MAX_TEXT
from hetero.errors import ProtocolError
from hetero.wire.records import Wire, printable

__all__ = ["MAX_JOINED", "JoinedHost", "check_address"]

MAX_JOINED = 1024
"""Maximum number of data hosts that have joined a job and have not left."""
_ADDRESS = re.compile(r"(?:\[([0-9a-f:.]+)\]|([0-9.]+)):([0-9]{1,5})")


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


def _check_name(text: str) -> None:
    if not HOST_NAME.fullmatch(text):
        raise ProtocolError(f"a joined host has the name {text!r:.80}; expected a host name or address")


def _check_address_if_any(text: str) -> None:
    if text:
        check_address(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHost:
    """A data host that has joined a running job. The description of the cluster does not have it."""

    host: Annotated[str, Wire(check=_check_name)]
    address: Annotated[str, Wire(check=_check_address_if_any)]
    """``address:port`` of its launcher. Empty if the host's name gives it, as for hosts of the description."""
    group: Annotated[str, printable(MAX_GROUP_NAME, "group")]
    instance_type: Annotated[str, printable(MAX_TEXT, "instance type")]
