"""Jobs that choose the number of endpoints on their trainer hosts themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.integration.harness import CHAIN, DNN, TORCH_CHAIN, Job, StartJob, audit, chains

NEEDY = ("--emulate-sample-seconds", "0.06", "--emulate-step-seconds", "0.03", "--purity-checks", "0")
"""A batch of 8 takes 0.48 s of a vCPU. Four vCPUs make a batch in 0.12 s, and twelve in 0.04 s."""
STEPS = ["--num-samples", "1600", "--epochs", "1"]


def decisions(job: Job) -> list[str]:
    found: list[str] = job.report()["run"]["decisions"]
    return found


def test_job_that_waits_for_data_adds_endpoints_and_trains_on_the_same_batches(start_job: StartJob) -> None:
    auto = start_job(["data_group=ml.c5.xlarge:1", DNN], *NEEDY, "--trainer-endpoints", "auto", "--audit", args=STEPS)
    assert auto.wait() == 0, auto.output
    # The same batches, whatever was added and removed meanwhile.
    alone = run_alone(auto.directory / "alone")
    assert chains(auto.directory, 1) == chains(alone, 1)
    status, text = audit(auto.directory / "run", alone / "ledgers")
    assert (status, "The same data: " in text) == (0, True), text
    # What it decided is in the log and in the report.
    run = auto.report()["run"]
    first, second = decisions(auto)[:2]
    assert re.search(r": from 0 to [1-8], because a step of ", first)
    assert re.search(r", because a step takes .* endpoints? and .* with 0, and waits ", second)
    assert f"INFO trainer endpoints: {first}" in auto.output
    assert f"- {first}" in (auto.directory / "run" / "report.md").read_text()
    assert run["placement"] == "hybrid"
    assert run["events"]["batches computed"] > run["events"]["batches computed on data hosts"] > 0
    counted = ("endpoint restarts", "endpoint_losses", "failovers", "stuck endpoints")
    assert [run["events"][name] for name in counted] == [0] * 4
    assert "ERROR" not in auto.output


def run_alone(folder: Path) -> Path:
    """Run the script without a job, and keep a ledger."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(CHAIN.parents[3]), "HETERO_AUDIT_DIR": str(folder / "ledgers")}
    subprocess.run([sys.executable, str(CHAIN), "--output", str(folder), *STEPS], env=environment, check=True)
    return folder


def test_job_that_does_not_wait_for_data_adds_nothing(start_job: StartJob) -> None:
    # Steps are long: on a busy machine a batch that is there costs 2 ms, and waits of a hundredth of a step matter.
    flags = ("--emulate-sample-seconds", "0.005", "--emulate-step-seconds", "0.8", "--purity-checks", "0")
    job = start_job(
        ["data_group=ml.c5.2xlarge:1", DNN],
        *flags,
        "--trainer-endpoints",
        "auto",
        args=["--num-samples", "384", "--epochs", "1"],
    )
    assert job.wait() == 0, job.output
    (only,) = decisions(job)
    assert ": stays at 0, because a step of " in only
    assert job.report()["run"]["placement"] == "heterogeneous"


def test_trainer_host_without_the_data_adds_an_endpoint_that_is_not_used(start_job: StartJob) -> None:
    job = start_job(
        ["data_group=ml.c5.xlarge:1", DNN],
        *NEEDY,
        "--trainer-endpoints",
        "auto",
        args=[*STEPS, "--faults", "by_host=1"],
    )
    assert job.wait() == 0, job.output
    assert "endpoint algo-2/0 joined later and is not used" in job.output
    assert len(decisions(job)) == 1, "nothing is measured until the ranks use what was added"


@pytest.mark.long
def test_two_trainer_hosts_run_the_number_that_the_first_decides(start_job: StartJob) -> None:
    job = start_job(
        ["data_group=ml.c5.xlarge:1", "dnn_group=ml.p3.2xlarge:2"],
        *NEEDY,
        "--trainer-endpoints",
        "auto",
        "--nproc-per-node",
        "1",
        script=TORCH_CHAIN,
        args=["--gloo", *STEPS],
    )
    assert job.wait() == 0, job.output
    added = re.search(r": from 0 to ([1-8]), because a step of ", decisions(job)[0])
    assert added is not None
    assert f"trainer endpoints: from 0 to {added[1]}, as algo-2 decided" in job.output
