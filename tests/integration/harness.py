"""Whole simulated jobs as a user would run them, and the sweep after each: nothing may be left."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

CHAIN = Path(__file__).parent / "scripts" / "chain.py"
MARKER = "HETERO_TEST_RUN"


@dataclass
class Job:
    """One ``hetero simulate`` in progress or done."""

    directory: Path
    process: subprocess.Popen[str]
    marker: str
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.pump_thread = threading.Thread(target=self._pump, daemon=True)

    def _pump(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def wait_line(self, text: str, timeout_s: float = 60.0) -> str:
        """Wait for a line that contains ``text`` and return it."""
        with self._news:
            found: list[str] = []

            def seen() -> bool:
                found[:] = [line for line in self.lines if text in line]
                return bool(found) or self.process.poll() is not None

            self._news.wait_for(seen, timeout_s)
        if not found:
            pytest.fail(f"no line with {text!r} in:\n{self.output}")
        return found[0]

    def wait(self, timeout_s: float = 100.0) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job did not end within {timeout_s:.0f} s:\n{self.output}")

    def processes(self) -> list[psutil.Process]:
        """Return every living process of this job, found by its environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_ours = process.pid != os.getpid() and process.environ().get(MARKER) == self.marker
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

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


Start = Callable[..., Job]
StartJob = Callable[..., Job]
StartLauncher = Callable[..., Job]


def sweep(job: Job) -> None:
    """Give processes that were killed a moment to go, then expect none."""
    deadline_s = time.monotonic() + 15.0
    while (left := job.processes()) and time.monotonic() < deadline_s:
        psutil.wait_procs(left, timeout=0.5)
    described = [f"{process.pid} {' '.join(process.cmdline())}" for process in left if process.is_running()]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert described == [], f"processes are left:\n{described}\n{job.output[-3000:]}"


def listening_ports() -> set[str]:
    """Return what listens on loopback addresses that only simulated hosts use."""
    found = [
        connection.laddr for connection in psutil.net_connections("tcp") if connection.status == psutil.CONN_LISTEN
    ]
    return {f"{address.ip}:{address.port}" for address in found if re.match(r"127\.(?!0\.)", address.ip)}
