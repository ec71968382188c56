"""Starts a fork server for the pool, sends it commands, and reads its events and what its processes print."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import site
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from hetero import errors
from hetero.control.security import TOKEN_FILE_VARIABLE
from hetero.endpoint.options import EndpointOptions
from hetero.errors import ChildFailedError, ChildFailure, ConfigError, HeteroError
from hetero.pool.packets import make_channel, receive_packet
from hetero.system.line_relay import LineSource
from hetero.system.process import start_child, thread_limits

__all__ = [
    "ForkServer",
    "Outputs",
    "PoolOptions",
    "ProcessStarter",
    "child_environment",
    "failure_from_event",
    "start_module",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """The settings of one host's pool."""

    endpoint: EndpointOptions
    """The settings of each endpoint."""
    token_path: str | None = None
    """Path of the file with the token, ``/proc/PID/fd/N`` for a memfd, None for no authentication."""
    num_at_start: int | None = None
    """Endpoints to start at first, in [0, ``endpoint.num_endpoints``]. None means all. `EndpointPool.resize` changes
    the number. If a number is given, the endpoints are optional, because the job was planned without them."""
    in_own_session: bool = True
    """Whether the endpoints run in a separate session, where signals to the caller's process group do not reach them.

    A launcher needs a separate session, because supervisors signal whole groups, and the launcher ends endpoints after
    the ranks. For the endpoints of a rank this is False, because they must be killed with the rank's group.
    """
    endpoint_restarts: int = 10
    """Restarts of crashed processes before the host gives up, >= 0. After 60 times ``stable_s``, one is given back."""
    gives_up: bool = True
    """Whether the host gives up for good when no endpoint and no restart is left.

    Otherwise a host that has served waits for the next restart.
    """
    stuck_s: float = 15.0
    """Seconds without a sign of life until an endpoint is killed and started again, >= 1."""
    prepare_timeout_s: float = 600.0
    """Seconds without a sign of life until an endpoint is killed, while it builds a data set."""
    stable_s: float = 60.0
    """Seconds without a crash until a process counts as stable, > 0. Its next crash counts as the first one again."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the processes, in addition to those of this process."""

    def __post_init__(self) -> None:
        for name, bound in {"endpoint_restarts": 0, "stuck_s": 1}.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least {bound}")
        if self.stable_s <= 0:
            raise ConfigError(f"stable_s is {self.stable_s}; expected more than 0")


class ProcessStarter(Protocol):
    """Starts and ends the processes of a pool. See `ForkServer`."""

    loaded_s: float | None

    def fileno(self) -> int:
        """Return the descriptor to select for events."""

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Start one process."""

    def end_endpoint(self, incarnation: str) -> None:
        """Ask one process to end."""

    def stop(self, grace_s: float) -> None:
        """Ask all processes to end."""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have arrived. The last one is ``gone``."""

    def poll(self) -> int | None:
        """Return the exit status once everything has ended, None before."""

    def end(self) -> None:
        """Kill the processes that are left."""


class ForkServer:
    """The process of `hetero.pool.fork_server`. Use it in one thread, because it ends with that thread.

    Args:
        options: The pool's settings.
        output: Descriptor for the output of the process.
    """

    def __init__(self, options: PoolOptions, output: int) -> None:
        self._socket, self._process = start_module(
            "hetero.pool.fork_server", output, child_environment(options), in_own_session=options.in_own_session
        )
        self.loaded_s: float | None = None
        """Monotonic time when the fork server had imported the script and accepted commands, None before."""
        # The first packet on the socket is the configuration.
        self._send(options.endpoint.to_json())

    def fileno(self) -> int:
        """Return the descriptor to select for events."""
        return self._socket.fileno()

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Make the fork server start one endpoint that prints to ``output``."""
        self._command(output, command="start", index=index, incarnation=incarnation)

    def end_endpoint(self, incarnation: str) -> None:
        """Make the fork server ask one endpoint to end."""
        self._command(command="end", incarnation=incarnation)

    def stop(self, grace_s: float) -> None:
        """Make the fork server end its endpoints and itself."""
        self._command(command="stop", grace_s=grace_s)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have arrived. The last is ``gone``."""
        while (packet := receive_packet(self._socket)) is not None:
            event, _ = packet
            # Look at the event before the caller gets it, because the caller may change it.
            is_last = event["event"] == "gone"
            yield event
            if is_last:
                return

    def poll(self) -> int | None:
        """Return the fork server's exit status, None while it runs."""
        return self._process.poll()

    def end(self) -> None:
        """Kill the fork server if it runs, and reap it. The kernel then kills its endpoints."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _command(self, *descriptors: int, **message: object) -> None:
        self._send(json.dumps(message).encode(), *descriptors)

    def _send(self, packet: bytes, *descriptors: int) -> None:
        """Send a packet and copies of descriptors to the fork server."""
        try:
            socket.send_fds(self._socket, [packet], list(descriptors))
        except OSError as error:
            # Only log this, because `poll` reports the exit of the fork server.
            logger.debug("the fork server has ended: %s", error)


class Outputs:
    """The output of all processes of a pool. For use by the pool's thread.

    Args:
        selector: Watches the pipes of the processes, each with its `LineSource` as data.
        on_line: Called with the name of a process and a line of its output.
    """

    def __init__(self, selector: selectors.BaseSelector, on_line: Callable[[str, str], None]) -> None:
        self._selector = selector
        self._on_line = on_line
        self._open: list[LineSource] = []

    @contextlib.contextmanager
    def open(self, name: str, last_lines: deque[str]) -> Iterator[int]:
        """Make a pipe for a process's output. Yield the writing end for the process.

        Args:
            name: Name of the process.
            last_lines: Receives the lines as well. If the process fails, the error shows them.
        """

        def on_line(source: str, text: str) -> None:
            last_lines.append(text)
            self._on_line(source, text)

        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        source = LineSource(name, read_end, on_line)
        self._open.append(source)
        self._selector.register(read_end, selectors.EVENT_READ, source)
        try:
            yield write_end
        finally:
            # The process has its own copy of this end.
            os.close(write_end)

    def read(self, source: LineSource, *, max_reads: int = 1) -> None:
        """Pass a process's new lines to ``on_line``, and close the output at its end. Ignore a closed output."""
        # An event that was handled before in the same round may have closed the output.
        if source in self._open and not source.read(max_reads):
            self._close(source)

    def drain(self, name: str) -> None:
        """Pass the remaining lines of a process that has ended to ``on_line``."""
        # Bound the reads, because a child of the process may still write.
        for source in [each for each in self._open if each.name == name]:
            self.read(source, max_reads=16)

    def close(self) -> None:
        """Close all outputs."""
        for source in list(self._open):
            self._close(source)

    def _close(self, source: LineSource) -> None:
        self._selector.unregister(source.descriptor)
        self._open.remove(source)
        source.close()


def start_module(
    module: str, output: int, environment: Mapping[str, str], *, in_own_session: bool = True
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run a module in a child process. Return a packet socket to the process, and the process.

    The module's argument is the descriptor of the other end of the socket.

    Args:
        module: The module.
        output: Descriptor for the output of the process.
        environment: Environment of the process.
        in_own_session: See `PoolOptions.in_own_session`.
    """
    ours, theirs = make_channel()
    with theirs:
        process = start_child(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(theirs.fileno(),),
            env=environment,
            # A supervisor may signal the launcher's whole process group. When such a signal ended the endpoints before
            # the ranks, the ranks got no more batches, and could not all end after the same step.
            start_new_session=in_own_session,
        )
    return ours, process


def child_environment(options: PoolOptions) -> dict[str, str]:
    """Return the environment of the processes. It contains the token's path, never the token."""
    # Turn off gRPC's fork handlers, which may deadlock. They are not needed, because the processes open no channels
    # before they fork (`hetero.wire.channels`).
    environment = {**os.environ, **thread_limits(), **options.environment, "GRPC_ENABLE_FORK_SUPPORT": "false"}
    # The last lines of a process that is killed must not stay in its buffer.
    environment["PYTHONUNBUFFERED"] = "1"
    if options.token_path is None:
        environment.pop(TOKEN_FILE_VARIABLE, None)
    else:
        environment[TOKEN_FILE_VARIABLE] = options.token_path
    package_parent = str(Path(errors.__file__).resolve().parents[1])
    if package_parent not in {*site.getsitepackages(), site.getusersitepackages()}:
        # hetero is not installed but runs from a source tree, which the processes must find.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package_parent]))
    return environment


def failure_from_event(event: Mapping[str, Any]) -> HeteroError:
    """Return the exception that a process reported as its failure."""
    if event["child"] is not None:
        return ChildFailedError(ChildFailure(**{**event["child"], "last_lines": tuple(event["child"]["last_lines"])}))
    kind = getattr(errors, event["kind"], HeteroError)
    return cast("HeteroError", kind(event["message"]))
