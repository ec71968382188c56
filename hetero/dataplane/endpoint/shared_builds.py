"""The fork server's side of data sets that are built once for all endpoints of a host.

    fork server --forks--> endpoint: gets the first Prepare, and asks the fork server for the data set
    fork server --forks--> zygote: builds the data set
    zygote      --forks--> zygote: builds another data set that is known by then, if that does not take much longer
    zygote      --forks--> endpoint with the data sets. It takes the place of the first one, with its name and port.

Forked processes share the memory of a data set that they only read. Objects of Python are written to even when they are
read, because their counters of references lie beside them. Large arrays stay shared.

A data set that opens files or connections while it is built, or starts threads, does not survive a fork: the processes
would share the position in a file. Then each endpoint builds its own, as it does if the zygote fails. A zygote builds
one data set, so what one of them does to its process does not affect the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hetero.dataplane.endpoint.options import EndpointOptions
from hetero.dataplane.endpoint.packets import make_channel, receive_packet
from hetero.dataplane.endpoint.processes import EndpointProcess, run_forked
from hetero.dataplane.endpoint.zygote import ZygoteProcess
from hetero.spec import DatasetSpec
from hetero.system.process import SignalWaiter, describe_exit_status
from hetero.system.stop_signals import children_ignore_platform, end_signal

__all__ = ["HostBuilds"]

_MAX_LOST = 2
"""Zygotes with data sets that may be lost. After that, each endpoint builds its own."""
_LEAST_EXTRA_S = 2.0
"""Endpoints wait for other data sets as long as the first one took, but at least this long."""
_LEAVE_S = 5.0
"""Seconds that an endpoint has to give its port to the one that takes its place."""
_DUMP_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Zygote:
    """The fork server's view of a zygote."""

    channel: socket.socket
    spec: DatasetSpec
    """The data set that it builds."""
    specs: frozenset[DatasetSpec]
    """The data sets that it has, once it is ready."""
    began_s: float
    pid: int = 0
    """0 until the process that forks it has said so."""
    is_child: bool = False
    """Whether it is a child of the fork server, which then has to reap it."""
    dumped_s: float | None = None
    """When it was told to write its stacks, because it builds for too long."""

    def send(self, command: dict[str, Any], passed: int) -> bool:
        """Send a command with a descriptor. Return whether that was possible."""
        try:
            socket.send_fds(self.channel, [json.dumps(command).encode()], [passed], socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Kill the process, and with it those that it has forked."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(slots=True, eq=False)
class _Question:
    """An endpoint that waits for a data set."""

    spec: DatasetSpec
    child: EndpointProcess
    port: int
    output: int
    """Descriptor of its output."""


@dataclass(slots=True, kw_only=True)
class Ended:
    """An endpoint of a zygote has ended, or could not be started."""

    index: int
    incarnation: str
    status: int
    is_charged: bool = True
    """Whether its restart counts. When a zygote is lost, only that of one endpoint does."""


@dataclass(slots=True)
class _Pending:
    """An endpoint that a zygote was asked to fork."""

    index: int
    replaced: EndpointProcess | None = field(default=None)
    """The process whose place it takes."""
