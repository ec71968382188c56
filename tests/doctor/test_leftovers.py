"""What earlier runs have left: said, and left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.doctor import Diagnosis, Level
from hetero.doctor.leftovers import examine, find_processes
from tests.support.doctor import here

# Each line is one write, also where PYTHONUNBUFFERED is set: two processes write to one pipe.
READ = r"import os, sys; os.write(1, b'up\n'); sys.stdin.read()"
LEAVE = r"import os, subprocess, sys; os.write(1, b'%d\n' % subprocess.Popen(sys.argv[1:]).pid)"
"""Starts a process and ends."""


def here_only(folder: Path) -> list[Diagnosis]:
    """Return what is found but for processes, which other tests of this machine may have."""
    found = examine(here(folder))
    return [diagnosis for diagnosis in found if "process" not in diagnosis.found]


def test_failure_file_of_an_earlier_run_is_said(tmp_path: Path) -> None:
    (tmp_path / "ml/output").mkdir(parents=True)
    (tmp_path / "ml/output/failure").write_text("HET-30 ...")
    (diagnosis,) = here_only(tmp_path)
    assert diagnosis.level is Level.WARNING
    assert str(tmp_path / "ml/output/failure") in diagnosis.found


@pytest.fixture
def stray() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that look like hetero's, to be started by the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with process:
            process.kill()


def start(arguments: list[str], job: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", READ, *arguments],
        env={**os.environ, "HETERO_JOB_ID": job},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_processes_are_said_with_their_job(tmp_path: Path, stray: list[subprocess.Popen[str]]) -> None:
    stray.append(start(["-m", "hetero.cli", "launch", "train.py"], "running-job"))
    stray.append(start(["-m", "hetero.cli", "report", "runs"], "no-job"))
    texts = [diagnosis.found for diagnosis in examine(here(tmp_path))]
    assert f"a launcher runs here: process {stray[0].pid} of the job running-job" in texts
    assert not any("no-job" in text for text in texts)


def test_processes_whose_launcher_has_ended_are_to_be_killed(tmp_path: Path) -> None:
    endpoints = [[sys.executable, "-c", READ, "-m", "hetero.endpoint.endpoint", str(n)] for n in range(9)]
    environment = {**os.environ, "HETERO_JOB_ID": "lost-job"}
    read_end, write_end = os.pipe()
    pids = []
    try:
        for endpoint in endpoints:
            command = [sys.executable, "-c", LEAVE, *endpoint]
            launcher = subprocess.Popen(command, env=environment, stdin=read_end, stdout=subprocess.PIPE, text=True)
            with launcher:
                assert launcher.stdout is not None
                first, second = launcher.stdout.readline(), launcher.stdout.readline()
                pids.append(int(first if second == "up\n" else second))
        diagnoses = [each for each in examine(here(tmp_path)) if each.found.endswith(" of the job lost-job")]
        assert [each.found.partition(":")[0] for each in diagnoses] == ["processes without their launcher"]
        assert diagnoses[0].to_do.split() == ["kill", *map(str, sorted(pids))]
    finally:
        os.close(read_end)
        os.close(write_end)  # they end


def test_processes_of_a_living_program_are_no_leftovers(tmp_path: Path, stray: list[subprocess.Popen[str]]) -> None:
    stray.append(start(["-m", "hetero.endpoint.endpoint", "3"], ""))
    (diagnosis,) = [each for each in examine(here(tmp_path)) if str(stray[0].pid) in each.found]
    assert diagnosis.found.startswith(f"a Python program reads data here: process {os.getpid()}, with the processes ")
    assert diagnosis.to_do.startswith("keep it if it belongs to this job")


def test_what_only_reads_a_launcher_is_none(tmp_path: Path, stray: list[subprocess.Popen[str]]) -> None:
    (tmp_path / "launcher.py").touch()
    stray.append(subprocess.Popen(["tail", "-f", str(tmp_path / "launcher.py")], text=True))
    assert [process for process in find_processes() if process.pid == stray[0].pid] == []


def test_endpoint_of_a_living_launcher_is_no_leftover(tmp_path: Path, stray: list[subprocess.Popen[str]]) -> None:
    child = f"[{sys.executable!r}, '-c', {READ!r}, '-m', 'hetero.endpoint.endpoint']"
    code = f"import subprocess, sys; subprocess.run({child}, stdin=sys.stdin)"
    command = [sys.executable, "-c", code, "-m", "hetero.cli", "launch"]
    launcher = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    stray.append(launcher)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "up\n"
    (endpoint,) = [each for each in find_processes() if launcher.pid in each.ancestors]
    assert endpoint.kind == "endpoint"
    assert not any(str(endpoint.pid) in diagnosis.found for diagnosis in examine(here(tmp_path)))
    assert launcher.stdin is not None
    launcher.stdin.close()
    launcher.wait(300)
