"""The pool's end of a forker: its start, commands to it, events from it."""

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
    """What one host is to serve."""

    script: str
    """Path of the user's script, or the name of a module."""
    is_module: bool = False
    """Whether it is the name of a module."""
    script_args: tuple[str, ...] = ()
    """Its command line after the name."""
    host: str
    """Name of this host."""
    address: str
    """Numeric address to bind; never all interfaces."""
    num_endpoints: int
    """Processes, >= 1."""
    job_id: str
    """Calls for another job are refused."""
    token_path: str | None = None
    """File, or ``/proc/PID/fd/N`` of a memfd, that holds the token; None: no authentication."""
    in_own_session: bool = True
    """Whether signals to the caller's process group miss the endpoints: supervisors send them to whole groups, and a
    launcher ends endpoints after the ranks. Not for those of a rank, which is killed with its group."""
    tls_dir: str | None = None
    """Folder of certificates, see `hetero.wire.tls.Tls`; None: plaintext."""
    num_slots: int = 1
    """Emulated vCPUs per endpoint, >= 1."""
    sample_time_s: float = 0.0
    """Emulated time of one sample on one vCPU, seconds; 0: real time only."""
    max_batch_bytes: int = Limits().max_batch_bytes
    """What endpoints send at most, whatever is asked of them; >= 1."""
    endpoint_restarts: int = 10
    """Restarts of crashed processes on this host before it gives up, >= 0; one is given back per 60 ``stable_s``."""
    gives_up: bool = True
    """Once no endpoint and no restart is left, for good; else a host that has served waits for the next restart."""
    grace_s: float = 5.0
    """What calls in flight get when an endpoint is told to end, seconds."""
    stuck_s: float = 15.0
    """Without a sign of life, before an endpoint is killed and started again, seconds."""
    prepare_timeout_s: float = 600.0
    """The same while it builds a data set."""
    stable_s: float = 60.0
    """In work without a crash, before a process counts as stable: its next crash is the first one again, seconds."""
    log_level: str = "INFO"
    """Of the endpoints' own logging."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""

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
    """What starts and ends the processes of a pool; see `ForkerProcess`."""

    loaded_s: float | None

    def fileno(self) -> int:
        """Return the descriptor to select for events."""

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Start one process."""

    def stop(self, grace_s: float) -> None:
        """Have all end."""

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what has arrived; None if nothing will any more."""

    def poll(self) -> int | None:
        """Return the exit status of the whole, None while it lives."""

    def end(self) -> None:
        """Kill what is left."""


class ForkerProcess:
    """One run of `hetero.dataplane.endpoint.fork_server`. For one thread, whose end is the process's end.

    Args:
        options: What to serve.
        output: Descriptor for what it prints.
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
        """Since when it has the script and takes commands, monotonic; None: not yet."""
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
        """Have it start one endpoint that prints to ``output``."""
        self._send({"command": "start", "index": index, "incarnation": incarnation}, output)

    def stop(self, grace_s: float) -> None:
        """Have it end its endpoints and itself."""
        self._send({"command": "stop", "grace_s": grace_s})

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what has arrived; None if nothing will any more."""
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
        """Kill it if it lives; the kernel kills its endpoints with it."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._socket.close()

    def _send(self, message: Mapping[str, object], *descriptors: int) -> None:
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], list(descriptors))
        except OSError as error:
            logger.debug("the forker is gone: %s", error)  # its end is noticed by its status


def child_environment(options: PoolOptions) -> dict[str, str]:
    """Return the processes' environment: the token's path in it, never the token."""
    environment = {**os.environ, **thread_limits(), **options.environment, "GRPC_ENABLE_FORK_SUPPORT": "false"}
    environment["PYTHONUNBUFFERED"] = "1"
    if options.token_path is None:
        environment.pop(TOKEN_FILE_VARIABLE, None)
    else:
        environment[TOKEN_FILE_VARIABLE] = options.token_path
    package_parent = str(Path(__file__).resolve().parents[3])
    if package_parent not in {*site.getsitepackages(), site.getusersitepackages()}:
        # Run from a source tree: the processes must find this very package.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package_parent]))
    return environment


def failure_from_event(event: Mapping[str, Any]) -> HeteroError:
    """Return what a process reported, as the exception that it was there."""
    if event["child"] is not None:
        return ChildFailedError(ChildFailure(**{**event["child"], "last_lines": tuple(event["child"]["last_lines"])}))
    kind = getattr(errors, event["kind"], HeteroError)
    return cast("HeteroError", kind(event["message"]))
