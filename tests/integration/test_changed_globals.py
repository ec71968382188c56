"""Simulated jobs whose main() changes a global that the data set reads: no other samples without a word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero.errors import ExitCode
from tests.support.integration.harness import DNN, Job, StartJob, data

SCRIPT = Path(__file__).parent / "scripts" / "changed_globals.py"


@pytest.fixture(scope="module")
def changed(start_shared_job: StartJob) -> Job:
    """Return an ended job with a data host: the data set first has the value as an argument, then reads the global."""
    job = start_shared_job(
        [data(1), DNN], "--endpoints-per-host", "1", script=SCRIPT, args=["by_argument", "by_global"]
    )
    assert job.wait() == ExitCode.DISAGREEMENT, job.output
    return job


def test_changed_global_with_data_hosts_ends_the_job_and_is_named(changed: Job) -> None:
    first, second, *_ = changed.failure("algo-2").splitlines()
    assert first.startswith("HET-11 algo-2: rank 0: global SCALE has another value on algo-1/0 than in the rank")
    assert second.strip() == "SCALE: 0.5 in the rank; 1.0 after the import"
    assert "by_global(..., scale=...)" in changed.output
    assert "by_global: the sum is" not in changed.output


def test_changed_global_as_an_argument_with_data_hosts_works(changed: Job) -> None:
    output = changed.output[: changed.output.index("by_argument is done")]
    assert output.count("by_argument: the sum is 414") == 2
    told = set(re.findall(r"global (\w+) has another value", output))
    assert told == {"PID", "STARTED_S"}, "they do differ, and the script does not change them"
    assert output.count("has another value") == 2
    assert "WARNING hetero" not in output
    assert "are not compared" not in output


def test_changed_global_with_workers_that_import_the_script_ends_the_job_and_is_named(start_job: StartJob) -> None:
    job = start_job([DNN], script=SCRIPT, args=["by_global", "--num-workers", "1"])
    assert job.wait() == ExitCode.DISAGREEMENT, job.output
    assert "global SCALE has another value on loader worker 0 than in the rank" in job.failure("algo-1").splitlines()[0]
