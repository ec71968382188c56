"""The pool's end of a fork server: its start, commands to it, events from it."""

from __future__ import annotations

import json
import logging
import os
import site
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from hetero import errors
from hetero.control.security import TOKEN_FILE_VARIABLE
from hetero.errors import ChildFailedError, ChildFailure, ConfigError, HeteroError
from hetero.system.process import start_child, thread_limits
from hetero.wire.limits import Limits

__all__ = ["Forker", "ForkerProcess", "PoolOptions", "child_environment", "failure_from_event"]

_MAX_PACKET_BYTES = 128 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """The settings of one host's pool."""

    script: str
    """Path of the user's script, or the name of a module."""
    is_module: bool = False
    """Whether ``script`` is the name of a module."""
    script_args: tuple[str, ...] = ()
    """The script's command line after its name."""
    host: str
    """Name of this host."""
    address: str
    """Numeric address to bind, never all interfaces."""
    num_endpoints: int
    """Number of endpoint processes, >= 1."""
    job_id: str
    """Id of this job. Endpoints refuse calls for another job."""
    token_path: str | None = None
    """File that holds the token, or ``/proc/PID/fd/N`` of a memfd, or None for no authentication."""
    in_own_session: bool = True
    """Whether the endpoints run in a separate session, where signals to the caller's process group do not reach them.

    Supervisors signal whole groups, and a launcher ends endpoints after the ranks. It is False for the endpoints of a
    rank, which are killed with the rank's group.
    """
    tls_dir: str | None = None
    """Folder of certificates (see `hetero.wire.tls.Tls`), None for plaintext."""
    num_slots: int = 1
    """Emulated vCPUs per endpoint, >= 1."""
    sample_time_s: float = 0.0
    """Emulated seconds for one sample on one vCPU, 0 for real time only."""
    max_batch_bytes: int = Limits().max_batch_bytes
    """Largest batch that endpoints send, in bytes, >= 1. A request may set a lower bound, but no higher one."""
    endpoint_restarts: int = 10
    """Restarts of crashed processes on this host before it gives up, >= 0. One is given back per 60 ``stable_s``."""
    gives_up: bool = True
    """Whether the host gives up for good when no endpoint and no restart is left.

    Otherwise a host that has served waits for the next restart.
    """
    grace_s: float = 5.0
    """Seconds for calls in flight when an endpoint is asked to end."""
    stuck_s: float = 15.0
    """Seconds without a sign of life until an endpoint is killed and started again."""
    prepare_timeout_s: float = 600.0
    """The same while the endpoint builds a data set."""
    stable_s: float = 60.0
    """Seconds without a crash until a process counts as stable. Its next crash counts as the first one again."""
    log_level: str = "INFO"
    """Level of the endpoints' own logging."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to add to this process's environment."""

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("num_endpoints", self.num_endpoints, 1),
            ("num_slots", self.num_slots, 1),
            ("sample_time_s", self.sample_time_s, 0),
            ("max_batch_bytes", self.max_batch_bytes, 1),
            ("endpoint_restarts", self.endpoint_restarts, 0),
            ("grace_s", self.grace_s, 0),
            ("stuck_s", self.stuck_s, 1),
        ):
            if value < bound:
                raise ConfigError(f"{name} is {value}, expected at least {bound}")
        if self.stable_s <= 0:
            raise ConfigError(f"stable_s is {self.stable_s}, expected more than 0")


class Forker(Protocol):
    """Starts and ends the processes of a pool. See `ForkerProcess`."""

    loaded_s: float | None

    def fileno(self) -> int:
        """Return the descriptor to select for events."""

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Start one process."""

    def stop(self, grace_s: float) -> None:
        """Ask all processes to end."""

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield the events that have arrived. Yield None if no more events can come."""

    def poll(self) -> int | None:
        """Return the exit status once everything has ended, None before."""

    def end(self) -> None:
        """Kill the processes that are left."""


class ForkerProcess:
    """One run of `hetero.dataplane.endpoint.fork_server`. For one thread, with which the process ends.

    Args:
        options: The pool's settings.
        output: Descriptor that the process prints to.
    """

    def __init__(self, options: PoolOptions, output: int) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_child(
                [sys.executable, "-m", "hetero.dataplane.endpoint.fork_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=child_environment(options),
                start_new_session=options.in_own_session,
            )
        self.loaded_s: float | None = None
        """Monotonic time when it had imported the script and began to take commands, None before."""
        configuration = {
            "host": options.host,
            "index": -1,
            "num_endpoints": options.num_endpoints,
            "address": options.address,
            "incarnation": "",
            "job_id": options.job_id,
            "tls_dir": options.tls_dir,
            "num_slots": options.num_slots,
            "sample_time_s": options.sample_time_s,
            "max_batch_bytes": options.max_batch_bytes,
            "grace_s": options.grace_s,
            "script": options.script,
            "is_module": options.is_module,
            "script_args": options.script_args,
            "log_level": options.log_level,
            "parent_pid": os.getpid(),
        }
        self._send(configuration)

    def fileno(self) -> int:
        """Return the descriptor to select for events."""
        return self._socket.fileno()

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Ask it to start one endpoint that prints to ``output``."""
        self._send({"command": "start", "index": index, "incarnation": incarnation}, output)

    def stop(self, grace_s: float) -> None:
        """Ask it to end its endpoints and itself."""
        self._send({"command": "stop", "grace_s": grace_s})

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield the events that have arrived. Yield None if no more events can come."""
        while True:
            try:
                packet = self._socket.recv(_MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            yield json.loads(packet) if packet else None
            if not packet:
                return

    def poll(self) -> int | None:
        """Return its exit status, None while it lives."""
        return self._process.poll()

    def end(self) -> None:
        """Kill it if it lives. The kernel kills its endpoints with it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._socket.close()

    def _send(self, message: Mapping[str, object], *descriptors: int) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:
            logger.debug("the forker is gone: %s", error)  # `poll` reports its exit


def child_environment(options: PoolOptions) -> dict[str, str]:
    """Return the environment of the processes. It contains the token's path, never the token."""
    environment = {**os.environ, **thread_limits(), **options.environment, "GRPC_ENABLE_FORK_SUPPORT": "false"}
    environment["PYTHONUNBUFFERED"] = "1"
    if options.token_path is None:
        environment.pop(TOKEN_FILE_VARIABLE, None)
    else:
        environment[TOKEN_FILE_VARIABLE] = options.token_path
    package_parent = str(Path(__file__).resolve().parents[3])
    if package_parent not in {*site.getsitepackages(), site.getusersitepackages()}:
        # hetero runs from a source tree. The processes must find this very package.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package_parent]))
    return environment


def failure_from_event(event: Mapping[str, Any]) -> HeteroError:
    """Return the failure that a process reported, as the exception that was raised there."""
    if event["child"] is not None:
        return ChildFailedError(ChildFailure(**{**event["child"], "last_lines": tuple(event["child"]["last_lines"])}))
    kind = getattr(errors, event["kind"], HeteroError)
    return cast("HeteroError", kind(event["message"]))
