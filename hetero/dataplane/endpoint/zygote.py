"""A zygote: a process that builds one data set, and then forks endpoints that have it.

The fork server or another zygote forks it (`hetero.dataplane.endpoint.shared_builds`). It has the data sets of the
process that forked it, too. It ends with that process, and its endpoints end with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero.batches.purity.globals import GlobalsReader
from hetero.dataplane.endpoint.endpoint import run_endpoint
from hetero.dataplane.endpoint.options import EndpointOptions
from hetero.dataplane.endpoint.packets import receive_packet
from hetero.dataplane.endpoint.prebuilt import Prebuilt
from hetero.dataplane.endpoint.processes import run_forked, why_not_fork
from hetero.datasets import get_factory, prebuild
from hetero.errors import ExitCode, HeteroError, first_line
from hetero.spec import DatasetSpec
from hetero.system.memory import prepare_to_fork
from hetero.system.open_files import mapped_files, open_files
from hetero.system.process import SignalWaiter, limit_threads
from hetero.system.stop_signals import children_ignore_platform, ignore_platform
from hetero.system.text import first_names

__all__ = ["ZygoteProcess"]

_IDLE_S = 5.0

logger = logging.getLogger(__name__)


class ZygoteProcess:
    """What a zygote does.

    Args:
        base: The settings of endpoints.
        pool: The socket to the pool, for the endpoints.
        server: The socket to the fork server.
        prebuilt: The data sets of the process that has forked this one.
    """

    def __init__(
        self,
        base: EndpointOptions,
        pool: socket.socket,
        server: socket.socket,
        prebuilt: Mapping[DatasetSpec, Prebuilt],
    ) -> None:
        self._base = base
        self._pool = pool
        self._server = server
        self._prebuilt = dict(prebuilt)
        self._children: set[int] = set()

    def run(self, spec: DatasetSpec) -> int:
        """Build a data set, and execute commands until the fork server is gone. Return the exit status."""
        ignore_platform()
        # A process that the factory starts must not keep this socket open: its end says that this process has ended.
        os.register_at_fork(after_in_child=self._server.close)
        why = self._build(spec)
        self._tell(event="built", why=why)
        if why:
            return int(ExitCode.OK)
        with SignalWaiter((signal.SIGCHLD,)) as signals:
            while True:
                signals.wait(_IDLE_S, descriptors=(self._server.fileno(),))
                self._reap()
                packet = receive_packet(self._server)
                if packet is None:
                    continue
                command, descriptors = packet
                if command.get("command") not in ("endpoint", "zygote"):
                    return int(ExitCode.OK)
                self._fork(command, descriptors[0], signals)

    def _build(self, spec: DatasetSpec) -> str:
        """Build a data set. Return why endpoints must not be forked then, empty if they may be."""
        begin_s = time.monotonic()
        limit_threads()
        files, maps, num_threads = open_files(), _shared_maps(), _num_threads()
        try:
            digests = GlobalsReader(get_factory(spec.name)).digests()
            self._prebuilt[spec] = Prebuilt(prebuild(spec, host=self._base.host), digests)
        except BaseException as error:  # noqa: BLE001 - each endpoint tries by itself, and reports the error
            text = first_line(error) if isinstance(error, HeteroError) else repr(error)
            return f"building it failed: {text[:200]}"
        limit_threads()  # the factory may have imported torch or OpenCV just now
        if made := _shared_maps() - maps:
            return f"building it made memory that processes share ({first_names(made)})"
        if why := why_not_fork(files, "building it"):
            return why
        if _num_threads() > num_threads:
            return "building it started threads"
        prepare_to_fork()
        logger.info("built data set %s once for all endpoints in %.1f s", spec, time.monotonic() - begin_s)
        return ""

    def _fork(self, command: Mapping[str, Any], passed: int, signals: SignalWaiter) -> None:
        """Fork an endpoint or a zygote. ``passed`` is the output of the one, or the socket of the other."""
        own_pid = os.getpid()
        try:
            with children_ignore_platform():
                pid = os.fork()
        except OSError as error:
            os.close(passed)
            logger.error("cannot start a process: %s", error)
            self._tell(event="failed", incarnation=command.get("incarnation", ""))
            return
        if not pid:

            def run() -> int:
                return (
                    self._run_endpoint(command, passed)
                    if "incarnation" in command
                    else self._run_zygote(command, passed)
                )

            run_forked(run, own_pid, signals)
        os.close(passed)
        self._children.add(pid)
        self._tell(event="forked", pid=pid, incarnation=command.get("incarnation", ""))

    def _run_endpoint(self, command: Mapping[str, Any], output: int) -> int:
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.close(output)
        options = dataclasses.replace(self._base, index=command["index"], incarnation=command["incarnation"])
        return run_endpoint(options, self._pool, prebuilt=self._prebuilt, port=command["port"])

    def _run_zygote(self, command: Mapping[str, Any], channel: int) -> int:
        with socket.socket(fileno=channel) as server:
            process = ZygoteProcess(self._base, self._pool, server, self._prebuilt)
            return process.run(DatasetSpec(command["name"], command["arguments"]))

    def _reap(self) -> None:
        for pid in list(self._children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._children.discard(pid)
                self._tell(event="ended", pid=pid, status=os.waitstatus_to_exitcode(status))

    def _tell(self, **event: object) -> None:
        with contextlib.suppress(OSError):
            self._server.send(json.dumps(event).encode())


def _shared_maps() -> Counter[str]:
    """Return the memory of this process that it can write to and that forked processes would share."""
    return Counter(f"shared memory ({name})" for name, is_shared in mapped_files() if is_shared)


def _num_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())  # includes those of native libraries
