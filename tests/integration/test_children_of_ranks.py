"""Processes that a rank starts: with data hosts only ranks get batches, and nothing is idle without a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import DNN, StartJob, data

SCRIPT = """
import concurrent.futures, multiprocessing, os, sys, time

import torch.multiprocessing
import torch.utils.data

import hetero
from hetero.torch import DataLoader


@hetero.dataset
def numbers():
    return list(range(40))


def loaded(index, words):
    assert [batch.tolist() for batch in DataLoader(numbers(), batch_size=20)] == [[*range(20)], [*range(20, 40)]]
    print(f"child {index} {words}", flush=True)


def waiting(index, words):
    list(torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="spawn"))
    concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")).submit(abs, -1).result()
    time.sleep(1)


def permitted(index, words):
    list(torch.utils.data.DataLoader(range(4), num_workers=1))
    os.environ.pop("HETERO_LAUNCHER")
    loaded(index, words)


def main():
    torch.multiprocessing.spawn(globals()[sys.argv[1]], args=("is done",), nprocs=2)


if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_child_of_a_rank_that_takes_batches_fails_and_says_how_to_start_it(start_job: StartJob, script: Path) -> None:
    job = start_job([data(1), DNN], "--endpoints-per-host", "1", script=script, args=["loaded"])
    assert job.wait() == 30, job.output
    assert "a process that a rank has started requests batches" in job.output
    assert "--nproc-per-node N" in job.output
    assert "child 0 is done" not in job.output


def test_child_of_a_rank_that_waits_for_others_has_said_what_it_is(start_job: StartJob, script: Path) -> None:
    job = start_job([DNN], script=script, args=["waiting"])
    assert job.wait() == 0, job.output
    for process in ("SpawnProcess-1", "SpawnProcess-2"):
        assert f"a rank of the job started this process ({process}) with mp.spawn. It is not a rank" in job.output
    assert job.output.count("It is not a rank") == 2  # other processes, such as torch's loader processes, are not meant


def test_job_whose_data_hosts_made_nothing_says_so_at_its_end(start_job: StartJob, script: Path) -> None:
    job = start_job([data(1), DNN], "--endpoints-per-host", "1", script=script, args=["permitted"])
    assert job.wait() == 0, job.output
    for index in range(2):
        assert f"child {index} is done" in job.output
    assert "ERROR The data host computed no batch: idle, and billed." in job.output
    text = next((job.directory / "run").rglob("report.md")).read_text()
    assert text.splitlines()[2].startswith("The data host computed no batch")
