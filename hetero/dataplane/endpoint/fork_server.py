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
import logging
import os
import signal
import socket
import subprocess
import sys
import time

from hetero.dataplane.endpoint.endpoint import (
    configure_process,
    exit_process,
    report_failure,
    run_endpoint,
    send_event,
)
from hetero.dataplane.endpoint.options import EndpointOptions
from hetero.dataplane.endpoint.packets import MAX_PACKET_BYTES, make_channel, receive_packet
from hetero.dataplane.endpoint.prebuilt import SharedBuilds
from hetero.dataplane.endpoint.processes import EndpointProcess, run_forked, why_not_fork
from hetero.dataplane.endpoint.script import load_script
from hetero.dataplane.endpoint.shared_builds import HostBuilds
from hetero.errors import ExitCode, HeteroError
from hetero.system.memory import keep_freed_memory, prepare_to_fork
from hetero.system.open_files import open_files
from hetero.system.process import SignalWaiter, die_with_parent, wait_gone
from hetero.system.stop_signals import children_ignore_platform, end_signal, ignore_platform

__all__ = ["main"]

_IDLE_S = 5.0
_BUSY_S = 0.1
_GONE_S = 5.0

logger = logging.getLogger(__name__)


class _ForkServer:
    """Executes the commands of the pool.

    Args:
        pool: The socket to the pool.
        base: The settings of endpoints.
        signals: Waits for the end signal and for the end of children.
        reason: Why it must not fork endpoints. Empty if it may.
    """

    def __init__(self, pool: socket.socket, base: EndpointOptions, signals: SignalWaiter, reason: str) -> None:
        self._pool = pool
        self._base = base
        self._signals = signals
        self._children: list[EndpointProcess] = []
        self._reason = reason
        self._builds = HostBuilds(base, pool, signals)
        if self._reason:
            logger.info("endpoints start as fresh processes: %s", self._reason)

    def serve(self) -> int:
        """Execute commands until it is stopped or until the pool is gone. Return the exit status."""
        if not self._reason:
            prepare_to_fork()
        send_event(self._pool, "loaded", mode="fresh" if self._reason else "fork")
        while True:
            arrived = self._wait(_IDLE_S, self._pool.fileno())
            if end_signal() in arrived:
                return self._stop(self._base.grace_s)
            packet = receive_packet(self._pool)
            if packet is None:
                continue
            facts, descriptors = packet
            name = facts.get("command")
            if name == "start":
                self._start(facts["index"], facts["incarnation"], descriptors[0])
            elif name == "end":
                self._end(facts["incarnation"])
            elif name == "stop":
                return self._stop(facts["grace_s"])
            else:
                return self._stop(0.0)  # the pool is gone

    def _wait(self, timeout_s: float, *descriptors: int) -> set[int]:
        """Wait for signals, questions of endpoints, and events of zygotes, and handle them. Return the signals.

        Args:
            timeout_s: Longest time to wait.
            descriptors: Other descriptors that end the wait.
        """
        channels = [child.channel.fileno() for child in self._children if child.channel is not None]
        timeout_s = min(timeout_s, _BUSY_S) if self._builds.is_busy else timeout_s
        arrived = self._signals.wait(timeout_s, descriptors=(*descriptors, *self._builds.descriptors(), *channels))
        for child in self._children:
            while child.channel is not None and (packet := receive_packet(child.channel)) is not None:
                question, passed = packet
                if passed:
                    self._builds.asked(child, question, passed[0])
                elif question.get("event") == "gone":
                    self._builds.left(child)
                    child.close()
                else:
                    self._builds.announced(question)
        self._reap()
        for event in self._builds.events(self._children):
            if isinstance(event, EndpointProcess):
                self._children.append(event)
            else:
                self._children = [
                    child
                    for child in self._children
                    if not child.is_of_zygote or child.incarnation != event.incarnation
                ]
                self._tell_exit(event.index, event.incarnation, event.status, is_charged=event.is_charged)
        return arrived

    def _start(self, index: int, incarnation: str, output: int) -> None:
        options = dataclasses.replace(self._base, index=index, incarnation=incarnation)
        try:
            if not self._builds.start(index, incarnation, output):
                start = self._start_fresh if self._reason else self._fork
                self._children.append(start(options, output))
        except OSError as error:
            self._tell_exit(index, incarnation, int(ExitCode.RESOURCES))
            logger.error("cannot start endpoint %s: %s", options.name, error)
        finally:
            os.close(output)

    def _fork(self, options: EndpointOptions, output: int) -> EndpointProcess:
        server_pid = os.getpid()
        ours, theirs = make_channel() if self._builds.may_share else (None, None)
        with children_ignore_platform():
            pid = os.fork()
        if pid:
            if theirs is not None:
                theirs.close()
            return EndpointProcess(options.index, options.incarnation, pid, channel=ours)

        def run() -> int:
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.close(output)
            channels = [child.channel for child in self._children if child.channel is not None]
            for channel in (*channels, *self._builds.inherited(), *(() if ours is None else (ours,))):
                channel.close()
            return run_endpoint(options, self._pool, shared_builds=None if theirs is None else SharedBuilds(theirs))

        run_forked(run, server_pid, self._signals)
        raise AssertionError("unreachable")

    def _start_fresh(self, options: EndpointOptions, output: int) -> EndpointProcess:
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
        return EndpointProcess(options.index, options.incarnation, process.pid, process=process)

    def _end(self, incarnation: str) -> None:
        """Ask one endpoint to end. Its requests in progress have their own grace."""
        self._builds.forget(incarnation)
        for child in self._children:
            if child.incarnation == incarnation:
                child.signal(end_signal())

    def _reap(self) -> None:
        for child in list(self._children):
            status = child.poll()
            if status is not None:
                self._children.remove(child)
                self._builds.left(child)
                child.close()
                if not child.is_replaced:
                    self._tell_exit(child.index, child.incarnation, status)

    def _tell_exit(self, index: int, incarnation: str, status: int, *, is_charged: bool = True) -> None:
        send_event(self._pool, "exited", index=index, incarnation=incarnation, status=status, is_charged=is_charged)

    def _stop(self, grace_s: float) -> int:
        """Ask every endpoint to end, and kill it after ``grace_s`` seconds. If that is 0, kill it at once."""
        self._builds.stop()
        for child in self._children:
            child.signal(end_signal() if grace_s > 0 else signal.SIGKILL)
        deadline_s = time.monotonic() + grace_s
        while self._children and time.monotonic() < deadline_s:
            self._wait(min(0.5, max(0.0, deadline_s - time.monotonic())))
        # Processes that others have forked end a little after these.
        adopted = [*self._builds.pids(), *(child.pid for child in self._children if child.is_of_zygote)]
        for child in self._children:
            child.signal(signal.SIGKILL)
        self._builds.kill()
        while self._children:
            self._wait(0.1)
        self._builds.end()
        wait_gone(adopted, timeout_s=_GONE_S)
        return int(ExitCode.OK)


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
        reason = why_not_fork(before)
        with SignalWaiter((end_signal(), signal.SIGCHLD)) as signals:
            status = _ForkServer(pool, base, signals, reason).serve()
    except HeteroError as error:
        report_failure(pool, error)
        status = int(error.exit_code)
    exit_process(status)


if __name__ == "__main__":
    main()
