"""The memory of endpoints, as the doctor sees it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.cache import folders
from hetero.doctor.limits import examine_memory
from tests.support.doctor import here

FAKE = "import sys; data = bytearray(50_000_000); print('up', flush=True); sys.stdin.read()"


def test_processes_of_endpoints_are_added_up_for_each_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MEMORY", tmp_path)
    command = [sys.executable, "-c", FAKE, "-m", "hetero.pool.fork_server"]
    environment = {**os.environ, "HETERO_JOB_ID": "doctor-memory-test"}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        (found,) = [each for each in examine_memory(here(tmp_path)) if "doctor-memory-test" in each.found]
    finally:
        for process in processes:
            process.communicate()
    assert found.found.startswith("endpoints of the job doctor-memory-test: 2 processes have 1")
    assert " MB of private memory, at most " in found.found
    assert 100e6 < found.details["private_bytes"] < 200e6
    assert 50e6 < found.details["largest_private_bytes"] < 100e6


def test_kept_samples_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MEMORY", tmp_path)
    folder = folders.SharedFolder(tmp_path, "photos", "key")
    (folder.path / "data-0").write_bytes(bytes(20_000_000))
    texts = [each.found for each in examine_memory(here(tmp_path))]
    assert "samples that data sets have kept in memory take 20 MB" in texts
    folder.close()
