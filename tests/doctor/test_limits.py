"""Limits of a host: descriptors, shared memory, CPUs and disk, each as it really is."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hetero.doctor import Level, limits
from hetero.launch.placement import needed_descriptors
from tests.support.doctor import here, levels, run_doctor, worst, write_cluster


@pytest.mark.parametrize(
    ("limit", "level", "words"),
    [(90, "error", "a launcher needs about 100"), (1024, "ok", "a process may open 1024 files")],
)
def test_few_descriptors_are_said(limit: int, level: str, words: str) -> None:
    script = f'ulimit -n {limit}; exec "$@"'
    status, found = run_doctor(before=["bash", "-c", script, "-"])
    (diagnosis,) = found["descriptors"]
    assert (diagnosis["level"], status) == (level, int(level == "error"))
    assert words in diagnosis["found"]
    assert diagnosis["details"]["needed"] == needed_descriptors(1)


@pytest.mark.netns
def test_scarce_shared_memory_and_disk_are_said(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no right to make namespaces")
    for name in ("output", "model", "checkpoints"):
        (tmp_path / name).mkdir()
    mounts = (
        "mount -t tmpfs -o size=64m none /dev/shm && mount -t tmpfs -o size=1m none $0/output && "
        'mount -t tmpfs -o ro none $0/model && mount -t tmpfs -o size=128m none $0/checkpoints && exec "$@"'
    )
    before = ["unshare", "-m", "bash", "-c", mounts, str(tmp_path)]
    status, found = run_doctor(before=before, SAGEMAKER_BASE_DIR=str(tmp_path))
    assert status == 1
    (shared,) = found["shared memory"]
    assert shared["level"] == "warning"
    assert "has 67 MB, 67 MB of it free: a homogeneous job's loader workers" in shared["found"]
    by_folder = {Path(each["details"]["folder"]).name: each for each in found["disk"]}
    assert {name: by_folder[name]["level"] for name in ("output", "model", "checkpoints")} == {
        "output": "error",
        "model": "error",
        "checkpoints": "ok",
    }
    assert "cannot be written to" in by_folder["model"]["found"]


def test_folder_for_temporary_files_that_keeps_nothing_private_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    (diagnosis,) = limits.examine_disk(here(tmp_path))
    assert diagnosis.level is Level.ERROR
    assert "cannot make a private folder" in diagnosis.found


def test_quota_below_the_cores_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cpu_quota", lambda: 0.5)
    first, second = limits.examine_cpus(here(tmp_path))
    assert "0.5 by the quota of the control group" in first.found
    assert second.level is Level.WARNING
    monkeypatch.setattr(limits, "cpu_quota", lambda: 4096.0)
    assert levels(limits.examine_cpus(here(tmp_path))) == [Level.OK]


def test_fewer_cpus_than_the_type_has_are_a_warning(tmp_path: Path) -> None:
    environment = write_cluster(tmp_path, {"a": "127.0.0.1"}, kind="ml.c5.9xlarge")
    flags = ["--cluster-file", str(tmp_path / "cluster.json"), "--host", "a", "--port", "17997"]
    one = min(os.sched_getaffinity(0))
    _, found = run_doctor(*flags, before=["taskset", "-c", str(one)], **environment)
    assert found["cpus"][0]["details"]["affinity"] == 1
    assert worst(found["cpus"]) == "warning"
    assert found["cpus"][1]["found"] == "1 CPUs are usable here, and ml.c5.9xlarge has 36 vCPUs"
    _, found = run_doctor(*flags, HETERO_SIMULATED="1", **environment)
    assert worst(found["cpus"][:1]) == "ok"
    assert not any("vCPUs" in diagnosis["found"] for diagnosis in found["cpus"])
