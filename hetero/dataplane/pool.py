"""A host's endpoints: started, watched, restarted, stopped. Lives in the launcher.

Neither torch nor the user's script is imported here; `hetero.dataplane.forker`
does that in a process of its own. One thread runs everything: it starts the
forker (whose parent-death signal is bound to that thread), reads events and the
output of all processes, and restarts what crashed.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import selectors
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from hetero import errors
from hetero.control.directory import EndpointRecord
from hetero.control.security import TOKEN_FILE_VARIABLE
from hetero.dataplane.output import Output
from hetero.errors import ChildFailedError, ChildFailure, ConfigError, HeteroError
from hetero.process import describe_exit_status, thread_limits

__all__ = ["EndpointPool", "PoolOptions"]

_MAX_PACKET_BYTES = 128 * 1024
_LAST_LINES = 20
_TICK_S = 0.5
_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What one host is to serve."""

    script: str
    """Path of the user's script."""
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
    num_slots: int = 1
    """Emulated vCPUs per endpoint, >= 1."""
    sample_time_s: float = 0.0
    """Emulated time of one sample on one vCPU, seconds; 0: real time only."""
    endpoint_restarts: int = 10
    """Restarts of crashed processes on this host before it gives up, >= 0."""
    grace_s: float = 5.0
    """What calls in flight get when an endpoint is told to end, seconds."""
    log_level: str = "INFO"
    """Of the endpoints' own logging."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""

    def __post_init__(self) -> None:
        for name, value, bound in (
            ("num_endpoints", self.num_endpoints, 1),
            ("num_slots", self.num_slots, 1),
            ("sample_time_s", self.sample_time_s, 0),
            ("endpoint_restarts", self.endpoint_restarts, 0),
            ("grace_s", self.grace_s, 0),
        ):
            if value < bound:
                raise ConfigError(f"{name} is {value}, expected at least {bound}")


@dataclass(slots=True)
class _Slot:
    """The place of one endpoint; its process changes with every restart."""

    index: int
    name: str
    incarnation: str = ""
    pid: int = 0
    record: EndpointRecord | None = None
    start_at_s: float | None = 0.0
    """When to start a process; None: one is there, or none shall be."""
    num_crashes: int = 0
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    statistics: dict[str, float] = field(default_factory=dict)
    past_statistics: dict[str, float] = field(default_factory=dict)


class EndpointPool:
    """Keeps a host's endpoints alive; a context manager. Thread-safe.

    Args:
        options: See `PoolOptions`.
        on_change: Called with the endpoints that serve, from the pool's thread, whenever they change.
        on_line: Called with process name and line for everything the processes print, from the pool's thread.
    """

    def __init__(
        self,
        options: PoolOptions,
        on_change: Callable[[tuple[EndpointRecord, ...]], None],
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self._options = options
        self._on_change = on_change
        self._on_line = on_line or (lambda name, text: logger.info("%s: %s", name, text))
        self._slots = [_Slot(index, f"{options.host}/{index}") for index in range(options.num_endpoints)]
        self._published: tuple[EndpointRecord, ...] = ()
        self._changed = threading.Condition()
        self._failure: HeteroError | None = None
        self._num_restarts = 0
        self._stop_grace_s: float | None = None
        self._wake_read, self._wake_write = -1, -1
        self._thread: threading.Thread | None = None
        # Below: touched by the pool's thread only.
        self._forker: subprocess.Popen[bytes] | None = None
        self._forker_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._num_forker_crashes = 0
        self._forker_start_at_s: float | None = 0.0
        self._is_loaded = False
        self._events: socket.socket | None = None
        self._outputs: dict[int, Output] = {}
        self._selector = selectors.DefaultSelector()

    # The caller's side

    def start(self) -> None:
        """Start the processes; does not wait for them (see `wait_ready`)."""
        if self._thread is not None:
            raise RuntimeError("the pool was started already")
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")
        self._thread = threading.Thread(target=self._run, name="endpoint-pool", daemon=True)
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until every endpoint serves; False if the time is over first.

        Raises:
            HeteroError: The `failure`, if the pool has given up.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or len(self._published) == len(self._slots), timeout_s
            )
            if self._failure is not None:
                raise self._failure
            return len(self._published) == len(self._slots)

    @property
    def failure(self) -> HeteroError | None:
        """Why the pool has given up; None while it has not."""
        with self._changed:
            return self._failure

    @property
    def records(self) -> tuple[EndpointRecord, ...]:
        """The endpoints that serve now."""
        with self._changed:
            return self._published

    @property
    def num_restarts(self) -> int:
        """Crashed processes that were started again."""
        with self._changed:
            return self._num_restarts

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the endpoints that live."""
        with self._changed:
            return tuple(slot.pid for slot in self._slots if slot.pid)

    def statistics(self) -> dict[str, float]:
        """Return the sums of `hetero.dataplane.endpoint.EndpointStatistics` over all endpoints, ended ones included."""
        total: dict[str, float] = {}
        with self._changed:
            for slot in self._slots:
                for part in (slot.past_statistics, slot.statistics):
                    for name, value in part.items():
                        total[name] = total.get(name, 0) + value
        return total

    def stop(self, grace_s: float | None = None) -> None:
        """Take the endpoints out of the directory, let them finish, end every process; blocks, idempotent.

        Args:
            grace_s: For calls in flight; default ``options.grace_s``. 0 kills at once.
        """
        if self._thread is None:
            return
        with self._changed:
            self._stop_grace_s = self._options.grace_s if grace_s is None else grace_s
            is_open = self._wake_write >= 0
            if is_open:
                os.write(self._wake_write, b"s")
        self._thread.join(self._stop_grace_s + 15.0)

    def __enter__(self) -> EndpointPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # The pool's thread

    def _run(self) -> None:
        try:
            while self._stop_grace_s is None:
                self._start_what_is_due()
                self._turn(_TICK_S)
            self._shut_down(self._stop_grace_s)
        except BaseException as error:
            logger.exception("the endpoint pool failed")
            self._fail(error if isinstance(error, HeteroError) else HeteroError(f"the endpoint pool failed: {error}"))
        finally:
            self._drop_forker(signal.SIGKILL)
            for output in list(self._outputs.values()):
                self._close_output(output)
            with self._changed:
                self._selector.close()
                os.close(self._wake_read)
                os.close(self._wake_write)
                self._wake_read = self._wake_write = -1
                self._changed.notify_all()

    def _turn(self, timeout_s: float) -> None:
        """Wait for something to happen and deal with it."""
        for key, _ in self._selector.select(timeout_s):
            if key.data == "wake":
                os.read(self._wake_read, 64)
            elif key.data == "events":
                self._read_events()
            elif not key.data.read(self._on_line):
                self._close_output(key.data)
        if self._forker is not None and self._forker.poll() is not None:
            self._on_forker_exit(self._forker.returncode)

    def _start_what_is_due(self) -> None:
        now_s = time.monotonic()
        if self._forker is None:
            if self._forker_start_at_s is not None and now_s >= self._forker_start_at_s:
                self._start_forker()
            return
        if not self._is_loaded:
            return
        for slot in self._slots:
            if slot.start_at_s is not None and now_s >= slot.start_at_s:
                slot.start_at_s = None
                slot.incarnation = secrets.token_hex(8)
                output = self._open_output(slot.name, slot.last_lines)
                self._command("start", output.write_end, index=slot.index, incarnation=slot.incarnation)
                output.close_write_end()

    def _start_forker(self) -> None:
        options = self._options
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        output = self._open_output(f"{options.host}/script", self._forker_lines)
        with theirs:
            self._forker = subprocess.Popen(
                [sys.executable, "-m", "hetero.dataplane.forker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                pass_fds=(theirs.fileno(),),
                env=_environment(options),
            )
        output.close_write_end()
        self._events = ours
        self._is_loaded = False
        self._forker_start_at_s = None
        self._selector.register(ours, selectors.EVENT_READ, "events")
        configuration = {
            "host": options.host,
            "index": -1,
            "num_endpoints": options.num_endpoints,
            "address": options.address,
            "incarnation": "",
            "job_id": options.job_id,
            "num_slots": options.num_slots,
            "sample_time_s": options.sample_time_s,
            "grace_s": options.grace_s,
            "script": options.script,
            "script_args": options.script_args,
            "log_level": options.log_level,
            "parent_pid": os.getpid(),
        }
        ours.send(json.dumps(configuration).encode())

    def _command(self, name: str, *descriptors: int, **facts: object) -> None:
        assert self._events is not None
        packet = json.dumps({"command": name, **facts}).encode()
        try:
            socket.send_fds(self._events, [packet], list(descriptors))
        except OSError as error:
            logger.debug("the forker is gone: %s", error)  # its end is noticed in this turn

    def _read_events(self) -> None:
        assert self._events is not None
        while True:
            try:
                packet = self._events.recv(_MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                packet = b""
            if not packet:
                self._selector.unregister(self._events)  # readable forever; the forker's end is noticed by its status
                self._events.close()
                self._events = None
                return
            self._on_event(json.loads(packet))

    def _on_event(self, event: dict[str, Any]) -> None:
        kind = event.pop("event")
        if kind == "loaded":
            self._is_loaded = True
            logger.debug("%s has imported the script, endpoints by %s", self._options.host, event["mode"])
            return
        if kind == "failed":
            self._fail(_failure(event))
            return
        slot = self._slots[event["index"]]
        if event["incarnation"] != slot.incarnation:
            return
        if kind == "ready":
            self._on_ready(slot, event["pid"], event["port"])
        elif kind == "statistics":
            with self._changed:
                slot.statistics = {name: event[name] for name in event if name not in ("index", "incarnation")}
        elif kind == "exited":
            self._on_exit(slot, event["status"])

    def _on_ready(self, slot: _Slot, pid: int, port: int) -> None:
        options = self._options
        host = f"[{options.address}]" if ":" in options.address else options.address
        with self._changed:
            slot.pid = pid
        slot.record = EndpointRecord(
            endpoint_id=slot.name,
            host=options.host,
            address=f"{host}:{port}",
            incarnation=slot.incarnation,
            num_slots=options.num_slots,
        )
        self._publish()

    def _on_exit(self, slot: _Slot, status: int) -> None:
        """Plan a restart of one endpoint that ended, or give up."""
        for output in list(self._outputs.values()):
            if output.name == slot.name and not output.read(self._on_line):
                self._close_output(output)
        self._retire(slot)
        self._publish()
        if self._stop_grace_s is not None:
            return
        explanation = describe_exit_status(status)
        if not self._may_restart():
            if not any(other.record or other.start_at_s is not None or other.pid for other in self._slots):
                self._give_up(slot.name, status, explanation, slot.last_lines)
            else:
                logger.error("endpoint %s %s; no restarts are left", slot.name, explanation)
            return
        slot.num_crashes += 1
        wait_s = _backoff_s(slot.num_crashes)
        slot.start_at_s = time.monotonic() + wait_s
        logger.warning("endpoint %s %s; starting it again in %.1f s", slot.name, explanation, wait_s)

    def _on_forker_exit(self, status: int) -> None:
        """Everything on this host ended with the forker; start over, or give up."""
        while self._events is not None:
            self._read_events()
            break
        self._drop_forker(None)
        for slot in self._slots:
            self._retire(slot)
            slot.start_at_s = 0.0
        self._publish()
        if self._failure is not None or self._stop_grace_s is not None:
            return
        explanation = describe_exit_status(status)
        if not self._may_restart():
            self._give_up(f"the process that imports {self._options.script!r}", status, explanation, self._forker_lines)
            return
        self._num_forker_crashes += 1
        wait_s = _backoff_s(self._num_forker_crashes)
        self._forker_start_at_s = time.monotonic() + wait_s
        logger.warning("endpoints of %s: forker %s; starting over in %.1f s", self._options.host, explanation, wait_s)

    def _may_restart(self) -> bool:
        with self._changed:
            if self._num_restarts >= self._options.endpoint_restarts:
                return False
            self._num_restarts += 1
            return True

    def _retire(self, slot: _Slot) -> None:
        with self._changed:
            slot.pid = 0
            slot.record = None
            for name, value in slot.statistics.items():
                slot.past_statistics[name] = slot.past_statistics.get(name, 0) + value
            slot.statistics = {}

    def _publish(self) -> None:
        records = tuple(slot.record for slot in self._slots if slot.record is not None)
        if self._stop_grace_s is not None:
            records = ()
        with self._changed:
            if records == self._published:
                return
            self._published = records
            self._changed.notify_all()
        self._on_change(records)

    def _give_up(self, name: str, status: int, explanation: str, lines: deque[str]) -> None:
        self._fail(
            ChildFailedError(
                ChildFailure(name=name, exit_status=status, explanation=explanation, last_lines=tuple(lines))
            )
        )

    def _fail(self, error: HeteroError) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._forker_start_at_s = None
            for slot in self._slots:
                slot.start_at_s = None
            self._changed.notify_all()

    def _shut_down(self, grace_s: float) -> None:
        self._publish()  # readers go elsewhere while the calls in flight end
        if self._forker is None:
            return
        if self._events is not None:
            self._command("stop", grace_s=grace_s)
        deadline_s = time.monotonic() + grace_s + 3.0
        while self._is_running() and time.monotonic() < deadline_s:
            self._turn(0.1)

    def _is_running(self) -> bool:
        return self._forker is not None

    def _drop_forker(self, number: signal.Signals | None) -> None:
        """Forget the forker, dead or to be killed; its children end with it."""
        if self._forker is not None:
            if number is not None and self._forker.poll() is None:
                self._forker.send_signal(number)
            self._forker.wait()
            self._forker = None
            pids = [slot.pid for slot in self._slots if slot.pid]
            deadline_s = time.monotonic() + 2.0
            while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
                time.sleep(0.01)
        if self._events is not None:
            self._selector.unregister(self._events)
            self._events.close()
            self._events = None

    def _open_output(self, name: str, last_lines: deque[str]) -> Output:
        output = Output(name, last_lines)
        self._outputs[output.read_end] = output
        self._selector.register(output.read_end, selectors.EVENT_READ, output)
        return output

    def _close_output(self, output: Output) -> None:
        self._selector.unregister(output.read_end)
        del self._outputs[output.read_end]
        output.close()


def _environment(options: PoolOptions) -> dict[str, str]:
    """Return the processes' environment: the token's path in it, never the token."""
    environment = {**os.environ, **thread_limits(), **options.environment, "GRPC_ENABLE_FORK_SUPPORT": "false"}
    environment["PYTHONUNBUFFERED"] = "1"
    if options.token_path is None:
        environment.pop(TOKEN_FILE_VARIABLE, None)
    else:
        environment[TOKEN_FILE_VARIABLE] = options.token_path
    package_parent = str(Path(__file__).resolve().parents[2])
    if package_parent not in {*site.getsitepackages(), site.getusersitepackages()}:
        # Run from a source tree: the processes must find this very package.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), package_parent]))
    return environment


def _failure(event: Mapping[str, Any]) -> HeteroError:
    """Return what a process reported, as the exception that it was there."""
    if event["child"] is not None:
        return ChildFailedError(ChildFailure(**{**event["child"], "last_lines": tuple(event["child"]["last_lines"])}))
    kind = getattr(errors, event["kind"], HeteroError)
    return cast("HeteroError", kind(event["message"]))


def _backoff_s(num_crashes: int) -> float:
    """Return the wait before a restart; the first is nearly immediate."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (num_crashes - 1))


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
