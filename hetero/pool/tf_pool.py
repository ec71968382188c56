"""Starts, watches and restarts a host's servers of tf.data.service (dispatcher, workers), and stops them in order.

This module runs in the launcher and does not import TensorFlow. Each server is a separate process
(`hetero.pool.tf_server`). The rest of the launcher treats the servers as endpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero.control.members.directory import TF_DISPATCHER, TF_WORKER, EndpointRecord
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.pool.packets import receive_packet
from hetero.pool.pool import EndpointPool, PoolOptions
from hetero.pool.slot import Slot
from hetero.pool.spawn import ProcessStarter, child_environment, start_module
from hetero.system.waits import END_TIMEOUT_S
from hetero.system.workdir import private_folder
from hetero.wire.channels import join_address

__all__ = ["ServiceOptions", "ServicePool"]

_ANY_PORT = "%port%"
"""Placeholder for a port. TensorFlow writes a worker's port there. In a list of planned workers it matches any port."""
_TRAINER_TAG = "COLOCATED"
"""TensorFlow's tag for workers on trainer hosts. Readers with ``target_workers="AUTO"`` skip them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions(PoolOptions):
    """The settings of one host's pool of servers.

    The servers use only these fields of ``endpoint``: the host, its address, the number of servers including the
    dispatcher, and the log level. The ranks send the workers what to compute, as a graph.
    """

    has_dispatcher: bool = False
    """Whether the dispatcher runs on this host."""
    is_trainer: bool = False
    """Whether the workers share this host with ranks. Then they serve only datasets with ``placement="any"``."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Planned number of workers by host name, for the dispatcher. Static sharding is refused without it."""
    address_of: Callable[[str], str | None] = lambda _: None
    """Returns a host's address, None if it is not known yet. The dispatcher starts once all addresses are known. Called
    by any thread."""
    work_dir: str | None = None
    """Folder for the dispatcher's journal. A restarted dispatcher reads it and continues. None for no journal."""


class ServicePool(EndpointPool):
    """Keeps this host's dispatcher and workers alive. Thread-safe context manager.

    If the dispatcher runs on this host, it is the first server. If not, `follow` is called with its address. Workers
    start once the dispatcher's address is known. A restarted server gets its old port, so its clients find it again.

    Args:
        options: The pool's settings.
        on_change: Called from the pool's thread with the servers that serve, whenever they change.
        on_line: Called from the pool's thread with a process's name and a line that the process printed.
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
        """Return this host's counters under the names that the report uses."""
        restarts = dict.fromkeys((TF_DISPATCHER, TF_WORKER), 0)
        for slot in self._slots:
            # The first start of a slot is no restart, and a slot may not have been started yet.
            restarts[self._kind(slot.index)] += max(0, slot.num_starts - 1)
        return {
            "tf.data dispatcher restarts": restarts[TF_DISPATCHER],
            "tf.data worker restarts": restarts[TF_WORKER],
            "stuck endpoints": self.num_stuck,
        }

    def describe(self) -> str:
        """Return what this host serves once it is ready, for example ``2 workers of tf.data.service``."""
        words = ["a dispatcher"] if self._service.has_dispatcher else []
        # Only the dispatcher's host knows the planned workers, because the dispatcher waits for their addresses. So if
        # an address is missing, this host has the dispatcher, and `words` begins with it.
        if hosts := self._hosts_without_address():
            words[0] += f" (once the address of {', '.join(hosts)} is known)"
        num_workers = self._service.endpoint.num_endpoints - self._service.has_dispatcher
        if num_workers:
            words.append(counted(num_workers, "worker"))
        return f"{' and '.join(words)} of tf.data.service"

    def follow(self, records: Sequence[EndpointRecord]) -> None:
        """Record the dispatcher's address if it is among these records."""
        address = next((record.address for record in records if record.kind == TF_DISPATCHER), "")
        if address and address != self._servers.dispatcher:
            self._servers.dispatcher = address
            self._wake()

    def _name_on_host(self, index: int) -> str:
        kind = self._kind(index)
        # Workers are numbered from 0, also after a dispatcher, which has the first slot.
        return kind if kind == TF_DISPATCHER else f"{kind}-{index - self._service.has_dispatcher}"

    def _kind(self, index: int) -> str:
        return _kind(self._service, index)

    def _hosts_without_address(self) -> list[str]:
        """Return the hosts of planned workers whose addresses are not known yet. Empty without a dispatcher here."""
        return [host for host in self._service.workers if self._service.address_of(host) is None]

    # The pool's thread

    def _make_starter(self, output: int) -> ProcessStarter:
        return self._servers

    def _may_start(self, slot: Slot) -> bool:
        # A dispatcher needs the addresses of all workers, and a worker the address of the dispatcher.
        is_dispatcher = self._kind(slot.index) == TF_DISPATCHER
        return not self._hosts_without_address() if is_dispatcher else bool(self._servers.dispatcher)

    def _start_what_is_due(self) -> None:
        self._servers.end_strays()
        super()._start_what_is_due()

    def _publish(self) -> None:
        """Report the servers that serve now, if they have changed."""
        for slot in self._slots:
            # With a journal, a restarted dispatcher continues, so it counts as the same incarnation.
            if slot.record is not None and slot.record.kind == TF_DISPATCHER and self._service.work_dir is not None:
                slot.record = dataclasses.replace(slot.record, incarnation=f"{self._launch}-journal")
        super()._publish()

    def _on_ready(self, slot: Slot, pid: int, port: int) -> None:
        super()._on_ready(slot, pid, port)
        if slot.record is not None:
            self.follow([slot.record])


def _kind(options: ServiceOptions, index: int) -> str:
    """Return the kind of the server in a slot. The dispatcher has the first slot."""
    return TF_DISPATCHER if options.has_dispatcher and index == 0 else TF_WORKER


@dataclass(slots=True, kw_only=True)
class _Server:
    """One server process."""

    index: int
    incarnation: str
    dispatcher: str
    """Address of a worker's dispatcher, empty for a dispatcher."""
    process: subprocess.Popen[bytes]
    socket: socket.socket
    """Packet socket to the process. To end the process, the pool shuts the socket down."""
    is_ready: bool = False


class _Servers:
    """Starts and ends the server processes, as `hetero.pool.spawn.ForkServer` does for endpoints.

    For use by the pool's thread, because the processes end with that thread. Any thread may set `dispatcher`.
    """

    def __init__(self, options: ServiceOptions) -> None:
        self.loaded_s: float | None = 0.0
        """As in `ForkServer`. Here nothing has to be imported first, so servers can start at once."""
        self.dispatcher = ""
        """The dispatcher's address, empty if not known yet."""
        self._options = options
        self._poller = select.epoll()
        self._running: dict[int, _Server] = {}
        """Processes by the descriptor of their sockets."""
        self._ports: dict[int, int] = {}
        """Port of each server by its index. A restarted server gets its old port."""
        self._journal: Path | None = None
        """Folder of the dispatcher's journal. None before the dispatcher's first start, and without a journal."""
        # Removes the journal in `end`.
        self._stack = contextlib.ExitStack()
        self._end_by_s: float | None = None
        """Monotonic time when the remaining processes are killed, None before `stop`."""
        self._has_asked_dispatcher = False
        """Whether the dispatcher was asked to end, which is done after all workers have ended."""

    def fileno(self) -> int:
        """Return the descriptor to select for events."""
        return self._poller.fileno()

    def start_endpoint(self, index: int, incarnation: str, output: int) -> None:
        """Start one server that prints to ``output``.

        Raises:
            ConfigError: The folder for the journal cannot be made.
        """
        is_worker = _kind(self._options, index) == TF_WORKER
        dispatcher = self.dispatcher if is_worker else ""
        ours, process = start_module("hetero.pool.tf_server", output, _environment(self._options))
        self._running[ours.fileno()] = _Server(
            index=index, incarnation=incarnation, dispatcher=dispatcher, process=process, socket=ours
        )
        self._poller.register(ours, select.EPOLLIN)
        # The first packet on the socket is the configuration.
        configuration = {
            "index": index,
            "incarnation": incarnation,
            # A restarted server gets its old port, where its clients look for it. At the first start, 0 selects a free
            # port.
            "port": self._ports.get(index, 0),
            "dispatcher": dispatcher,
            "worker_address": join_address(self._options.endpoint.address, _ANY_PORT),
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
        # If the process has already ended, ignore the error, because its socket will report the end.
        with contextlib.suppress(OSError):
            ours.send(json.dumps(configuration).encode())

    def end_endpoint(self, incarnation: str) -> None:
        """Ask one server to end."""
        for server in self._running.values():
            if server.incarnation == incarnation:
                # A server ends when the pool closes its side for sending. The pool still reads its last events.
                with contextlib.suppress(OSError):
                    server.socket.shutdown(socket.SHUT_WR)

    def end_strays(self) -> None:
        """Kill workers that have an old address of the dispatcher. The pool starts them again."""
        for server in self._running.values():
            if server.dispatcher and server.dispatcher != self.dispatcher:
                server.process.kill()

    def stop(self, grace_s: float) -> None:
        """Ask the workers to end within the grace. `poll` then ends the dispatcher."""
        self._end_by_s = time.monotonic() + grace_s
        self._ask_to_end(TF_WORKER)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events that have arrived."""
        for descriptor, _ in self._poller.poll(0):
            server = self._running[descriptor]
            while (packet := receive_packet(server.socket)) is not None:
                event, _ = packet
                # The process has closed its socket, because it ends.
                if event["event"] == "gone":
                    yield self._ended(server)
                    break
                if event["event"] == "ready":
                    server.is_ready = True
                    self._ports[server.index] = event["port"]
                yield event

    def poll(self) -> int | None:
        """Return 0 once all processes were asked to end and have ended, None before."""
        if self._end_by_s is None:
            return None
        has_workers = any(_kind(self._options, server.index) == TF_WORKER for server in self._running.values())
        if time.monotonic() >= self._end_by_s:
            for server in self._running.values():
                server.process.kill()
        # Ask the dispatcher after the last worker has ended, because the workers need the dispatcher until then.
        elif not has_workers and not self._has_asked_dispatcher:
            self._has_asked_dispatcher = True
            # The workers may have used up the grace, so give the dispatcher its own time.
            self._end_by_s = max(self._end_by_s, time.monotonic() + END_TIMEOUT_S)
            self._ask_to_end(TF_DISPATCHER)
        return None if self._running else 0

    def end(self) -> None:
        """Kill the processes that live, and remove the journal."""
        for server in list(self._running.values()):
            server.process.kill()
            self._ended(server)
        self._poller.close()
        self._stack.close()

    def _ask_to_end(self, kind: str) -> None:
        """Ask the servers of one kind to end. Kill those that are not ready."""
        for server in self._running.values():
            if _kind(self._options, server.index) != kind:
                continue
            # A server that is not ready has no work to finish, and may need seconds to import TensorFlow.
            if not server.is_ready:
                server.process.kill()
            # As in `end_endpoint`.
            with contextlib.suppress(OSError):
                server.socket.shutdown(socket.SHUT_WR)

    def _ended(self, server: _Server) -> dict[str, Any]:
        """Close the socket of a process that is about to end, and reap the process. Return its ``exited`` event."""
        self._poller.unregister(server.socket)
        del self._running[server.socket.fileno()]
        server.socket.close()
        # The process has closed its end of the socket. If it does not end soon, kill it.
        try:
            status = server.process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            status = server.process.wait()
        return {"event": "exited", "index": server.index, "incarnation": server.incarnation, "status": status}

    def _work_dir(self) -> str | None:
        """Return the folder of the dispatcher's journal.

        The folder is new at the dispatcher's first start, because the dispatcher must not read an earlier job's
        journal.
        """
        if self._options.work_dir is None:
            return None
        if self._journal is None:
            try:
                Path(self._options.work_dir).mkdir(parents=True, exist_ok=True)
                # The folder is private, because the workers run the graphs that are in it. Its name contains this
                # machine's name for another reason: `private_folder` removes unlocked folders of the same name, and
                # machines that share a file system may not see each other's locks.
                folder = private_folder(f"tf-dispatcher-{socket.gethostname()}-", parent=self._options.work_dir)
                self._journal = self._stack.enter_context(folder)
            except (ConfigError, OSError) as error:
                raise ConfigError(
                    f"cannot make a journal for the dispatcher of tf.data.service in {self._options.work_dir!r}: "
                    f"{str(error).splitlines()[0]}; give --tf-work-dir a folder that this user can write to, on a file "
                    "system with file permissions"
                ) from error
        return str(self._journal)


def _environment(options: ServiceOptions) -> dict[str, str]:
    """Return the processes' environment. It hides accelerators, because they belong to the ranks."""
    environment = child_environment(options)
    environment["CUDA_VISIBLE_DEVICES"] = "-1"
    # With 1, TensorFlow does not log its lines of level INFO.
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if options.endpoint.log_level == "DEBUG" else "1")
    return environment
