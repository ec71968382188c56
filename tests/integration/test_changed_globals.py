"""Simulated jobs whose main() changes a global that the data set reads: no other samples without a word."""

from __future__ import annotations

import re
from pathlib import Path

from harness import DNN, StartJob, data

from hetero.errors import ExitCode

SCRIPT = Path(__file__).parent / "scripts" / "changed_globals.py"


def test_changed_global_with_data_hosts_ends_the_job_and_is_named(start_job: StartJob) -> None:
    job = start_job([data(2), DNN], "--endpoints-per-host", "1", script=SCRIPT)
    assert job.wait() == ExitCode.DISAGREEMENT, job.output
    first, second, *_ = job.failure("algo-3").splitlines()
    assert first.startswith("HET-11 algo-3: rank 0: global SCALE has another value on algo-1/0 than in the rank")
    assert second.strip().startswith("SCALE: 0.5 in the rank; changed by main() in changed_globals.py:")
    assert "by_global(..., scale=...)" in job.output
    assert "the sum is" not in job.output


def test_changed_global_as_an_argument_with_data_hosts_works(start_job: StartJob) -> None:
    job = start_job([data(2), DNN], "--endpoints-per-host", "1", script=SCRIPT, args=["--as-argument"])
    assert job.wait() == 0, job.output
    assert job.output.count("the sum is 414") == 2
    told = set(re.findall(r"global (\w+) has another value", job.output))
    assert told == {"PID", "STARTED_S"}, "they do differ, and no line changes them"
    assert job.output.count("has another value") == 2
    assert "WARNING hetero" not in job.output
    assert "are not compared" not in job.output


def test_changed_global_with_workers_that_import_the_script_ends_the_job_and_is_named(start_job: StartJob) -> None:
    job = start_job([DNN], script=SCRIPT, args=["--num-workers", "2"])
    assert job.wait() == ExitCode.DISAGREEMENT, job.output
    assert "global SCALE has another value on loader worker 0 than in the rank" in job.failure("algo-1").splitlines()[0]
