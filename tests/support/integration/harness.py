"""Whole simulated jobs as a user would run them, and the sweep after each: nothing may be left."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from hetero.errors import ExitCode

CHAIN = Path(__file__).parents[2] / "integration" / "scripts" / "chain.py"
"""The script of most jobs. It needs no framework."""
TORCH_CHAIN = CHAIN.with_name("torch_chain.py")
"""The same with torch. Its import costs more than such a job, in each rank and each data host."""
MARKER = "HETERO_TEST_RUN"
TIME_SCALE = 0.2
"""Of launchers that are started by themselves."""
DNN = "dnn_group=ml.p3.2xlarge:1"
"""The flag value of a group of one trainer host."""
SLOW = ["--num-samples", "100000", "--step-s", "0.05"]
"""Arguments of chain.py: it goes on until it is ended."""
WITHOUT_TORCH = CHAIN.with_name("without_torch.py")
"""A script that data hosts can serve too. It ends at once, and costs a third of chain.py."""
_LAST_WORDS_S = 2.0
"""Time to read the pipe after the end of the job. It passes only if a process outlives the job."""


@dataclass
class Job:
    """One ``hetero simulate`` in progress or done."""

    directory: Path
    process: subprocess.Popen[str]
    marker: str
    source: IO[str]
    """Where its output comes from: a pipe, or the other end of its terminal."""
    lines: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each line came, monotonic seconds."""
    _news: threading.Condition = field(default_factory=threading.Condition)
    _has_said_all: bool = False

    def __post_init__(self) -> None:
        self.pump_thread = threading.Thread(target=self._pump, daemon=True)

    def _pump(self) -> None:
        with contextlib.suppress(OSError):  # a terminal reports so that it is closed
            for line in self.source:
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self.times_s.append(time.monotonic())
                    self._news.notify_all()
        with self._news:
            self._has_said_all = True
            self._news.notify_all()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def wait_line(self, text: str, timeout_s: float = 300.0) -> str:
        """Wait for a line that contains ``text`` and return it."""
        return self.wait_lines(text, 1, timeout_s)[0][1]

    def wait_lines(self, text: str, count: int, timeout_s: float = 300.0) -> list[tuple[float, str]]:
        """Wait for ``count`` lines that contain ``text``. Return each with its time."""
        with self._news:
            found: list[tuple[float, str]] = []

            def seen() -> bool:
                all_lines = zip(self.times_s, self.lines, strict=True)
                found[:] = [(at_s, line) for at_s, line in all_lines if text in line]
                return len(found) >= count or self._has_said_all

            self._news.wait_for(seen, timeout_s)
        if len(found) < count:
            pytest.fail(f"{len(found)} of {count} lines with {text!r} in:\n{self.output}")
        return found

    def interrupt(self) -> None:
        """Press Ctrl-C, in its terminal if it has one."""
        if self.process.stdout is None:
            os.write(self.source.fileno(), b"\x03")
        else:
            self.process.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float = 300.0) -> int:
        """Wait for the end and what was printed before it. Return the exit code."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job did not end within {timeout_s:.0f} s:\n{self.output}")
        with self._news:
            self._news.wait_for(lambda: self._has_said_all, _LAST_WORDS_S)
        return code

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this job, found by its environment."""
        return processes_of(self.marker)

    def find(self, *words: str, host: str | None = None) -> list[psutil.Process]:
        """Return the job's processes whose command line has all ``words``, oldest first."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                environment = process.environ()
                if all(word in line for word in words) and environment.get("SM_CURRENT_HOST") == (
                    host or environment.get("SM_CURRENT_HOST")
                ):
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def result(self, rank: int) -> dict[str, Any]:
        """Return what chain.py wrote on one rank."""
        found: dict[str, Any] = json.loads((self.directory / f"rank-{rank}.json").read_text())
        return found

    def report(self) -> dict[str, Any]:
        """Return the job's report."""
        found: dict[str, Any] = json.loads((self.directory / "run" / "report.json").read_text())
        return found

    def failure(self, host: str) -> str:
        """Return the failure file of one simulated host."""
        return (self.directory / "run" / "hosts" / host / "ml" / "output" / "failure").read_text()


@functools.cache
def chains_alone(*args: str, num_ranks: int = 1, script: Path = CHAIN) -> list[str]:
    """Return the chain of each rank of a script, by itself: without launchers and without data hosts."""
    environ = {**os.environ, "PYTHONPATH": str(CHAIN.parents[3]), "WORLD_SIZE": str(num_ranks)}
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(num_ranks):
            command = [sys.executable, str(script), "--output", folder, *args]
            subprocess.run(command, env={**environ, "RANK": str(rank)}, check=True, stdout=subprocess.DEVNULL)
        return chains(Path(folder), num_ranks)


def audit(one: Path, other: Path) -> tuple[int, str]:
    """Run ``hetero audit``. Return its exit status and what it prints."""
    command = [sys.executable, "-m", "hetero.cli", "audit", str(one), str(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def chains(folder: Path, num_ranks: int = 2) -> list[str]:
    """Return the chain of each rank of chain.py that wrote into a folder."""
    return [json.loads((folder / f"rank-{rank}.json").read_text())["chain"] for rank in range(num_ranks)]


Start = Callable[..., Job]
StartJob = Callable[..., Job]
StartLauncher = Callable[..., Job]


def data(count: int) -> str:
    """Return the flag value of a data group."""
    return f"data_group=ml.c5.9xlarge:{count}"


def failure(job: Job) -> str:
    """Return the failure file of a launcher that was started by itself."""
    return (job.directory / "ml" / "output" / "failure").read_text()


def processes_of(marker: str) -> list[psutil.Process]:
    """Return every living process whose environment has a marker."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_ours = process.pid != os.getpid() and process.environ().get(MARKER) == marker
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float = 60.0) -> float:
    """Wait until processes have ended and return how many seconds that took. They need not be reaped."""
    begin_s = time.monotonic()
    left = list(processes)
    while left := [process for process in left if _lives(process)]:
        if time.monotonic() - begin_s > timeout_s:
            pytest.fail(f"not gone within {timeout_s:g} s: {_described(left)}")
        time.sleep(0.02)
    return time.monotonic() - begin_s


def sweep(marker: str, output: str = "") -> None:
    """Give processes that were killed a moment to go, then expect none that has the marker."""
    deadline_s = time.monotonic() + 60.0
    while (left := processes_of(marker)) and time.monotonic() < deadline_s:
        psutil.wait_procs(left, timeout=0.5)
    described = _described([process for process in left if process.is_running()])
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert described == [], f"processes are left:\n{described}\n{output[-3000:]}"


def check_end(job: Job) -> None:
    """Expect an exit code of the table, and failure files on the hosts that trained if, and only if, the job failed."""
    status = job.process.returncode
    assert status < 0 or status > 128 or status in set(ExitCode), f"exit code {status} is in no table"
    written = [path for path in job.directory.rglob("ml/output/failure") if not _is_of_data_host(path)]
    if status in (0, 128 + signal.SIGTERM):
        assert written == [], "it went well, and says that it failed"
    elif ExitCode.CLUSTER <= status < 128:
        assert list(job.directory.rglob("ml/output/failure")), "it failed, and no host says why"


def listening_ports() -> set[str]:
    """Return what listens on loopback addresses that only simulated hosts use."""
    found = [
        connection.laddr for connection in psutil.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    ]
    return {f"{address.ip}:{address.port}" for address in found if re.match(r"127\.(?!0\.)", address.ip)}


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _described(processes: Iterable[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def _is_of_data_host(failure_file: Path) -> bool:
    """Tell whether a simulated host serves data: one may fail while the job goes well."""
    description = failure_file.parents[1] / "input" / "config" / "resourceconfig.json"
    return description.exists() and json.loads(description.read_text())["current_group_name"] == "data_group"
