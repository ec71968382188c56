"""The builder: the process that builds the announced data sets once for all endpoints of a host.

`hetero.pool.fork_server` has the contract of the processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero.documents.text import listing
from hetero.endpoint.prebuilt import Prebuilt, build
from hetero.errors import HeteroError, first_line
from hetero.pool.packets import receive_packet
from hetero.pool.processes import why_not_fork
from hetero.spec import DatasetSpec
from hetero.system.memory import prepare_to_fork
from hetero.system.open_files import close_filesystems, mapped_files, open_files
from hetero.system.process import describe_exit_status, limit_threads

__all__ = ["Builder", "Start", "build_all", "receive_starts"]

Start = tuple[int, str, int]
"""An endpoint to start: its index, its incarnation, and the descriptor of its output."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Builder:
    """The fork server's view of its builder, which is a child process.

    States and transitions:

        building  --all data sets are built--> built (`has_built`)
        building  --a data set must not be shared, or the process ends--> refused (`refused`), and the process ended
        built     --`hand_over`--> the builder is the fork server
    """

    pid: int
    channel: socket.socket
    """Socket to the process."""
    specs: Sequence[DatasetSpec]
    """The data sets that the process builds."""
    has_built: bool = False
    refused: Sequence[DatasetSpec] = ()
    """Data sets that each endpoint has to build itself. Empty while the process builds, and if it has succeeded."""
    why: str = ""
    """Why these data sets are refused."""

    def follow(self) -> None:
        """Read the reports of the process, and find out whether it has ended. Does not block."""
        packet = receive_packet(self.channel)
        if packet is None:
            return
        event, _ = packet
        if event["event"] == "built":
            self.has_built = True
        elif event["event"] == "refused":
            # A builder ends after it has refused a data set. Wait for its end, before another one builds the others.
            self.refused, self.why = (self.specs[event["number"]],), event["why"]
            self.end()
        else:
            # The other end of the socket is gone, so the builder has ended. It is not known which of its data sets is
            # to blame, so none of them is tried again.
            self.refused, self.why = self.specs, f"the process that builds it {describe_exit_status(self.end())}"

    def hand_over(self, starts: Sequence[Start]) -> None:
        """Let the process take over as the fork server. It starts these endpoints first."""
        # If the process has ended, sending fails, and the fork server notices the end next.
        with contextlib.suppress(OSError):
            for index, incarnation, output in starts:
                message = json.dumps({"index": index, "incarnation": incarnation}).encode()
                socket.send_fds(self.channel, [message], [output])
        # The closed socket shows the builder that there are no further endpoints.
        self.channel.close()

    def end(self) -> int:
        """Kill the process and return its exit status. The kernel kills the processes that it has forked too."""
        os.kill(self.pid, signal.SIGKILL)
        self.channel.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def build_all(specs: Sequence[DatasetSpec], channel: socket.socket, *, host: str) -> dict[DatasetSpec, Prebuilt] | None:
    """Build data sets, and report the outcome to the fork server.

    Args:
        specs: The data sets.
        channel: Socket to the fork server.
        host: Name of this host, for the user's errors.

    Returns:
        The data sets. None if a process that holds one of them must not be forked.
    """
    # A process that a factory starts must not keep this socket open, because the end of the socket shows the fork
    # server that this process has ended.
    os.register_at_fork(after_in_child=channel.close)
    prebuilt: dict[DatasetSpec, Prebuilt] = {}
    for number, spec in enumerate(specs):
        begin_s = time.monotonic()
        why_not = _build_for_forks(spec, prebuilt, host)
        if why_not:
            channel.send(json.dumps({"event": "refused", "number": number, "why": why_not}).encode())
            return None
        logger.info("built data set %s once for all endpoints in %.1f s", spec, time.monotonic() - begin_s)
    # Prepare before the fork server gets the report. Between the report and the forks, the host has no endpoints, so
    # this time must be short.
    prepare_to_fork()
    channel.send(json.dumps({"event": "built"}).encode())
    return prebuilt


def receive_starts(channel: socket.socket) -> list[Start]:
    """Block until the fork server hands over. Return the endpoints to start, and close the socket."""
    starts: list[Start] = []
    with channel:
        while True:
            # `receive_packet` does not block, so wait for the packet here.
            select.select([channel], [], [])
            packet = receive_packet(channel)
            if packet is None:
                continue
            facts, descriptors = packet
            # A packet without a descriptor means that the fork server has closed its socket, and no endpoint follows.
            if not descriptors:
                return starts
            starts.append((facts["index"], facts["incarnation"], descriptors[0]))


def _build_for_forks(spec: DatasetSpec, prebuilt: dict[DatasetSpec, Prebuilt], host: str) -> str:
    """Build a data set and put it into ``prebuilt``. Return why this process must not be forked now, empty if it may.

    If the factory raises, return this as the reason, and put nothing into ``prebuilt``.
    """
    # As in an endpoint before it builds a data set. Results may depend on the number of threads (`thread_limits`).
    limit_threads()
    # Take the state before the factory runs, because only files, memory and threads of the factory count.
    files_before, maps_before, num_threads_before = open_files(), _shared_maps(), _num_threads()
    try:
        prebuilt[spec] = build(spec, host=host)
    except BaseException as error:  # noqa: BLE001 - each endpoint tries by itself, and reports the error
        text = first_line(error) if isinstance(error, HeteroError) else repr(error)
        return f"building it failed: {text[:200]}"
    close_filesystems()  # the probes of the data set may have read from a store
    # Shared memory that processes can write to is not safe. A memory map that can only be read is safe, because it has
    # no position that processes would share.
    if new_maps := _shared_maps() - maps_before:
        return f"building it made memory that processes share ({listing(sorted(new_maps))})"
    if why_not := why_not_fork(files_before, "building it"):
        return why_not
    # `why_not_fork` sees only the threads of Python.
    return "building it started threads" if _num_threads() > num_threads_before else ""


def _shared_maps() -> Counter[str]:
    """Return the names of the memory that forked processes would share and that this process can write to.

    Several pieces of memory may have the same name. So the result counts the pieces of each name.
    """
    return Counter(f"shared memory ({name})" for name, is_shared in mapped_files() if is_shared)


def _num_threads() -> int:
    # The kernel's list includes the threads of native libraries.
    return sum(1 for _ in Path("/proc/self/task").iterdir())
