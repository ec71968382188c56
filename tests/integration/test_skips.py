"""Simulated jobs with poison samples: the same bytes whatever the placement, a list in the report, an end by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.integration.harness import DNN, TORCH_CHAIN, Job, StartJob, chains, data

POISON = (3, 17, 18, 40, 99)
FAULTS = "poison=" + ";".join(map(str, POISON))
FLAGS = ("--endpoints-per-host", "1", "--nproc-per-node", "2")
ARGS = ("--num-samples", "100", "--faults", FAULTS, "--on-sample-error", "skip")
"""100 samples over two ranks: without padding, because each must be requested once in an epoch."""

pytestmark = pytest.mark.timeout(800)  # the first test that asks a shared job also waits for it


def skipped(job: Job) -> list[dict[str, Any]]:
    """Return what the report lists, of all ranks and loaders."""
    loaders = [loader for rank in job.report()["run"]["ranks"] for loader in rank["loaders"]]
    found = [sample for loader in loaders for sample in loader["skips"]]
    assert sum(loader["num_skips"] for loader in loaders) == len(found)
    return found


PLACEMENTS = {
    "none": ([DNN], (), "local"),
    "workers": ([DNN], ("--num-workers", "1"), "local"),
    "one": ([data(1), DNN], (), "algo-1/0"),
    "three": ([data(3), DNN], (), "algo-"),
}
"""Groups, further arguments of torch_chain.py, and how the name of the place begins where samples are skipped."""


def start(start_job: StartJob, name: str) -> Job:
    groups, args, _ = PLACEMENTS[name]
    job = start_job(groups, *FLAGS, script=TORCH_CHAIN, args=[*ARGS, *args])
    assert job.wait() == 0, job.output
    return job


@pytest.fixture(scope="module")
def poisoned(start_shared_job: StartJob) -> dict[str, Job]:
    """Return an ended job without and one with a data host."""
    return {name: start(start_shared_job, name) for name in ("workers", "one")}


def check_skips(job: Job, name: str) -> None:
    """Expect that both ranks got all samples that are not poison, and that the report lists the others."""
    results = [job.result(rank) for rank in range(2)]
    assert [(result["len"], result["steps"]) for result in results] == [(7, 14)] * 2
    assert [len(batch) for batch in results[0]["indices"]] == [len(batch) for batch in results[1]["indices"]]
    delivered = {index for result in results for batch in result["indices"] for index in batch}
    assert delivered == set(range(100)) - set(POISON)

    samples = skipped(job)
    assert sorted((sample["index"], sample["epoch"]) for sample in samples) == sorted(
        (str(index), epoch) for index in POISON for epoch in (0, 1)
    )
    for sample in samples:
        assert sample["host"].startswith(PLACEMENTS[name][2])
        assert sample["exception"].startswith(f"ValueError: sample {sample['index']} is poison, says 0.")
    markdown = (job.directory / "run" / "report.md").read_text()
    assert "## Skipped samples\n\n10 times a sample raised" in markdown
    assert re.search(r"\| `17` +\| +1 \| `.*` +\| `ValueError: sample 17 is poison, says 0\.\d\d`", markdown)
    assert job.output.count("loader augmented skipped sample 17 in epoch 1 on ") == 1


@pytest.mark.fault("F2")
@pytest.mark.parametrize("name", ["workers", "one"])
def test_poison_samples_are_skipped_and_listed(poisoned: dict[str, Job], name: str) -> None:
    check_skips(poisoned[name], name)


@pytest.mark.fault("F2")
def test_poison_samples_are_skipped_alike_for_any_placement(poisoned: dict[str, Job]) -> None:
    assert chains(poisoned["workers"].directory) == chains(poisoned["one"].directory)


@pytest.mark.long
@pytest.mark.parametrize("name", ["none", "three"])
def test_poison_samples_are_skipped_alike_for_other_placements(
    poisoned: dict[str, Job], start_job: StartJob, name: str
) -> None:
    job = start(start_job, name)
    check_skips(job, name)
    assert chains(job.directory) == chains(poisoned["one"].directory)


@pytest.mark.fault("F2")
def test_more_poison_than_is_borne_ends_the_job_and_names_the_samples(start_job: StartJob) -> None:
    job = start_job(
        [data(1), DNN], "--endpoints-per-host", "1", "--nproc-per-node", "1", args=[*ARGS, "--max-skips", "3"]
    )
    assert job.wait() == 34, job.output
    samples = skipped(job)
    names = ", ".join(sample["index"] for sample in samples)
    assert len(samples) == 4
    assert set(names.split(", ")) < set(map(str, POISON))
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2)}
    assert len(first_lines) == 1
    (first_line,) = first_lines
    assert first_line.startswith("HET-34 algo-2: rank 0: data set 'augmented' failed on algo-")
    assert first_line.endswith(f"loader augmented skipped 4 samples, max_skips=3 allows no more: {names}")
    for sample in samples:
        line = (
            f"sample {sample['index']} in epoch 0 on {sample['host']}: ValueError: sample {sample['index']} is poison"
        )
        assert line in job.failure("algo-2")
