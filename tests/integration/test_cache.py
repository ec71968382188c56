"""Jobs whose data set has a cache: the same batches, fewer loads, and nothing left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.integration.harness import CHAIN, DNN, StartJob, data


@pytest.mark.parametrize("groups", [[DNN], [data(2), DNN]], ids=["homogeneous", "heterogeneous"])
def test_batches_are_those_of_a_job_without_a_cache(start_job: StartJob, tmp_path: Path, groups: list[str]) -> None:
    args = ["--output", str(tmp_path)]
    job = start_job(groups, "--endpoints-per-host", "2", script=CHAIN.with_name("kept.py"), args=args)
    assert job.wait() == 0, job.output
    assert (tmp_path / "plain").read_text() == (tmp_path / "kept").read_text()
    events = job.report()["run"]["events"]
    if len(groups) == 1:
        assert "samples taken from the cache" not in events
    else:
        assert events["batches computed"] >= events["batches"]  # also those of the last second
        loaded, taken = events["samples loaded for the cache"], events["samples taken from the cache"]
        assert 100 <= loaded <= 120  # all endpoints share the memory here, two may load a sample at the same time
        assert taken >= 180
        assert events["gathered"] >= 10  # of 39 batches
