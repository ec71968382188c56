"""The fixtures of the integration tests.

Starting a job costs seconds, so several tests share one where they can. A fixture of the module starts it with
``start_shared_job`` and waits for its end. Each test then asks one thing of its output, report and files. A test that
sends signals or counts processes starts a separate job with ``start_job``. Both use the same code and the same sweep.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.integration.harness import (
    CHAIN,
    MARKER,
    TIME_SCALE,
    TORCH_CHAIN,
    WITHOUT_TORCH,
    Job,
    Start,
    StartJob,
    StartLauncher,
    check_end,
    listening_ports,
    sweep,
)

ON_A_TERMINAL = """
import fcntl, signal, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, lambda *_: None)  # the other one in the foreground is to take it
before = termios.tcgetattr(0)
status = subprocess.call(sys.argv[1:])
print("the terminal is", "as it was" if termios.tcgetattr(0) == before else "changed", flush=True)
sys.exit(status)
"""
"""Leads a session, as a shell does: what a terminal was set to is lost with the last process that has it open."""


PORT = 17801
"""Control port of launchers that are started by themselves."""


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[Start]:
    """Yield a function that starts a command. Afterwards none of its processes may be left."""
    jobs: list[Job] = []
    temporary = folder / "tmp"
    temporary.mkdir()
    shared_before = set(Path("/dev/shm").iterdir())
    ports_before = listening_ports()

    def start_command(
        command: Sequence[str], directory: Path, environment: Mapping[str, str], *, on_terminal: bool = False
    ) -> Job:
        marker = uuid.uuid4().hex
        own_end, its_end = pty.openpty() if on_terminal else (-1, -1)
        process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *command] if on_terminal else command,
            env={**os.environ, MARKER: marker, "TMPDIR": str(temporary), **environment},
            stdin=its_end if on_terminal else subprocess.DEVNULL,
            stdout=its_end if on_terminal else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if on_terminal:
            os.close(its_end)
        source = process.stdout or os.fdopen(own_end, encoding="utf-8", errors="replace")
        job = Job(directory, process, marker, source)
        job.pump_thread.start()
        jobs.append(job)
        return job

    yield start_command
    for job in jobs:
        with contextlib.suppress(ProcessLookupError):
            if job.process.poll() is None:
                os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
        sweep(job.marker, job.output)
        job.pump_thread.join(100.0)  # ends with the last process that holds the pipe
        job.source.close()
    for job in jobs:
        if sum(other.directory == job.directory for other in jobs) == 1:  # else the file may be the other one's
            check_end(job)
    killed = [job for job in jobs if job.process.returncode == -signal.SIGKILL]
    # A rank that fails or is killed cannot remove what Python's own multiprocessing, or TensorFlow, made for it. Torch
    # keeps a cache, in some runs, and what a process of its mp.spawn has raised. TensorFlow's files are also compiled.
    others = ("pymp-", "torchinductor_", "__autograph_generated_file", "__pycache__", "pytorch-errorfile-")
    left_names = sorted(path.name for path in temporary.iterdir() if not path.name.startswith(others))
    assert killed or left_names == [], "temporary files are left"
    assert set(Path("/dev/shm").iterdir()) - shared_before == set(), "shared memory or semaphores are left"
    deadline_s = time.monotonic() + 5.0  # of a killed process the last socket is closed after it has become a zombie
    while (left_ports := listening_ports() - ports_before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left_ports == set(), "ports are left open on addresses of simulated hosts"


def job_starter(start: Start, folder: Path) -> StartJob:
    """Return a function that starts a simulated job."""
    count = itertools.count()

    def start_simulation(
        groups: Sequence[str],
        *flags: str,
        script: Path = CHAIN,
        args: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_terminal: bool = False,
    ) -> Job:
        directory = folder / f"job-{next(count)}"
        directory.mkdir()
        command = [sys.executable, "-m", "hetero.cli", "simulate", "--output-dir", str(directory / "run")]
        command += [flag for group in groups for flag in ("--group", group)]
        own_args = ["--output", str(directory)] if script in (CHAIN, TORCH_CHAIN) else []
        command += [*flags, str(script), *own_args, *args]
        return start(command, directory, environment or {}, on_terminal=on_terminal)

    return start_simulation


def launcher_starter(start: Start, folder: Path, network_number: int) -> StartLauncher:
    """Return a function that starts one host of a cluster file: data host algo-1 or trainer host algo-2.

    With ``join`` it starts another host, which joins their job.
    """
    groups = [
        {"instance_group_name": "data_group", "instance_type": "ml.c5.xlarge", "hosts": ["algo-1"]},
        {"instance_group_name": "dnn_group", "instance_type": "ml.p3.2xlarge", "hosts": ["algo-2"]},
    ]
    cluster_file = folder / "cluster.json"
    cluster_file.write_text(json.dumps({"instance_groups": groups}))
    network = f"127.{100 + os.getpid() % 100}.{network_number}"
    hosts_file = folder / "hosts"
    hosts_file.write_text("".join(f"{network}.{number} algo-{number}\n" for number in range(1, 10)))

    def start_host(
        host: str,
        *flags: str,
        script: Path = CHAIN,
        args: Sequence[str] = (),
        token: str = "shared-secret",
        environment: Mapping[str, str] | None = None,
        join: str = "",
    ) -> Job:
        directory = folder / host
        directory.mkdir(exist_ok=True)
        token_file = directory / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(token + "-of-the-job")
        if join:  # a host of the description has a folder only once its launcher needs it
            (directory / "ml").mkdir(exist_ok=True)
        where = ["--join", f"{join}:{PORT}"] if join else ["--cluster-file", str(cluster_file)]
        command = [sys.executable, "-m", "hetero.cli", "launch", *where, "--host", host]
        if script in (CHAIN, TORCH_CHAIN, WITHOUT_TORCH):
            flags = ("--endpoints-per-host", "1", *flags)
        if script in (CHAIN, TORCH_CHAIN):
            args = ["--output", str(directory), *args]
        command += ["--port", str(PORT), *flags, str(script), "--"]
        own = {
            "HETERO_HOSTS_FILE": str(hosts_file),
            "HETERO_TOKEN_FILE": str(token_file),
            "HETERO_TIME_SCALE": str(TIME_SCALE),
            "SAGEMAKER_BASE_DIR": str(directory / "ml"),
        }
        return start([*command, *args], directory, {**own, **(environment or {})})

    return start_host


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a command. After the test nothing of it may be left."""
    with starting(tmp_path) as start_command:
        yield start_command


@pytest.fixture
def start_job(start: Start, tmp_path: Path) -> StartJob:
    """Return a function that starts a simulated job."""
    return job_starter(start, tmp_path)


@pytest.fixture
def start_launcher(start: Start, tmp_path: Path) -> StartLauncher:
    """Return a function that starts one host of a cluster file. See `launcher_starter`."""
    return launcher_starter(start, tmp_path, 7)


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, _repetition: int) -> Path:
    """Return the folder that the tests of a module share, as `tmp_path` is the folder of one test."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def start_shared(shared_folder: Path, _repetition: int) -> Iterator[Start]:
    """Return a function that starts a command. After the module's tests nothing of it may be left.

    ``--repeat`` starts it anew for each repetition of the module's tests.
    """
    with starting(shared_folder) as start_command:
        yield start_command


@pytest.fixture(scope="module")
def start_shared_job(start_shared: Start, shared_folder: Path) -> StartJob:
    """Return a function that starts a simulated job that several tests ask."""
    return job_starter(start_shared, shared_folder)


@pytest.fixture(scope="module")
def start_shared_launcher(start_shared: Start, shared_folder: Path) -> StartLauncher:
    """Return a function that starts one host of a job that several tests ask. See `launcher_starter`."""
    return launcher_starter(start_shared, shared_folder, 6)
