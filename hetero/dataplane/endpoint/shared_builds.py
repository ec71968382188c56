"""The fork server's side of data sets that are built once for all endpoints of a host.

    fork server --forks--> endpoint: gets the first Prepare, and asks the fork server for the data set
    fork server --forks--> zygote: builds the data set
    zygote      --forks--> zygote: builds another data set that is known by then, if that does not take much longer
    zygote      --forks--> endpoint with the data sets. It takes the place of the first one, with its name and port.

Forked processes share the memory of a data set that they only read. Objects of Python are written to even when they are
read, because their counters of references lie beside them. Large arrays stay shared.

A data set that opens files or connections while it is built, or starts threads, does not survive a fork: the processes
would share the position in a file, for example. Then each endpoint builds its own, as it does if the zygote fails. A
zygote builds one data set, so what one of them does to its process does not affect the others.
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
    """The process whose place it takes. None for an endpoint that the pool starts."""


class HostBuilds:
    """The data sets that are built for all endpoints of this host. For use by the fork server's only thread.

    Args:
        base: The settings of endpoints.
        pool: The socket to the pool.
        signals: The fork server's waiter.
    """

    def __init__(self, base: EndpointOptions, pool: socket.socket, signals: SignalWaiter) -> None:
        self._base = base
        self._pool = pool
        self._signals = signals
        self._ready: _Zygote | None = None
        """The zygote that forks endpoints."""
        self._older: list[_Zygote] = []
        """Zygotes that it comes from."""
        self._building: _Zygote | None = None
        self._queue: list[DatasetSpec] = []
        self._refused: dict[DatasetSpec, str] = {}
        """Data sets that each endpoint has to build, with the reason."""
        self._extra_until_s = 0.0
        """When endpoints get what is ready, although other data sets are not."""
        self._is_closed = False
        """Whether endpoints have been forked, so that further data sets come too late."""
        self._num_lost = 0
        self._waiting: list[_Question] = []
        self._pending: dict[str, _Pending] = {}
        """The endpoints that a zygote was asked to fork, by incarnation."""
        self._leaving: dict[EndpointProcess, float] = {}
        """Processes that have to give way, and when they are killed if they do not."""
        self._unwanted: set[str] = set()
        self._is_stopping = False

    @property
    def may_share(self) -> bool:
        """Whether endpoints may ask for data sets. A single one need not."""
        return self._base.num_endpoints > 1 and self._num_lost <= _MAX_LOST

    @property
    def is_busy(self) -> bool:
        """Whether `tick` has to be called several times a second."""
        return bool(self._building or self._pending or self._leaving or self._waiting)

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors to wait for."""
        return tuple(zygote.channel.fileno() for zygote in self._zygotes())

    def pids(self) -> list[int]:
        """Return the ids of the zygotes' processes."""
        return [zygote.pid for zygote in self._zygotes() if zygote.pid]

    def inherited(self) -> list[socket.socket]:
        """Return the sockets that forked processes have to close."""
        return [zygote.channel for zygote in self._zygotes()]

    # Endpoints

    def announced(self, question: dict[str, Any]) -> DatasetSpec:
        """Note that endpoints will ask for a data set. Return its spec."""
        spec = DatasetSpec(question["name"], question["arguments"])
        if self._is_stopping or spec in self._refused or self._has(spec) or spec in self._queue:
            return spec
        if self._building is not None and self._building.spec == spec:
            return spec
        if self._is_closed:
            self._refuse(spec, "the endpoints were forked before it was asked for")
        elif not self.may_share:
            self._refuse(spec, "the processes that build data sets were lost")
        else:
            self._queue.append(spec)
            self._build_next()
        return spec

    def asked(self, child: EndpointProcess, question: dict[str, Any], output: int) -> None:
        """Handle the question of an endpoint for a data set."""
        self._waiting.append(_Question(self.announced(question), child, question["port"], output))
        self._answer()

    def left(self, child: EndpointProcess) -> None:
        """Forget an endpoint that has ended, or whose channel is closed."""
        self._leaving.pop(child, None)
        for question in [each for each in self._waiting if each.child is child]:
            self._waiting.remove(question)
            os.close(question.output)

    def start(self, index: int, incarnation: str, output: int) -> bool:
        """Let a zygote start an endpoint. Return whether it will."""
        if self._ready is None or not self._is_closed or self._is_stopping:
            return False
        return self._fork(self._ready, _Pending(index), incarnation, 0, output)

    def forget(self, incarnation: str) -> None:
        """End an endpoint that a zygote is about to fork."""
        if incarnation in self._pending:
            self._unwanted.add(incarnation)

    # Events

    def events(self, children: list[EndpointProcess]) -> Iterator[EndpointProcess | Ended]:
        """Handle what zygotes report. Yield new processes of endpoints, and the ends of such."""
        for zygote in self._zygotes():
            while zygote in self._zygotes() and (packet := receive_packet(zygote.channel)) is not None:
                yield from self._handle(zygote, packet[0], children)
        yield from self._reap(children)
        self._tick()

    def _handle(
        self, zygote: _Zygote, event: dict[str, Any], children: list[EndpointProcess]
    ) -> Iterator[EndpointProcess | Ended]:
        kind = event["event"]
        if kind == "built":
            self._built(zygote, event["why"])
        elif kind == "forked" and event["incarnation"]:
            yield from self._forked(event["incarnation"], event["pid"])
        elif kind == "forked":
            if self._building is not None:
                self._building.pid = event["pid"]
        elif kind == "failed":
            yield from self._failed(event["incarnation"])
        elif kind == "ended":
            yield from self._ended(event["pid"], event["status"], children)
        elif kind == "gone":
            explanation = "has ended"
            if zygote.is_child:
                zygote.is_child = False
                explanation = describe_exit_status(os.waitstatus_to_exitcode(os.waitpid(zygote.pid, 0)[1]))
            yield from self._lost(zygote, explanation, children)

    def _forked(self, incarnation: str, pid: int) -> Iterator[EndpointProcess]:
        pending = self._pending.pop(incarnation, None)
        if pending is None:
            return
        if incarnation in self._unwanted or self._is_stopping:
            self._unwanted.discard(incarnation)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, end_signal())
        yield EndpointProcess(pending.index, incarnation, pid, is_of_zygote=True)

    def _failed(self, incarnation: str) -> Iterator[Ended]:
        """Handle that a process could not be forked."""
        if not incarnation:
            if self._building is not None:
                self._give_up_build("the process that builds it cannot be started")
            return
        pending = self._pending.pop(incarnation, None)
        if pending is not None:
            yield Ended(index=pending.index, incarnation=incarnation, status=-signal.SIGKILL)

    def _ended(self, pid: int, status: int, children: list[EndpointProcess]) -> Iterator[Ended]:
        """Handle the end of a process that a zygote has forked."""
        for zygote in self._zygotes():
            if zygote.pid == pid:
                yield from self._lost(zygote, describe_exit_status(status), children)
                return
        for child in children:
            if child.is_of_zygote and child.pid == pid:
                yield Ended(index=child.index, incarnation=child.incarnation, status=status)
                return

    def _reap(self, children: list[EndpointProcess]) -> Iterator[Ended]:
        for zygote in self._zygotes():
            if zygote.is_child:
                pid, status = os.waitpid(zygote.pid, os.WNOHANG)
                if pid:
                    zygote.is_child = False
                    explanation = describe_exit_status(os.waitstatus_to_exitcode(status))
                    yield from self._lost(zygote, explanation, children)

    def _lost(self, zygote: _Zygote, explanation: str, children: list[EndpointProcess]) -> Iterator[Ended]:
        """Handle the end of a zygote. The processes that it has forked have ended with it."""
        if zygote is self._building:
            self._give_up_build(f"the process that builds it {explanation}")
            return
        if zygote is not self._ready and zygote not in self._older:
            return  # it has refused its data set, and was expected to end
        if not self._is_stopping:
            logger.warning("the process that has built data sets for all endpoints %s", explanation)
        self._num_lost += 1
        if self._building is not None:
            self._give_up_build(f"the process that builds it {explanation}")
        ended = [(child.index, child.incarnation) for child in children if child.is_of_zygote]
        ended += [(pending.index, incarnation) for incarnation, pending in self._pending.items()]
        self._pending.clear()
        self._close_all()
        self._is_closed = False
        for number, (index, incarnation) in enumerate(ended):
            yield Ended(index=index, incarnation=incarnation, status=-signal.SIGKILL, is_charged=not number)
        self._answer()

    # Builds

    def _build_next(self) -> None:
        """Let a new zygote build the next data set."""
        if self._building is not None or not self._queue or self._is_closed or self._is_stopping:
            return
        spec = self._queue.pop(0)
        ours, theirs = make_channel()
        parent = self._ready
        specs = frozenset({spec}) if parent is None else parent.specs | {spec}
        zygote = _Zygote(ours, spec, specs, time.monotonic())
        command = {"command": "zygote", "name": spec.name, "arguments": spec.arguments_json}
        with theirs:
            is_started = parent.send(command, theirs.fileno()) if parent else self._fork_first(zygote, theirs)
        if is_started:
            self._building = zygote
        else:
            ours.close()
            self._refuse(spec, "the process that builds it cannot be started")
            self._build_next()

    def _fork_first(self, zygote: _Zygote, theirs: socket.socket) -> bool:
        server_pid = os.getpid()
        try:
            with children_ignore_platform():
                pid = os.fork()
        except OSError as error:
            logger.error("cannot start a process: %s", error)
            return False
        if not pid:
            zygote.channel.close()
            for question in self._waiting:
                os.close(question.output)
                question.child.close()
            run = ZygoteProcess(self._base, self._pool, theirs, {})
            run_forked(lambda: run.run(zygote.spec), server_pid, self._signals)
        zygote.pid, zygote.is_child = pid, True
        return True

    def _built(self, zygote: _Zygote, why: str) -> None:
        if zygote is not self._building:
            return
        now_s = time.monotonic()
        if why:
            self._give_up_build(why)
            return
        self._building = None
        if self._ready is None:
            self._extra_until_s = now_s + max(_LEAST_EXTRA_S, now_s - zygote.began_s)
        else:
            self._older.append(self._ready)
        self._ready = zygote
        self._build_next()
        self._answer()

    def _give_up_build(self, why: str) -> None:
        """Let each endpoint build the data set that is being built, and go on with the next one."""
        zygote, self._building = self._building, None
        assert zygote is not None
        zygote.kill()
        if zygote.is_child:
            os.waitpid(zygote.pid, 0)
        zygote.channel.close()
        self._refuse(zygote.spec, why)
        self._build_next()
        self._answer()

    def _refuse(self, spec: DatasetSpec, why: str) -> None:
        self._refused[spec] = why
        logger.info(
            "each endpoint builds its own data set %s, because %s. To skip the attempt to build it once, write "
            "@hetero.dataset(fork_built=False)",
            spec,
            why,
        )

    def _tick(self) -> None:
        """End builds and processes that take too long."""
        now_s = time.monotonic()
        zygote = self._building
        if zygote is not None and self._ready is not None and now_s > self._extra_until_s:
            self._give_up_build("the endpoints did not wait for it: another data set was ready first")
        elif zygote is not None and now_s > zygote.began_s + self._base.prepare_timeout_s:
            if zygote.dumped_s is None:
                zygote.dumped_s = now_s
                with contextlib.suppress(ProcessLookupError):
                    os.kill(zygote.pid, signal.SIGUSR1)
            elif now_s > zygote.dumped_s + _DUMP_S:
                self._give_up_build(f"building it took longer than {self._base.prepare_timeout_s:g} s")
        for child, until_s in self._leaving.items():
            if now_s > until_s:
                child.signal(signal.SIGKILL)

    def _answer(self) -> None:
        """Answer the endpoints whose data set is built, or has to be built by themselves."""
        for question in list(self._waiting):
            if why := self._refused.get(question.spec, ""):
                self._send(question, why)
            elif self._has(question.spec) and self._building is None and not self._queue:
                self._move(question)

    def _send(self, question: _Question, why: str) -> bool:
        """Send an answer. Return whether the endpoint can receive it."""
        self._waiting.remove(question)
        try:
            if question.child.channel is None:
                return False
            question.child.channel.send(json.dumps({"why": why}).encode(), socket.MSG_DONTWAIT)
        except OSError:
            return False
        finally:
            if why:
                os.close(question.output)
        return True

    def _move(self, question: _Question) -> None:
        """Let a process that has the data set take the place of an endpoint."""
        assert self._ready is not None
        self._is_closed = True
        child = question.child
        if self._send(question, ""):
            pending = _Pending(child.index, child)
            if self._fork(self._ready, pending, child.incarnation, question.port, question.output):
                child.is_replaced = True
                self._leaving[child] = time.monotonic() + _LEAVE_S
        os.close(question.output)

    def _fork(self, zygote: _Zygote, pending: _Pending, incarnation: str, port: int, output: int) -> bool:
        command = {"command": "endpoint", "index": pending.index, "incarnation": incarnation, "port": port}
        if not zygote.send(command, output):
            return False
        self._pending[incarnation] = pending
        return True

    def _has(self, spec: DatasetSpec) -> bool:
        return self._ready is not None and spec in self._ready.specs

    def _zygotes(self) -> list[_Zygote]:
        return [each for each in (*self._older, self._ready, self._building) if each is not None]

    # The end

    def stop(self) -> None:
        """Start no more endpoints. End a build that is in progress."""
        self._is_stopping = True
        self._queue.clear()
        if self._building is not None:
            self._building.kill()

    def kill(self) -> None:
        """Kill all zygotes and their endpoints. Events follow."""
        for zygote in self._zygotes():
            zygote.kill()

    def end(self) -> None:
        """End all zygotes."""
        self.kill()
        self._close_all()

    def _close_all(self) -> None:
        for zygote in self._zygotes():
            zygote.kill()
            if zygote.is_child:
                os.waitpid(zygote.pid, 0)
            zygote.channel.close()
        self._older.clear()
        self._ready = self._building = None
