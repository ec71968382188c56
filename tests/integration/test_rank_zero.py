"""Ranks of torch meet at a store in rank 0. What if rank 0 begins later or ends sooner than others?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.integration.harness import CHAIN, StartJob

SCRIPT = CHAIN.with_name("rank_zero.py")
TWO_HOSTS = ["dnn_group=ml.p3.2xlarge:2"]


@pytest.mark.parametrize("case", [pytest.param("destroyed", marks=pytest.mark.long), "undestroyed"])
def test_rank_0_that_ends_before_others_leaves_them_to_end_well(start_job: StartJob, tmp_path: Path, case: str) -> None:
    job = start_job(TWO_HOSTS, script=SCRIPT, args=[case, str(tmp_path)])
    assert job.wait() == 0, job.output
    assert "rank 1 has ended well" in job.output


def test_rank_0_that_begins_late_is_waited_for(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(["dnn_group=ml.p3.2xlarge:1"], "--nproc-per-node", "2", script=SCRIPT, args=["late", str(tmp_path)])
    assert job.wait() == 0, job.output


@pytest.mark.fault("F9")
def test_rank_0_that_fails_is_the_cause_and_not_the_store_that_is_lost_with_it(
    start_job: StartJob, tmp_path: Path
) -> None:
    job = start_job(TWO_HOSTS, script=SCRIPT, args=["fails", str(tmp_path)])
    assert job.wait() == 30, job.output
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2)}
    assert first_lines == {"HET-30 algo-1: rank 0 exited with 7"}, job.output
