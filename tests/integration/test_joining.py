"""Data hosts that join a running job and leave it again, as real processes. The batches stay the same, bit for bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ExitCode
from tests.support.integration.arrays_job import ARRAYS, WITHOUT_TORCH, check_fed_as_alone
from tests.support.integration.harness import Job, StartLauncher, failure

NUM_SAMPLES = 800
FLAGS = [*WITHOUT_TORCH, "--endpoints-per-host", "1", "--trainer-endpoints", "0"]


def args_of(folder: Path) -> list[str]:
    """Return the script's arguments: it trains until there is a file ``enough`` in the folder."""
    args = ["--output", str(folder), "--until", str(folder / "enough")]
    return [*args, "--num-samples", str(NUM_SAMPLES), "--step-s", "0.02"]


def start_two(start: StartLauncher, args: Sequence[str]) -> tuple[Job, Job]:
    """Start a job and wait until it trains. Return trainer and data host."""
    trainer, data = (start(host, *FLAGS, script=ARRAYS, args=args) for host in ("algo-2", "algo-1"))
    trainer.wait_line("step 5")
    return trainer, data


def join(start: StartLauncher, host: str, through: str, args: Sequence[str], *flags: str, **more: Any) -> Job:
    """Start a host that joins the job."""
    return start(host, *FLAGS, *flags, script=more.pop("script", ARRAYS), args=args, join=through, **more)


def report(trainer: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(trainer.directory.rglob("report.json")).read_text())
    return found


@dataclass
class Growth:
    """A job of one trainer host and one data host that other hosts join, or try to."""

    folder: Path
    trainer: Job
    data: Job
    early: Job
    """algo-3, which was there before the job."""
    added: Job
    """algo-4, which was added to the cluster file."""
    killed: Job
    """algo-5, which joined at the data host."""
    again: Job
    """The same host, started again."""
    refused: dict[str, Job] = field(default_factory=dict)


@pytest.fixture(scope="module")
def growth(start_shared_launcher: StartLauncher, shared_folder: Path) -> Growth:
    """Return a job after its end."""
    start, args = start_shared_launcher, args_of(shared_folder)
    early = join(start, "algo-3", "algo-2", args, "--output-dir", str(shared_folder / "joined"))
    early.wait_line("waiting for the job at algo-2:17801: ")
    trainer, data = start_two(start, args)

    other = shared_folder / "other.py"
    other.write_text(ARRAYS.read_text() + "\n# changed\n")
    refused = {
        "token": join(start, "algo-6", "algo-2", args, token="wrong-secret"),
        "script": join(start, "algo-7", "algo-2", args, script=other),
        "name": join(start, "algo-1", "algo-2", args, "--port", "17802"),  # the machine of algo-1 has this name already
        "group": join(start, "algo-8", "algo-2", args, "--join-group", "dnn_group"),
    }
    for job in refused.values():
        job.wait()

    killed = join(start, "algo-5", "algo-1", args)
    killed.wait_line("serving with 1 endpoint")
    killed.process.kill()
    killed.wait()
    again = join(start, "algo-5", "algo-2", args)
    cluster_file = shared_folder / "cluster.json"
    document = json.loads(cluster_file.read_text())
    document["instance_groups"][0]["hosts"].append("algo-4")
    cluster_file.write_text(json.dumps(document))
    added = start("algo-4", *FLAGS, script=ARRAYS, args=args)
    for job in (early, again, added):
        job.wait_line("serving with 1 endpoint")

    trainer.process.terminate()
    for job in (trainer, data, early, again, added):
        assert job.wait() == 128 + signal.SIGTERM, trainer.output + job.output
    return Growth(shared_folder, trainer, data, early, added, killed, again, refused)


@pytest.mark.fault("F33")
@pytest.mark.fault("F40")
def test_hosts_join_and_are_lost_and_the_batches_are_those_of_one_host(growth: Growth) -> None:
    check_fed_as_alone(growth.folder, num_samples=NUM_SAMPLES)


@pytest.mark.fault("F33")
def test_host_that_joins_serves_and_is_in_the_report(growth: Growth) -> None:
    found = report(growth.trainer)["run"]
    joined = {host["host"]: host for host in found["joined_hosts"]}
    assert [(host["group"], host["instance_type"]) for host in joined.values()] == [
        ("data_group", "ml.c5.xlarge")
    ] * len(joined)
    assert 0 < joined["algo-3"]["present_s"] < found["wall_s"]
    assert {"algo-1", "algo-2", "algo-3"} <= {usage["host"] for usage in found["hosts"]}
    metrics = json.loads((growth.folder / "joined" / "metrics.json").read_text())
    assert metrics["events"]["batches computed"] > 0


def test_host_waits_for_a_job_that_begins_later(growth: Growth) -> None:
    waiting, serving = (
        next(at for at, line in enumerate(growth.early.lines) if words in line)
        for words in ("waiting for the job at algo-2:17801: ", "serving with 1 endpoint")
    )
    assert waiting < serving
    assert "data host algo-3 has joined the job, in group data_group" in growth.trainer.output


@pytest.mark.fault("F33")
def test_host_that_is_added_to_the_cluster_file_joins(growth: Growth) -> None:
    assert "data host algo-4 has joined the job" in growth.trainer.output


@pytest.mark.fault("F33")
@pytest.mark.fault("F40")
def test_any_host_admits_and_a_host_that_is_killed_comes_back(growth: Growth) -> None:
    assert "data host algo-5 has joined the job" in growth.trainer.output
    for job in (growth.killed, growth.again):
        assert "serving with 1 endpoint" in job.output
    assert growth.again.process.returncode == 128 + signal.SIGTERM  # as the whole job


@pytest.mark.attack("A23")
def test_host_without_the_token_does_not_get_in(growth: Growth) -> None:
    job = growth.refused["token"]
    assert job.process.returncode == ExitCode.AUTHENTICATION, job.output
    assert "refuses this host's token" in job.output
    assert "secret" not in job.output
    assert "algo-6 has joined" not in growth.trainer.output


@pytest.mark.parametrize(
    ("reason", "code", "words"),
    [
        ("script", ExitCode.DISAGREEMENT, "algo-7 has a training script with digest"),
        ("name", ExitCode.USAGE, "already has a host 'algo-1'"),
        ("group", ExitCode.USAGE, "group 'dnn_group' trains"),
    ],
)
def test_host_with_another_script_name_or_role_does_not_get_in(
    growth: Growth, reason: str, code: ExitCode, words: str
) -> None:
    job = growth.refused[reason]
    assert job.process.returncode == code, job.output
    assert words in job.output


@pytest.mark.fault("F34")
def test_host_that_is_asked_to_stop_drains_and_no_batch_is_computed_twice(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    args = args_of(tmp_path)
    trainer, data = start_two(start_launcher, args)
    joined, stays = (join(start_launcher, host, "algo-2", args) for host in ("algo-3", "algo-4"))
    for job in (joined, stays):
        job.wait_line("serving with 1 endpoint")
    next_step = sum(" step " in line for line in trainer.lines) + 50
    trainer.wait_line(f"step {next_step}")
    joined.process.send_signal(signal.SIGTERM)
    assert joined.wait() == 143, joined.output
    trainer.wait_line("data host algo-3 has left the job")
    (tmp_path / "enough").touch()
    assert [job.wait() for job in (trainer, data, stays)] == [ExitCode.OK] * 3, trainer.output
    events = report(trainer)["run"]["events"]
    num_ahead = events["batches requested and not delivered"]  # of the next epoch
    num_steps = json.loads((tmp_path / "rank-0.json").read_text())["steps"]
    assert num_steps <= events["batches"] <= num_steps + num_ahead
    # A busy machine makes the reader ask a second host for a late batch. Nothing else is computed twice. A host may end
    # before its last second is counted. `tests/chaos/joins.py` counts what each process has computed.
    assert events["batches computed"] - num_steps <= events.get("hedges", 0) + num_ahead
    check_fed_as_alone(tmp_path, num_samples=NUM_SAMPLES)


def test_job_that_loads_its_own_data_admits_nobody(start_launcher: StartLauncher, tmp_path: Path) -> None:
    (tmp_path / "cluster-1.json").write_text(json.dumps({"hosts": ["algo-2"]}))
    flags = [*WITHOUT_TORCH, "--cluster-file", str(tmp_path / "cluster-1.json")]
    trainer = start_launcher("algo-2", *flags, script=ARRAYS, args=args_of(tmp_path))
    trainer.wait_line("step 5")
    joined = start_launcher("algo-3", *WITHOUT_TORCH, script=ARRAYS, args=args_of(tmp_path), join="algo-2")
    assert joined.wait() == ExitCode.USAGE, joined.output
    assert "with --trainer-endpoints 1" in joined.output
    trainer.process.terminate()
    assert trainer.wait() == 143


@pytest.mark.fault("F41")
def test_spot_host_may_be_missing_at_the_start_and_has_its_price(start_launcher: StartLauncher, tmp_path: Path) -> None:
    spot = [*WITHOUT_TORCH, "--endpoints-per-host", "1", "--trainer-endpoints", "1", "--spot", "data_group=0.01"]
    flags = [*spot, "--price", "ml.p3.2xlarge=3", "--start-timeout"]
    args = args_of(tmp_path)
    trainer = start_launcher("algo-2", *flags, "4", script=ARRAYS, args=args)
    assert trainer.wait() == ExitCode.DATA_HOSTS_MISSING, trainer.output  # not even one of them came
    trainer = start_launcher("algo-2", *flags, "60", script=ARRAYS, args=args)
    data = start_launcher("algo-1", *spot, script=ARRAYS, args=args)
    trainer.wait_line("step 5")
    data.process.kill()
    data.wait()
    (tmp_path / "enough").touch()
    assert trainer.wait() == ExitCode.OK, trainer.output
    found = report(trainer)
    assert found["cost"]["hourly"]["value"] == pytest.approx(3.01)
    assert found["cost"]["missing"] == []
    failure_file = trainer.directory / "ml" / "output" / "failure"
    assert not failure_file.exists() or "HET-20" in failure(trainer)  # of the first attempt
