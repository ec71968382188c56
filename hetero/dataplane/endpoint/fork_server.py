"""The fork server: one process per data host that imports the script once and forks endpoints.

Forked endpoints share the memory of the script and its libraries, and start in milliseconds. The fork server itself
makes no gRPC channel, CUDA context or TensorFlow runtime. If the script's import started threads, imported TensorFlow
or initialised CUDA, endpoints start as fresh processes instead.

`hetero.dataplane.pool.pool` runs it as ``python -m hetero.dataplane.endpoint.fork_server FD``. FD is the descriptor of
a packet socket. The first packet is the configuration, the others are commands. The fork server and the endpoints send
events back. The fork server ends with the pool, and the endpoints with the fork server (parent-death signals).
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from hetero.dataplane.endpoint.endpoint import (
    configure_process,
    exit_process,
    report_failure,
    run_endpoint,
    send_event,
)
from hetero.dataplane.endpoint.options import EndpointOptions
from hetero.dataplane.endpoint.script import load_script
from hetero.errors import ExitCode, HeteroError
from hetero.system.memory import keep_freed_memory
from hetero.system.process import SignalWaiter, die_with_parent, open_files
from hetero.system.stop_signals import children_ignore_platform, end_signal, ignore_platform

__all__ = ["MAX_PACKET_BYTES", "main", "why_not_fork"]

MAX_PACKET_BYTES = 128 * 1024
"""Largest size of a command or event. The kernel's limit for one packet is higher."""

_IDLE_S = 5.0
_DESCRIPTOR = struct.Struct("i")

logger = logging.getLogger(__name__)


class _Child:
    """One endpoint process, forked or fresh."""

    def __init__(self, index: int, incarnation: str, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        self.index = index
        self.incarnation = incarnation
        self.pid = pid
        self._process = process  # None if forked. Only this object may reap a fresh process

    def poll(self) -> int | None:
        """Return the exit status as `subprocess` does (-N for signal N), None while the process lives."""
        if self._process is not None:
            return self._process.poll()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


class _ForkServer:
    """Executes the commands of the pool.

    Args:
        pool: The socket to the pool.
        base: The settings of endpoints.
        signals: Waits for the end signal and for the end of children.
        opened: What importing the script has opened and not closed.
    """

    def __init__(
        self, pool: socket.socket, base: EndpointOptions, signals: SignalWaiter, opened: Sequence[str]
    ) -> None:
        self._pool = pool
        self._base = base
        self._signals = signals
        self._children: list[_Child] = []
        self._reason = why_not_fork()
        if opened and not self._reason:
            names = f"{', '.join(opened[:3])}{' and others' if len(opened) > 3 else ''}"
            self._reason = f"importing the script opened {names}, and processes must not share the position in a file"
        if self._reason:
            logger.info("endpoints start as fresh processes: %s", self._reason)

    def serve(self) -> int:
        """Execute commands until it is stopped or until the pool is gone. Return the exit status."""
        if not self._reason:
            gc.collect()
            gc.freeze()  # so the children's garbage collector does not touch inherited memory, which stays shared
        send_event(self._pool, "loaded", mode="fresh" if self._reason else "fork")
        while True:
            arrived = self._signals.wait(_IDLE_S, descriptors=(self._pool.fileno(),))
            self._reap()
            if end_signal() in arrived:
                return self._stop(self._base.grace_s)
            command = self._receive()
            if command is None:
                continue
            name, facts, descriptors = command
            if name == "start":
                self._start(facts["index"], facts["incarnation"], descriptors[0])
            elif name == "end":
                self._end(facts["incarnation"])
            elif name == "stop":
                return self._stop(facts["grace_s"])
            else:
                return self._stop(0.0)  # the pool is gone

    def _receive(self) -> tuple[str, dict[str, Any], list[int]] | None:
        try:
            # Do not use socket.recv_fds. It ignores the flag MSG_DONTWAIT, so it would block until the next command.
            packet, ancillary, _, _ = self._pool.recvmsg(
                MAX_PACKET_BYTES, socket.CMSG_LEN(_DESCRIPTOR.size), socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            packet, ancillary = b"", []
        facts = json.loads(packet) if packet else {"command": "gone"}
        descriptors = [_DESCRIPTOR.unpack(data)[0] for _, _, data in ancillary]
        return facts.pop("command"), facts, descriptors

    def _start(self, index: int, incarnation: str, output: int) -> None:
        options = dataclasses.replace(self._base, index=index, incarnation=incarnation)
        try:
            start = self._start_fresh if self._reason else self._fork
            self._children.append(start(options, output))
        except OSError as error:
            send_event(self._pool, "exited", index=index, incarnation=incarnation, status=int(ExitCode.RESOURCES))
            logger.error("cannot start endpoint %s: %s", options.name, error)
        finally:
            os.close(output)

    def _fork(self, options: EndpointOptions, output: int) -> _Child:
        server_pid = os.getpid()
        with children_ignore_platform():
            pid = os.fork()
        if pid:
            return _Child(options.index, options.incarnation, pid, None)
        status = int(ExitCode.INTERNAL)
        try:
            die_with_parent(server_pid)
            self._signals.abandon()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.close(output)
            status = run_endpoint(options, self._pool)
        except BaseException:
            logger.exception("endpoint %s failed", options.name)
        finally:
            exit_process(status)
        raise AssertionError("unreachable")

    def _start_fresh(self, options: EndpointOptions, output: int) -> _Child:
        with children_ignore_platform():
            process = subprocess.Popen(
                [sys.executable, "-m", "hetero.dataplane.endpoint.endpoint", str(self._pool.fileno())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(self._pool.fileno(),),
            )
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(options.to_json())
        return _Child(options.index, options.incarnation, process.pid, process)

    def _end(self, incarnation: str) -> None:
        """Ask one endpoint to end. Its requests in progress have its own grace."""
        for child in self._children:
            if child.incarnation == incarnation:
                os.kill(child.pid, end_signal())

    def _reap(self) -> None:
        for child in list(self._children):
            status = child.poll()
            if status is not None:
                self._children.remove(child)
                send_event(self._pool, "exited", index=child.index, incarnation=child.incarnation, status=status)

    def _stop(self, grace_s: float) -> int:
        """Ask every endpoint to end, and kill it after ``grace_s`` seconds. If that is 0, kill it at once."""
        for child in self._children:
            os.kill(child.pid, end_signal() if grace_s > 0 else signal.SIGKILL)
        deadline_s = time.monotonic() + grace_s
        while self._children and time.monotonic() < deadline_s:
            self._signals.wait(min(0.5, max(0.0, deadline_s - time.monotonic())))
            self._reap()
        for child in self._children:
            os.kill(child.pid, signal.SIGKILL)
        while self._children:
            self._signals.wait(0.1)
            self._reap()
        return int(ExitCode.OK)


def why_not_fork() -> str:
    """Return why this process must not fork endpoints, empty if it may fork."""
    if threading.active_count() > 1:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate() if thread.name != "MainThread"))
        return f"importing the script started threads ({names})"
    if "tensorflow" in sys.modules:
        return "the script imports TensorFlow"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "importing the script initialised CUDA"
    return ""


def main() -> None:
    """Run the fork server. See the module's docstring."""
    pool = socket.socket(fileno=int(sys.argv[1]))
    base, parent_pid = EndpointOptions.from_json(pool.recv(MAX_PACKET_BYTES))
    die_with_parent(parent_pid)
    configure_process(base.log_level)
    ignore_platform()
    keep_freed_memory()
    before = open_files()
    try:
        load_script(base.script, base.script_args, host=base.host, is_module=base.is_module)
        # Do this again, because the script may have set up logging or signals.
        configure_process(base.log_level)
        with SignalWaiter((end_signal(), signal.SIGCHLD)) as signals:
            opened = [name for descriptor, name in open_files().items() if before.get(descriptor) != name]
            status = _ForkServer(pool, base, signals, opened).serve()
    except HeteroError as error:
        report_failure(pool, error)
        status = int(error.exit_code)
    exit_process(status)


if __name__ == "__main__":
    main()
