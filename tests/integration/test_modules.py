"""Jobs whose script is a module of a package, as with ``python -m``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.integration.harness import CHAIN, DNN, StartJob


@pytest.mark.parametrize("groups", [["data_group=ml.c5.xlarge:1", DNN], [DNN]], ids=["data host", "own workers"])
def test_module_imports_its_neighbours_in_ranks_endpoints_and_workers(
    start_job: StartJob, monkeypatch: pytest.MonkeyPatch, groups: list[str]
) -> None:
    monkeypatch.chdir(CHAIN.parent)
    job = start_job(
        groups,
        *("--endpoints-per-host", "1", "--nproc-per-node", "1", "-m"),
        script=Path("packaged.train"),
        args=["--port", "18181", "--n", "4", "--", "-m"],  # torchrun and its abbreviations have options of these names
        environment={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert job.wait() == 0, job.output
    found = json.loads(job.wait_line("FACTS").partition("FACTS ")[2])
    assert found == {
        "total": sum(index * index for index in range(24)),
        "name": "packaged.train",
        "package": "packaged",
        "arguments": ["--port", "18181", "--n", "4", "--", "-m"],
    }
    report = json.loads((job.directory / "run" / "report.json").read_text())
    assert "-m packaged.train --port 18181" in json.dumps(report)
