"""Simulated jobs with poison samples: the same bytes whatever the placement, a list in the report, an end by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness import DNN, Job, StartJob, data

POISON = (3, 17, 18, 40, 99)
FAULTS = "poison=" + ";".join(map(str, POISON))
FLAGS = ("--endpoints-per-host", "1", "--nproc-per-node", "2")
ARGS = ("--num-samples", "100", "--faults", FAULTS, "--on-sample-error", "skip")
"""100 samples over two ranks: without padding, so that each is asked for once in an epoch."""


def skipped(job: Job) -> list[dict[str, Any]]:
    """Return what the report lists, of all ranks and loaders."""
    loaders = [loader for rank in job.report()["run"]["ranks"] for loader in rank["loaders"]]
    found = [sample for loader in loaders for sample in loader["skips"]]
    assert sum(loader["num_skips"] for loader in loaders) == len(found)
    return found


@pytest.mark.fault("F2")
@pytest.mark.timeout(400)  # four jobs
def test_poison_samples_are_skipped_alike_for_any_placement_and_listed(start_job: StartJob) -> None:
    jobs, chains = {}, {}
    for name, groups, args in (
        ("none", [DNN], ()),
        ("workers", [DNN], ("--num-workers", "2")),
        ("one", [data(1), DNN], ()),
        ("three", [data(3), DNN], ()),
    ):
        jobs[name] = start_job(groups, *FLAGS, args=[*ARGS, *args])
        jobs[name].wait_line("step 1")  # the next one imports while this one ends
    for name, job in jobs.items():
        assert job.wait() == 0, job.output
        results = [job.result(rank) for rank in range(2)]
        chains[name] = tuple(result["chain"] for result in results)
        assert [(result["len"], result["steps"]) for result in results] == [(7, 14)] * 2
        assert [len(batch) for batch in results[0]["indices"]] == [len(batch) for batch in results[1]["indices"]]
        delivered = {index for result in results for batch in result["indices"] for index in batch}
        assert delivered == set(range(100)) - set(POISON)

        samples = skipped(job)
        assert sorted((sample["index"], sample["epoch"]) for sample in samples) == sorted(
            (str(index), epoch) for index in POISON for epoch in (0, 1)
        )
        hosts = {"none": {"local"}, "workers": {"local"}}.get(name)
        assert {sample["host"] for sample in samples} <= (hosts or {f"algo-{number}/0" for number in (1, 2, 3)})
        for sample in samples:
            assert sample["exception"].startswith(f"ValueError: sample {sample['index']} is poison, says 0.")
        markdown = (job.directory / "run" / "report.md").read_text()
        assert "## Skipped samples\n\n10 times a sample raised" in markdown
        assert re.search(r"\| `17` +\| +1 \| `.*` +\| `ValueError: sample 17 is poison, says 0\.\d\d`", markdown)
        assert job.output.count("loader augmented skipped sample 17 in epoch 1 on ") == 1
    assert len(set(chains.values())) == 1, chains


@pytest.mark.fault("F2")
def test_more_poison_than_is_borne_ends_the_job_and_names_the_samples(start_job: StartJob) -> None:
    job = start_job(
        [data(2), DNN], "--endpoints-per-host", "1", "--nproc-per-node", "1", args=[*ARGS, "--max-skips", "3"]
    )
    assert job.wait() == 34, job.output
    samples = skipped(job)
    names = ", ".join(sample["index"] for sample in samples)
    assert len(samples) == 4
    assert set(names.split(", ")) < set(map(str, POISON))
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2, 3)}
    assert len(first_lines) == 1
    (first_line,) = first_lines
    assert first_line.startswith("HET-34 algo-3: rank 0: data set 'augmented' failed on algo-")
    assert first_line.endswith(f"loader augmented skipped 4 samples, max_skips=3 allows no more: {names}")
    for sample in samples:
        line = (
            f"sample {sample['index']} in epoch 0 on {sample['host']}: ValueError: sample {sample['index']} is poison"
        )
        assert line in job.failure("algo-3")
