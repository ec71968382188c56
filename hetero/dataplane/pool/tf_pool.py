"""A host's servers of tf.data.service: dispatcher and workers, started, watched, restarted, stopped in order.

Lives in the launcher and imports no TensorFlow. Each server is a process of its own: `hetero.dataplane.pool.tf_server`.
To the rest of the launcher they are endpoints of another kind: the same readiness, directory, restarts and counters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.control.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.dataplane.pool.pool import EndpointPool, PoolOptions
from hetero.dataplane.pool.slot import Slot
from hetero.dataplane.pool.spawn import Forker, child_environment
from hetero.errors import ConfigError
from hetero.system.process import start_child
from hetero.system.workdir import private_folder
from hetero.wire.channels import join_address

__all__ = ["ServiceOptions", "ServicePool"]

_MAX_EVENT_BYTES = 64 * 1024
_ANY_PORT = "%port%"
"""What TensorFlow puts the number in for, or matches any number with."""
_TRAINER_TAG = "COLOCATED"
"""What TensorFlow calls workers on trainer hosts; readers with ``target_workers="AUTO"`` pass over them."""
_LAST_BREATH_S = 2.0
"""From the end of a server's socket to the end of its process."""
_DISPATCHER_S = 2.0
"""What the dispatcher gets to end in, after the workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions(PoolOptions):
    """What one host is to serve; ``num_endpoints`` are dispatcher and workers together."""

    script: str = ""
    """Not used: what workers compute comes from the ranks, as a graph."""
    has_dispatcher: bool = False
    """Whether the dispatcher runs on this host."""
    is_trainer: bool = False
    """Whether the workers share this host with ranks, so that only datasets placed anywhere are made by them."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """For the dispatcher: by name of a host, how many workers there are to be. Static sharding needs to know; empty:
    it is refused."""
    address_of: Callable[[str], str | None] = lambda _: None
    """Where such a host is; None: not known yet, and the dispatcher is not started before. Called by any thread."""
    work_dir: str | None = None
    """Where the dispatcher keeps a journal, so that its successor goes on; None: it keeps none."""


class ServicePool(EndpointPool):
    """Keeps this host's dispatcher and workers alive; a context manager. Thread-safe.

    The dispatcher is the first. Workers are started once it is known where it listens, on this host or, by `follow`,
    on another one. A server that is started again gets the port that it had: whoever knew it finds it there.

    Args:
        options: See `ServiceOptions`.
        on_change: Called with the servers that serve, from the pool's thread, whenever they change.
        on_line: Called with process name and line for everything the processes print, from the pool's thread.
    """

    def __init__(
        self,
        options: ServiceOptions,
        on_change: Callable[[tuple[EndpointRecord, ...]], None],
        on_line: Callable[[str, str], None] | None = None,
    ) -> None:
        self._service = options
        self._servers = _Servers(options)
        super().__init__(options, on_change, on_line)

    def counters(self) -> dict[str, int]:
        """Return what happened here, as the report names it."""
        restarts = dict.fromkeys((TF_DISPATCHER, TF_WORKER), 0)
        for slot in self._slots:
            restarts[self._kind(slot.index)] += max(0, slot.num_starts - 1)
        return {
            "tf.data dispatcher restarts": restarts[TF_DISPATCHER],
            "tf.data worker restarts": restarts[TF_WORKER],
            "stuck endpoints": self.num_stuck,
        }

    def describe(self) -> str:
        """Return what is to serve here."""
        words = ["a dispatcher"] if self._service.has_dispatcher else []
        if nameless := self._nameless():
            words[0] += f" (once the address of {', '.join(nameless)} is known)"
        num_workers = self._service.num_endpoints - self._service.has_dispatcher
        if num_workers:
            words.append(f"{num_workers} worker{'s' if num_workers > 1 else ''}")
        return f"{' and '.join(words)} of tf.data.service"

    def follow(self, records: Sequence[EndpointRecord]) -> None:
        """Take note of where the dispatcher listens, if any of these is one."""
        address = next((record.address for record in records if record.kind == TF_DISPATCHER), "")
        if address and address != self._servers.dispatcher:
            self._servers.dispatcher = address
            self._wake()

    def _word(self, index: int) -> str:
        kind = self._kind(index)
        return kind if kind == TF_DISPATCHER else f"{kind}-{index - self._service.has_dispatcher}"

    def _kind(self, index: int) -> str:
        return _kind(self._service, index)

    def _nameless(self) -> list[str]:
        """Return the hosts of workers whose addresses are not known yet."""
        return [host for host in self._service.workers if self._service.address_of(host) is None]

    # The pool's thread

    def _make_forker(self, output: int) -> Forker:
        return self._servers

    def _may_start(self, slot: Slot) -> bool:
        return not self._nameless() if self._kind(slot.index) == TF_DISPATCHER else bool(self._servers.dispatcher)

    def _start_what_is_due(self) -> None:
        self._servers.end_strays()
        super()._start_what_is_due()

    def _publish(self) -> None:
        for slot in self._slots:
            if slot.record is not None and slot.record.kind == TF_DISPATCHER and self._service.work_dir is not None:
                # It knows what the one before knew.
                slot.record = dataclasses.replace(slot.record, incarnation=f"{self._launch}-journal")
        super()._publish()

    def _on_ready(self, slot: Slot, pid: int, port: int) -> None:
        super()._on_ready(slot, pid, port)
        if slot.record is not None:
            self.follow([slot.record])


def _kind(options: ServiceOptions, index: int) -> str:
    """Return what the server in a slot is: the dispatcher comes first."""
    return TF_DISPATCHER if options.has_dispatcher and index == 0 else TF_WORKER


@dataclass(slots=True, kw_only=True)
class _Server:
    """One process."""

    index: int
    incarnation: str
    dispatcher: str
    """Whose worker it is; empty for a dispatcher."""
    process: subprocess.Popen[bytes]
    socket: socket.socket
    """Its end is the request to end, and the process's end."""
    is_ready: bool = False


class _Servers:
    """Starts and ends the processes: to the pool what `hetero.dataplane.pool.spawn.ForkerProcess` is for endpoints.

    For the pool's thread, whose end is theirs. `dispatcher` may be set by any thread.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self.loaded_s: float | None = 0.0
        self.dispatcher = ""
        """Where it listens; empty: not known yet."""
        self._options = options
        self._poller = select.epoll()
        self._running: dict[int, _Server] = {}
        """By the descriptor of their sockets."""
        self._ports: dict[int, int] = {}
        self._journal: Path | None = None
        self._stack = contextlib.ExitStack()
        self._end_by_s: float | None = None
        """When what still runs is killed, monotonic; None: nothing was told to end."""
        self._is_last_told = False

    def fileno(self) -> int:
        """Return the descriptor to select for events."""
        return self._poller.fileno()

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Start one server that prints to ``output``.

        Raises:
            ConfigError: The folder for the journal cannot be made.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        is_worker = _kind(self._options, index) == TF_WORKER
        dispatcher = self.dispatcher if is_worker else ""
        with theirs:
            process = start_child(
                [sys.executable, "-m", "hetero.dataplane.pool.tf_server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=_environment(self._options),
                start_new_session=True,  # supervisors signal whole groups: the launcher ends servers after the ranks
            )
        self._running[ours.fileno()] = _Server(
            index=index, incarnation=incarnation, dispatcher=dispatcher, process=process, socket=ours
        )
        self._poller.register(ours, select.EPOLLIN)
        configuration = {
            "index": index,
            "incarnation": incarnation,
            "port": self._ports.get(index, 0),
            "dispatcher": dispatcher,
            "worker_address": join_address(self._options.address, _ANY_PORT),
            "worker_addresses": [
                [join_address(address, _ANY_PORT), number]
                for host, number in self._options.workers.items()
                if (address := self._options.address_of(host)) is not None
            ],
            "worker_tags": [_TRAINER_TAG] if self._options.is_trainer else [],
            "work_dir": None if is_worker else self._work_dir(),
            "worker_timeout_s": self._options.stuck_s,
            "parent_pid": os.getpid(),
        }
        with contextlib.suppress(OSError):  # it has ended, which its socket tells
            ours.send(json.dumps(configuration).encode())

    def end_strays(self) -> None:
        """Kill workers of a dispatcher that listens elsewhere by now; the pool starts them again."""
        for server in self._running.values():
            if server.dispatcher and server.dispatcher != self.dispatcher:
                server.process.kill()

    def stop(self, grace_s: float) -> None:
        """Have the workers end within the grace, then the dispatcher; `poll` goes on with it."""
        self._end_by_s = time.monotonic() + grace_s
        self._tell(TF_WORKER)

    def events(self) -> Iterator[dict[str, Any] | None]:
        """Yield what has arrived."""
        for descriptor, _ in self._poller.poll(0):
            server = self._running[descriptor]
            while (packet := _receive(server.socket)) is not None:
                if not packet:
                    yield self._ended(server)
                    break
                event = json.loads(packet)
                if event["event"] == "ready":
                    server.is_ready = True
                    self._ports[server.index] = event["port"]
                yield event

    def poll(self) -> int | None:
        """Return 0 once all were told to end and have; None before."""
        if self._end_by_s is None:
            return None
        has_workers = any(_kind(self._options, server.index) == TF_WORKER for server in self._running.values())
        if self._running and time.monotonic() >= self._end_by_s:
            for server in self._running.values():
                server.process.kill()
        elif self._running and not has_workers and not self._is_last_told:
            self._is_last_told = True
            self._end_by_s = max(self._end_by_s, time.monotonic() + _DISPATCHER_S)
            self._tell(TF_DISPATCHER)
        return None if self._running else 0

    def end(self) -> None:
        """Kill what lives, and remove the journal."""
        for server in list(self._running.values()):
            server.process.kill()
            self._ended(server)
        self._poller.close()
        self._stack.close()

    def _tell(self, kind: str) -> None:
        for server in self._running.values():
            if _kind(self._options, server.index) != kind:
                continue
            if not server.is_ready:  # it may import TensorFlow for seconds yet, and has nothing to finish
                server.process.kill()
            with contextlib.suppress(OSError):
                server.socket.shutdown(socket.SHUT_WR)

    def _ended(self, server: _Server) -> dict[str, Any]:
        """Take leave of a process whose socket has ended; return the event."""
        self._poller.unregister(server.socket)
        del self._running[server.socket.fileno()]
        server.socket.close()
        try:
            status = server.process.wait(_LAST_BREATH_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            status = server.process.wait()
        return {"event": "exited", "index": server.index, "incarnation": server.incarnation, "status": status}

    def _work_dir(self) -> str | None:
        """Return the folder of the dispatcher's journal, made at its first start, so that no earlier job's is read."""
        if self._options.work_dir is None:
            return None
        if self._journal is None:
            try:
                Path(self._options.work_dir).mkdir(parents=True, exist_ok=True)
                # Private, as what is in it is run by the workers. By the name of this machine: others that share the
                # file system may not share its locks, which tell whose owner was killed.
                folder = private_folder(f"tf-dispatcher-{socket.gethostname()}-", parent=self._options.work_dir)
                self._journal = self._stack.enter_context(folder)
            except (ConfigError, OSError) as error:
                raise ConfigError(
                    f"the dispatcher of tf.data.service cannot have a journal in {self._options.work_dir!r}: "
                    f"{str(error).splitlines()[0]}; give --tf-work-dir a folder that this user may write to, on a file "
                    "system that can keep things to one user"
                ) from error
        return str(self._journal)


def _receive(source: socket.socket) -> bytes | None:
    """Return the next packet, empty at the end, None if there is none yet."""
    try:
        return source.recv(_MAX_EVENT_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""


def _environment(options: ServiceOptions) -> dict[str, str]:
    """Return the processes' environment: accelerators are the ranks'."""
    environment = child_environment(options)
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if options.log_level == "DEBUG" else "1")
    return environment
