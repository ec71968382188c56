"""What an endpoint knows of data sets that are built for all endpoints of its host."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass

from hetero.batches.build import BuiltDataset
from hetero.dataplane.endpoint.packets import MAX_PACKET_BYTES
from hetero.spec import DatasetSpec

__all__ = ["Prebuilt", "SharedBuilds"]


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """A data set that was built before the fork."""

    built: BuiltDataset
    globals: dict[str, str]
    """Digests of the globals that its code reads, taken before that code ran."""


class SharedBuilds:
    """The endpoint's side: asks the fork server for data sets. `ask` is for the compute thread, the rest for any.

    Args:
        channel: Socket to the fork server.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._moved_read, self._moved_write = os.pipe2(os.O_CLOEXEC)
        self.is_moved = False
        """Whether another process is to take the place of this one."""

    @property
    def moved_descriptor(self) -> int:
        """Descriptor that is readable once another process is to take the place of this one."""
        return self._moved_read

    def announce(self, spec: DatasetSpec) -> None:
        """Tell the fork server which data set `ask` will ask for. It builds all that it knows of before it forks."""
        with contextlib.suppress(OSError):  # `ask` reports it
            self._channel.send(json.dumps({"name": spec.name, "arguments": spec.arguments_json}).encode())

    def ask(self, spec: DatasetSpec, port: int) -> str | None:
        """Ask for a data set. Block until it is built.

        Args:
            spec: The data set.
            port: The port of this endpoint's gRPC server.

        Returns:
            None if another process that has the data set takes the place of this one. Else why this process has to
            build the data set.
        """
        if self.is_moved:
            return None
        question = {"name": spec.name, "arguments": spec.arguments_json, "port": port}
        try:
            socket.send_fds(self._channel, [json.dumps(question).encode()], [1])
            answer = json.loads(self._channel.recv(MAX_PACKET_BYTES) or b'{"why": "the fork server is gone"}')
        except OSError as error:
            return f"the fork server does not answer: {error}"
        if answer["why"]:
            return str(answer["why"])
        self.is_moved = True
        os.write(self._moved_write, b"m")
        return None
