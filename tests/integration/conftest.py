"""The fixture of the integration tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from harness import MARKER, SCRIPTS, Job, StartJob, sweep


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """Return a function that starts a simulated job; afterwards nothing of it may be left."""
    jobs: list[Job] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def start(
        groups: Sequence[str],
        *flags: str,
        script: Path = SCRIPTS / "chain.py",
        args: Sequence[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> Job:
        directory = tmp_path / f"job-{len(jobs)}"
        directory.mkdir()
        marker = uuid.uuid4().hex
        group_flags = [flag for group in groups for flag in ("--group", group)]
        arguments = [] if args is None else list(args)
        if script.name == "chain.py":
            arguments = ["--output", str(directory), *arguments]
        command = [sys.executable, "-m", "hetero.cli", "simulate", *group_flags]
        command += ["--output-dir", str(directory / "run"), *flags, str(script), "--", *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, MARKER: marker, "TMPDIR": str(temporary), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        job = Job(directory, process, marker)
        job.pump_thread.start()
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        sweep(job)
        job.pump_thread.join(10.0)  # ends with the last process that holds the pipe
        assert job.process.stdout is not None
        job.process.stdout.close()
    assert sorted(path.name for path in temporary.iterdir()) == [], "temporary files are left"
    left = [path for path in Path("/dev/shm").iterdir() if "hetero" in path.name]
    assert left == [], "shared memory is left"
