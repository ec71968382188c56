"""What used to train another model without a word, in whole jobs: with data hosts, without, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.integration.harness import CHAIN, DNN, StartJob, data

TRAPS = CHAIN.with_name("traps.py")


def run(start_job: StartJob, folder: Path, groups: list[str], *args: str) -> tuple[Any, str]:
    folder.mkdir()
    job = start_job(groups, "--endpoints-per-host", "1", script=TRAPS, args=["--output", str(folder), *args])
    assert job.wait() == 0, job.output
    return json.loads((folder / "traps-0.json").read_text()), job.output


def test_traps_are_gone_or_said_with_data_hosts_and_without(start_job: StartJob, tmp_path: Path) -> None:
    here, said_here = run(start_job, tmp_path / "here", [DNN], "--num-workers", "2")
    there, said_there = run(start_job, tmp_path / "there", [data(1), DNN])
    assert here == there  # values, strides, exceptions, and what a resumed loop meets
    assert here["shared"]["split_alike"] == 0
    num_shared = here["shared"]["split_anyhow"]
    assert num_shared > 100
    for said in (said_here, said_there):
        assert said.count(f"subsets of the same 1000 samples (Photos), and {num_shared} samples are in both") == 1
    assert "broken cannot be set on it" in here["refused"]
    met = here["met"]
    assert [each if isinstance(each, str) else "batch" for each in met] == [
        "batch", "DatasetError", "DatasetError", "batch", "batch",
    ]  # fmt: skip
    assert {tuple(each[1]) for each in met if not isinstance(each, str)} == {(48, 1, 12, 3)}
    assert here["resumed"] == met[2:]
