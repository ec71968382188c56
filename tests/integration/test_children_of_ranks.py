"""Processes that a rank starts: with data hosts only ranks get batches, and nothing is idle without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.integration.harness import DNN, Job, StartJob, data

SCRIPT = """
import os

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


def permitted(index, words):
    list(torch.utils.data.DataLoader(range(4), num_workers=1))
    os.environ.pop("HETERO_LAUNCHER")
    loaded(index, words)


def main():
    try:
        torch.multiprocessing.spawn(loaded, args=("is refused",))
    except torch.multiprocessing.ProcessRaisedException as error:
        print("loaded:", error, flush=True)
    torch.multiprocessing.spawn(permitted, args=("is done",))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob, shared_folder: Path) -> Job:
    """Return an ended job with a data host, whose rank started two processes with mp.spawn in turn."""
    script = shared_folder / "script.py"
    script.write_text(SCRIPT)
    job = start_shared_job([data(1), DNN], "--endpoints-per-host", "1", script=script)
    assert job.wait() == 0, job.output
    return job


def test_child_of_a_rank_that_takes_batches_fails_and_says_how_to_start_it(job: Job) -> None:
    text = job.output[job.output.index("loaded: ") :]
    assert "a process that a rank has started requests batches" in text
    assert "--nproc-per-node N" in text
    assert "is refused" not in job.output


def test_job_whose_data_hosts_made_nothing_says_so_at_its_end(job: Job) -> None:
    assert "child 0 is done" in job.output
    assert "ERROR The data host computed no batch: idle, and billed." in job.output
    text = next((job.directory / "run").rglob("report.md")).read_text()
    assert text.splitlines()[2].startswith("The data host computed no batch")
