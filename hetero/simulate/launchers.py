"""Starts the launchers of all simulated hosts, relays their output, stops them and kills them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from hetero.cluster import Role, describes_a_job
from hetero.cluster.platforms.sagemaker import folders_below
from hetero.config import LaunchOptions
from hetero.control.security import TOKEN_FILE_VARIABLE
from hetero.documents.text import escape_line
from hetero.errors import ExitCode
from hetero.launch.failure import stated_code
from hetero.launch.reporting.progress import PROGRESS_MARK, StatusLine
from hetero.metrics.lines import METRIC_MARK
from hetero.system import logs
from hetero.system.line_relay import LineRelay
from hetero.system.process import adopt_descendants, describe_exit_status, end_descendants, reap_adopted
from hetero.system.waits import END_TIMEOUT_S, POLL_S

__all__ = ["HostCommand", "Launchers", "SimulatedHost"]

logger = logging.getLogger(__name__)

_ANY_FAILURE = 1
"""Exit status of SageMaker's toolkit for any failure of its program. The failure file has the job's exit code."""
_METRIC_START = f"INFO {METRIC_MARK} "


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedHost:
    """One host of a simulated job."""

    name: str
    group: str
    role: Role
    address: str
    root: Path

    @property
    def base_dir(self) -> Path:
        """The folder that is ``/opt/ml`` for this host."""
        return self.root / "ml"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCommand:
    """The command that a simulated host runs, like the only program of a container."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    """Variables to add to the variables of this process. Variables of this process that describe a job are not
    inherited."""
    directory: Path | None = None
    """Working directory of the program. Defaults to the working directory of this process."""
    is_process_1: bool = False
    """Whether the program gets only signals that it has a handler for, like process 1 of a container."""


class Launchers:
    """The launchers of all simulated hosts, as a context manager that ends all their processes on exit.

    Args:
        hosts: All simulated hosts.
        kill_after_s: Seconds from a request to stop until launchers that still run are killed. With None, only a
            second request kills them.
    """

    def __init__(self, hosts: Sequence[SimulatedHost], *, kill_after_s: float | None = None) -> None:
        self._hosts = hosts
        self._groups = {host.name: host.group for host in hosts}
        self._kill_after_s = kill_after_s
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, HostCommand] = {}
        self._logs: dict[str, TextIO] = {}
        self._cut_logs: set[str] = set()
        """Hosts whose log lacks lines, because the disk was full."""
        self._killed: set[str] = set()
        """Hosts whose launcher got SIGKILL from this process."""
        self._signals = 0
        """Requests to stop that this process has received."""
        self._status = StatusLine()
        self._relay = LineRelay(self._write)
        self._stack = contextlib.ExitStack()
        """Restores the handlers of signals that this process had before."""

    def __enter__(self) -> Launchers:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._stack.callback(signal.signal, number, signal.signal(number, self._on_signal))
        # Become the parent of processes whose launcher has ended, because `__exit__` must find and end them.
        adopt_descendants()
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes of the hosts, and write the lines that they have still printed."""
        self._kill()
        # A killed launcher may leave processes behind.
        end_descendants()
        self._relay.close()
        for log in self._logs.values():
            with contextlib.suppress(OSError):
                log.close()
        self._stack.close()

    def start(self, host: SimulatedHost, command: HostCommand) -> None:
        """Start the launcher of one host."""
        self._logs[host.name] = (host.root / "log.txt").open("w", encoding="utf-8", buffering=1)
        # Do not pass on variables that set options. This process has read them, and launchers get options as flags. The
        # simulated job also has its own token, and its own description of the cluster.
        option_names = {f"HETERO_{field.name.upper()}" for field in dataclasses.fields(LaunchOptions)}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in option_names and not name.startswith(TOKEN_FILE_VARIABLE) and not describes_a_job(name)
        }
        self._commands[host.name] = command
        self._processes[host.name] = self._relay.start(
            host.name, command.arguments, cwd=command.directory, env={**inherited, **command.environment}
        )

    def wait(self) -> int:
        """Wait until every launcher has ended, and return the job's exit code."""
        num_handled = 0
        # Monotonic time when launchers that still run are killed.
        kill_at_s = math.inf
        # Stop the wait after a kill. A killed launcher that still runs waits for a device, and a simulation once waited
        # for it for ever.
        while self._running() and not self._killed:
            # No event announces the end of a launcher, so poll.
            time.sleep(POLL_S)
            # This process is the parent of processes whose launcher has ended, see `__enter__`.
            reap_adopted()
            self._status.draw()
            # A handler of signals only counts them, so they are handled here.
            if self._signals > num_handled:
                num_handled = self._signals
                self._hand_on_signal()
                if self._kill_after_s is not None:
                    kill_at_s = min(kill_at_s, time.monotonic() + self._kill_after_s)
            if time.monotonic() >= kill_at_s and (running := self._running()):
                logger.warning("%.0f s after the request to stop: killing %s", self._kill_after_s, ", ".join(running))
                self._kill()
        # The relay ends before the cause is logged, because the cause must be the last line.
        self._relay.close()
        self._status.clear()
        return self._exit_code()

    def _hand_on_signal(self) -> None:
        """Handle a new signal: ask the launchers to stop after the first one, kill them after a second one."""
        running = self._running()
        if self._signals == 1:
            logger.warning("stopping: waiting for %s; a second signal kills them", ", ".join(running))
            for name in running:
                self._request_stop(name)
        else:
            logger.warning("killing %s", ", ".join(running))
            self._kill()

    def _request_stop(self, name: str) -> None:
        """Send SIGTERM to a launcher. Only log a warning if process 1 of a real container would not get the signal."""
        process = self._processes[name]
        if self._commands[name].is_process_1 and not _handles(process.pid, signal.SIGTERM):
            logger.warning(
                "%s: process 1 has no handler for SIGTERM, so the job gets no request to stop, as on the platform",
                name,
            )
            return
        process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        """Kill the launchers that run, and log launchers that do not end. The children of a launcher die with it."""
        # A launcher that still runs after an earlier call waits for a device. Do not wait for it a second time.
        running = [] if self._killed else self._running()
        for name in running:
            self._killed.add(name)
            self._processes[name].kill()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        for name in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[name].wait(max(0.0, deadline_s - time.monotonic()))
        if running and (left := self._running()):
            names = ", ".join(f"the launcher of {name} (process {self._processes[name].pid})" for name in left)
            logger.error(
                "not ended %.0f s after SIGKILL: %s; continuing without waiting for them", END_TIMEOUT_S, names
            )

    def _running(self) -> list[str]:
        """Return the hosts whose launchers have not ended."""
        return [name for name, process in self._processes.items() if process.poll() is None]

    def _exit_code(self) -> int:
        """Log every bad exit and return the job's exit code, which comes from the first trainer host that failed.

        The status of a data host does not count, because a job may succeed although it loses a data host.
        """
        ended = ((host, self._processes[host.name].returncode) for host in self._hosts)
        # A launcher that could not be killed lacks a status.
        statuses = [(host, -signal.SIGKILL if status is None else status) for host, status in ended]
        for host, status in statuses:
            if host.name in self._killed:
                logger.error("%s (%s): killed on request", host.name, host.group)
            elif self._signals and status == 128 + signal.SIGTERM:
                logger.info("%s (%s): stopped on request", host.name, host.group)
            elif status != 0:
                logger.error("%s (%s): launcher %s", host.name, host.group, _describe_exit(status))
        causes = [_failure_line(host) for host, status in statuses if status != 0 and host.role is Role.TRAINER]
        if cause := next(filter(None, causes), ""):
            logger.error("the job failed: %s", cause)
        failed_status = next((status for host, status in statuses if status != 0 and host.role is Role.TRAINER), 0)
        # SageMaker's toolkit ends with `_ANY_FAILURE` whatever failed, so take the exit code from `cause`. It does not
        # matter which host wrote `cause`, because each failure file has the exit code of the job's root cause.
        if failed_status == _ANY_FAILURE and cause.startswith("HET-") and (code := stated_code(cause)) is not None:
            return code
        # The status of a process that a signal ended is minus the number of the signal. A shell returns 128 + number.
        return failed_status if failed_status >= 0 else 128 - failed_status

    def _write(self, name: str, line: str) -> None:
        """Write a line of a host's launcher to the log of that host, and show the line.

        On a terminal, a progress line only changes the status line. Metric lines are not shown.
        """
        # Launchers escape their own lines, but not lines of libraries.
        line = escape_line(line)
        try:
            self._logs[name].write(line + "\n")
        # If the disk is full, the job continues without these lines, and the cut is logged once.
        except OSError as error:
            if name not in self._cut_logs:
                self._cut_logs.add(name)
                logger.warning("%s lacks lines: %s; make room on its disk", self._logs[name].name, error.strerror)
        if self._status.is_live and PROGRESS_MARK in line:
            self._status.show(line.partition(PROGRESS_MARK)[2])
            return
        if line.partition("] ")[2].startswith(_METRIC_START):
            # Metric lines are for programs, which read them in the host's log.
            return
        self._status.clear()
        # A launcher starts each line of its host with the group and the host. If process 1 is another program, such as
        # SageMaker's toolkit, the lines of that program lack this prefix.
        lacks_prefix = self._commands[name].is_process_1 and not line.startswith("[")
        logs.write_line(f"[{self._groups[name]} {name}] {line}" if lacks_prefix else line)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _describe_exit(status: int) -> str:
    """Return a text about an exit status, with hetero's meaning if the status is one of hetero's exit codes."""
    try:
        return f"exited with {status}: {ExitCode(status).help_text}"
    except ValueError:
        return describe_exit_status(status)


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal.

    Process 1 of a container gets only signals that it has a handler for, except kills from outside the container.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    # The kernel writes the caught signals as the bits of a hexadecimal number. Bit 0 is for signal 1.
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)


def _failure_line(host: SimulatedHost) -> str:
    """Return the first line of a host's failure file, or an empty text if the file cannot be read."""
    try:
        with folders_below(host.base_dir).failure.open(encoding="utf-8", errors="replace") as file:
            return file.readline(2048).strip()
    except OSError:
        return ""
