"""Processes that a rank starts: with data hosts only ranks get batches, and nothing is idle without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import DNN, Job, StartJob, data

SCRIPT = """
import concurrent.futures, multiprocessing, os, time

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
    try:
        torch.multiprocessing.spawn(loaded, args=("is refused",))
    except torch.multiprocessing.ProcessRaisedException as error:
        print("loaded:", error, flush=True)
    torch.multiprocessing.spawn(waiting, args=("is done",))
    torch.multiprocessing.spawn(permitted, args=("is done",))


if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def job(start_shared_job: StartJob, shared_folder: Path) -> Job:
    """Return an ended job with a data host, whose rank started three processes with mp.spawn in turn."""
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


def test_child_of_a_rank_that_waits_for_others_has_said_what_it_is(job: Job) -> None:
    pattern = r"a rank of the job started this process \((\S+)\) with mp.spawn. It is not a rank"
    named = re.findall(pattern, job.output)
    assert "SpawnProcess-2" in named
    # Other processes, such as torch's loader processes, are not meant. Their names have two numbers.
    assert sorted(set(named)) == sorted(named)
    assert set(named) <= {"SpawnProcess-1", "SpawnProcess-2", "SpawnProcess-3"}
    assert job.output.count("It is not a rank") == len(named)


def test_job_whose_data_hosts_made_nothing_says_so_at_its_end(job: Job) -> None:
    assert "child 0 is done" in job.output
    assert "ERROR The data host computed no batch: idle, and billed." in job.output
    text = next((job.directory / "run").rglob("report.md")).read_text()
    assert text.splitlines()[2].startswith("The data host computed no batch")
