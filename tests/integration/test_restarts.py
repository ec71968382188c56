"""Jobs whose trainer group starts over: training continues exactly from the script's last checkpoint."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from harness import CHAIN, Job, StartJob, wait_gone

from hetero.config import Timings
from hetero.control.membership import Membership

SCRIPT = CHAIN.with_name("checkpointed.py")
DATA = "data_group=ml.c5.9xlarge:1"
ONE_HOST = ([DATA, "dnn_group=ml.p3.2xlarge:1"], 2)
TWO_HOSTS = ([DATA, "dnn_group=ml.p3.2xlarge:2"], 1)

pytestmark = pytest.mark.timeout(300)  # every generation imports torch


@pytest.fixture
def train(start_job: StartJob, tmp_path: Any) -> Any:
    """Return a function that starts a job with a folder of its own for checkpoint and results."""

    def start(layout: tuple[list[str], int], *flags: str, args: Sequence[str] = (), environment: Any = None) -> Job:
        groups, per_host = layout
        output = tmp_path / f"results-{len(list(tmp_path.glob('results-*')))}"
        output.mkdir()
        fixed = ["--endpoints-per-host", "1", "--nproc-per-node", str(per_host)]
        job: Job = start_job(
            groups, *fixed, *flags, script=SCRIPT, args=["--output", str(output), *args], environment=environment
        )
        job.results = output  # type: ignore[attr-defined]
        return job

    return start


def links(job: Any) -> list[str]:
    """Return the last link of each rank's chain."""
    job.directory = job.results
    return [job.result(rank)["link"] for rank in range(2)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the last link of each rank's chain where nothing fails, computed in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    subprocess.run([sys.executable, str(SCRIPT), "--output", str(folder), "--alone"], check=True)
    found: list[str] = json.loads((folder / "undisturbed.json").read_text())
    return found


@pytest.mark.fault("F10")
def test_rank_killed_in_mid_epoch_goes_on_from_the_checkpoint(train: Any, undisturbed: Any) -> None:
    # Killed twice: in the first epoch, and after the restart, in the second.
    job = train(TWO_HOSTS, "--job-restarts", "3", args=["--fail-at", "18", "40"])
    assert job.wait() == 0, job.output
    assert job.report()["run"]["events"]["job restarts"] == 2
    assert "rank 1 goes on after step 14" in job.output
    assert "rank 0 goes on after step 35" in job.output
    assert "because of HET-30" in job.output
    assert links(job) == undisturbed


@pytest.mark.fault("F9")
def test_rank_that_fails_by_itself_goes_on_from_the_checkpoint(train: Any, undisturbed: Any) -> None:
    # It raises in the first epoch, and exits after the restart, in the second.
    job = train(ONE_HOST, "--job-restarts", "3", args=["--fail-at", "18", "40", "--how", "raise", "exit"])
    assert job.wait() == 0, job.output
    assert job.report()["run"]["events"]["job restarts"] == 2
    assert links(job) == undisturbed


def test_data_hosts_serve_on_through_a_restart(train: Any) -> None:
    job = train(ONE_HOST, "--job-restarts", "1", args=["--fail-at", "10", "--sleep-s", "0.005"])
    job.wait_line("step 5")
    before = job.find("hetero.dataplane.endpoint.fork_server")[0].children()
    job.wait_line("goes on after step")
    assert before == job.find("hetero.dataplane.endpoint.fork_server")[0].children()
    assert job.wait() == 0, job.output


def test_job_ends_with_the_cause_when_restarts_are_used_up(train: Any) -> None:
    job = train(TWO_HOSTS, "--job-restarts", "1", args=["--fail-at", "10", "12", "--how", "raise"])
    assert job.wait() == 30, job.output
    first_lines = {job.failure(f"algo-{number}").splitlines()[0] for number in (1, 2, 3)}
    assert first_lines == {"HET-30 algo-3: rank 1: the training script raised RuntimeError: training fails on purpose"}
    assert job.report()["run"]["events"]["job restarts"] == 1


def test_wrong_option_ends_the_job_without_a_restart(train: Any) -> None:
    job = train(ONE_HOST, "--job-restarts", "5", args=["--fail-at", "10", "--how", "usage"])
    assert job.wait() == 2, job.output
    assert "restart 1" not in job.output


@pytest.mark.fault("F11")
def test_lost_trainer_launcher_ends_the_job_without_a_restart(train: Any, measured: Any) -> None:
    scale = 0.4  # a lease longer than the time after which a broken connection counts as a cause
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
    measured("ranks_gone_s", wait_gone(own, 5.0))
    # Promised: 10 s after the abort, which comes after a lease and the time to collect causes; 60 s of silence in all.
    wait_gone(others, Timings.scaled(scale).lease_s + Membership.ECHO_SETTLE_S + 10.0)
    measured("other_hosts_gone_s", time.monotonic() - begin_s)
    assert job.wait(60.0) != 0, job.output
    assert "restart 1" not in job.output
    assert "algo-3 fell silent" in job.failure("algo-1")
    assert job.failure("algo-2").splitlines()[0] == job.failure("algo-1").splitlines()[0]


def test_what_a_killed_rank_has_started_is_gone_after_the_restart(train: Any) -> None:
    job = train(ONE_HOST, "--job-restarts", "1", args=["--fail-at", "10", "--sleep-s", "0.01"])
    job.wait_line("step 5")
    ranks = job.find("hetero.launch.ranks.rank")
    assert ranks
    job.wait_line("goes on after step")
    assert not any(psutil.pid_exists(rank.pid) and rank.is_running() for rank in ranks)
    assert job.wait() == 0, job.output
