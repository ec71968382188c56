"""JSON messages between the processes of a host, over packet sockets. Imports nothing heavy."""

from __future__ import annotations

import array
import json
import socket
from typing import Any

__all__ = ["MAX_PACKET_BYTES", "make_channel", "receive_packet"]

MAX_PACKET_BYTES = 256 * 1024
"""Largest size of a packet. The kernel's limit is a little lower by default."""


def make_channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a socket for packets between two processes of a host."""
    # A packet socket keeps messages apart, so no lengths need to be sent.
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def receive_packet(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next packet and its descriptors. None if none has arrived, event ``gone`` if the other end is gone."""
    try:
        # Do not use socket.recv_fds. It ignores the flag MSG_DONTWAIT, so it would block until the next packet.
        size = socket.CMSG_LEN(array.array("i").itemsize)
        packet, ancillary, _, _ = channel.recvmsg(MAX_PACKET_BYTES, size, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    except OSError:
        packet, ancillary = b"", []
    if not packet:
        return {"event": "gone"}, []
    descriptors = [array.array("i", data)[0] for _, _, data in ancillary]
    facts: dict[str, Any] = json.loads(packet)
    return facts, descriptors
