"""Jobs whose trainer group starts over: training continues exactly from the script's last checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hetero.config import Timings
from hetero.control.members.membership import Membership
from tests.support.integration.harness import CHAIN, Job, StartJob, wait_gone

SCRIPT = CHAIN.with_name("checkpointed.py")
DATA = "data_group=ml.c5.9xlarge:1"
ONE_HOST = ([DATA, "dnn_group=ml.p3.2xlarge:1"], 2)
TWO_HOSTS = ([DATA, "dnn_group=ml.p3.2xlarge:2"], 1)


@pytest.fixture
def train(start_job: StartJob, tmp_path: Path) -> Any:
    """Return a function that starts a job with a new folder for checkpoint and results."""
    return trainer(start_job, tmp_path)


def trainer(start_job: StartJob, folder: Path) -> Any:
    """Return a function that starts a job with a new folder for checkpoint and results."""
    output = folder / "results"
    output.mkdir()

    def start(layout: tuple[list[str], int], *flags: str, args: Sequence[str] = (), environment: Any = None) -> Job:
        groups, per_host = layout
        fixed = ["--endpoints-per-host", "1", "--nproc-per-node", str(per_host)]
        args = ["--output", str(output), *args]
        job: Job = start_job(groups, *fixed, *flags, script=SCRIPT, args=args, environment=environment)
        return job

    return start


@dataclass(frozen=True)
class Restarted:
    """A job that was restarted twice, its results, and its endpoints and ranks around the first restart."""

    job: Job
    results: Path
    endpoints: tuple[list[psutil.Process], list[psutil.Process]]
    old_ranks_alive: list[psutil.Process]


@pytest.fixture(scope="module")
def restarted(start_shared_job: StartJob, shared_folder: Path) -> Restarted:
    """Return an ended job whose second rank was killed in the first epoch and raised in the second."""
    train = trainer(start_shared_job, shared_folder)
    # Steps take long enough to look at the ranks between step 5 and the failure.
    args = ["--fail-at", "18", "40", "--how", "kill", "raise", "--sleep-s", "0.005"]
    job = train(TWO_HOSTS, "--job-restarts", "3", args=args)
    job.wait_line("step 5")
    endpoints = job.find("hetero.pool.fork_server")[0].children()
    ranks = job.find("hetero.launch.ranks.rank")
    job.wait_line("goes on after step")
    assert ranks
    assert endpoints
    alive = [rank for rank in ranks if rank.is_running()]
    endpoints_after = job.find("hetero.pool.fork_server")[0].children()
    assert job.wait() == 0, job.output
    return Restarted(job, shared_folder / "results", (endpoints, endpoints_after), alive)


def test_job_restarts_are_counted(restarted: Restarted) -> None:
    assert restarted.job.report()["run"]["events"]["job restarts"] == 2


@pytest.mark.fault("F10")
def test_rank_killed_in_mid_epoch_goes_on_from_the_checkpoint(restarted: Restarted) -> None:
    assert "rank 1 goes on after step 14" in restarted.job.output
    assert "because of HET-30 algo-3: rank 1 killed by SIGKILL" in restarted.job.output


@pytest.mark.fault("F9")
def test_rank_that_raises_in_mid_epoch_goes_on_from_the_checkpoint(restarted: Restarted) -> None:
    assert "rank 0 goes on after step 35" in restarted.job.output
    assert "because of HET-30 algo-3: rank 1: the training script raised RuntimeError" in restarted.job.output


@pytest.mark.fault("F9")
@pytest.mark.fault("F10")
def test_restarted_job_is_fed_what_an_undisturbed_one_is(restarted: Restarted, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--output", str(tmp_path), "--alone"], check=True)
    links = [json.loads((restarted.results / f"rank-{rank}.json").read_text())["link"] for rank in range(2)]
    assert links == json.loads((tmp_path / "undisturbed.json").read_text())


def test_data_hosts_serve_on_through_a_restart(restarted: Restarted) -> None:
    before, after = restarted.endpoints
    assert before == after


def test_what_a_killed_rank_has_started_is_gone_after_the_restart(restarted: Restarted) -> None:
    assert restarted.old_ranks_alive == []


def test_job_ends_with_the_cause_when_restarts_are_used_up(train: Any) -> None:
    job = train(ONE_HOST, "--job-restarts", "1", args=["--fail-at", "10", "12", "--how", "exit", "kill"])
    assert job.wait() == 30, job.output
    (first_line,) = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2)}
    assert first_line.startswith("HET-30 algo-2: rank 1 killed by SIGKILL")
    assert job.report()["run"]["events"]["job restarts"] == 1


def test_wrong_option_ends_the_job_without_a_restart(train: Any) -> None:
    args = ["--fail-at", "2", "--fail-rank", "0", "--how", "usage"]
    job = train((["dnn_group=ml.p3.2xlarge:1"], 1), "--job-restarts", "5", args=args)
    assert job.wait() == 2, job.output
    assert "restart 1" not in job.output


@pytest.mark.fault("F11")
def test_lost_trainer_launcher_ends_the_job_without_a_restart(train: Any, measured: Any) -> None:
    scale = 0.4  # a lease longer than the time until a broken connection counts as a cause
    job = train(
        TWO_HOSTS,
        "--job-restarts",
        "5",
        args=["--sleep-s", "0.02"],
        environment={"HETERO_TIME_SCALE": str(scale)},
    )
    job.wait_line("rank 1 step 5")
    others = [process for host in ("algo-1", "algo-2") for process in job.find(host=host)]
    own = job.find(host="algo-3")
    begin_s = time.monotonic()
    job.find("hetero.cli launch", host="algo-3")[0].send_signal(signal.SIGKILL)
    measured("ranks_gone_s", wait_gone(own))
    # Promised: 10 s after the abort, which comes after a lease and the time to collect causes. 60 s of silence in all.
    wait_gone(others, Timings.scaled(scale).lease_s + Membership.CONSEQUENCE_SETTLE_S + 10.0)
    measured("other_hosts_gone_s", time.monotonic() - begin_s)
    assert job.wait(300.0) != 0, job.output
    assert "restart 1" not in job.output
    assert "algo-3 fell silent" in job.failure("algo-1")
    assert job.failure("algo-2").splitlines()[0] == job.failure("algo-1").splitlines()[0]
