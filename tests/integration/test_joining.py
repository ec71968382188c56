"""Data hosts that join a running job and leave it again, as real processes. The batches stay the same, bit for bit."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from harness import CHAIN, Job, StartLauncher, chains, chains_alone, failure

from hetero.errors import ExitCode

LONG = ["--num-samples", "100000", "--step-s", "0.02"]
SHORT = ["--num-samples", "1600", "--epochs", "2", "--step-s", "0.02"]


def started(start_launcher: StartLauncher, args: list[str], *flags: str) -> tuple[Job, Job]:
    """Start a job and wait until it trains. Return trainer and data host."""
    flags = ("--trainer-endpoints", "0", *flags)
    trainer, data = start_launcher("algo-2", *flags, args=args), start_launcher("algo-1", *flags, args=args)
    trainer.wait_line("step 5")
    return trainer, data


def report(trainer: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(next(trainer.directory.rglob("report.json")).read_text())
    return found


@pytest.mark.fault("F33")
def test_host_joins_serves_and_the_batches_are_those_of_one_host(start_launcher: StartLauncher, tmp_path: Path) -> None:
    trainer, data = started(start_launcher, SHORT)
    output = str(tmp_path / "joined")
    joined = start_launcher("algo-3", "--trainer-endpoints", "0", "--output-dir", output, args=SHORT, join="algo-2")
    trainer.wait_line("data host algo-3 has joined the job, in group data_group")
    joined.wait_line("serving with 1 endpoint")
    assert [job.wait() for job in (trainer, data, joined)] == [ExitCode.OK] * 3, trainer.output + joined.output
    assert chains(trainer.directory, 1) == chains_alone(*SHORT)
    found = report(trainer)["run"]
    assert [(host["host"], host["group"], host["instance_type"]) for host in found["joined_hosts"]] == [
        ("algo-3", "data_group", "ml.c5.xlarge")
    ]
    assert 0 < found["joined_hosts"][0]["present_s"] < found["wall_s"]
    assert {usage["host"] for usage in found["hosts"]} == {"algo-1", "algo-2", "algo-3"}
    metrics = json.loads((tmp_path / "joined" / "metrics.json").read_text())
    assert metrics["events"]["batches computed"] > 0


@pytest.mark.fault("F33")
def test_any_host_of_the_job_admits(start_launcher: StartLauncher) -> None:
    trainer, data = started(start_launcher, LONG)
    joined = start_launcher("algo-3", "--trainer-endpoints", "0", args=LONG, join="algo-1")
    trainer.wait_line("data host algo-3 has joined")
    joined.wait_line("serving with 1 endpoint")
    trainer.process.terminate()
    assert [job.wait() for job in (trainer, data, joined)] == [143] * 3


@pytest.mark.fault("F34")
def test_host_that_is_asked_to_stop_drains_and_no_batch_is_computed_twice(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    args = ["--num-samples", "4000", "--epochs", "1", "--step-s", "0.02"]
    trainer, data = started(start_launcher, args)
    joined = start_launcher("algo-3", "--trainer-endpoints", "0", args=args, join="algo-2")
    joined.wait_line("serving with 1 endpoint")
    trainer.wait_line("step 100")
    joined.process.send_signal(signal.SIGTERM)
    assert joined.wait() == 143, joined.output
    trainer.wait_line("data host algo-3 has left the job")
    assert [job.wait() for job in (trainer, data)] == [ExitCode.OK] * 2, trainer.output
    events = report(trainer)["run"]["events"]
    num_ahead = events["batches requested and not delivered"]  # of the next epoch
    assert 500 <= events["batches"] <= 500 + num_ahead
    # A busy machine makes the reader ask a second host for a late batch. Nothing else is computed twice. A host may end
    # before its last second is counted. `tests/chaos/joins.py` counts what each process has computed.
    assert events["batches computed"] - 500 <= events.get("hedges", 0) + num_ahead
    assert chains(trainer.directory, 1) == chains_alone(*args)


@pytest.mark.fault("F40")
def test_host_that_is_killed_costs_no_batch_and_comes_back(start_launcher: StartLauncher, tmp_path: Path) -> None:
    trainer, data = started(start_launcher, SHORT)
    joined = start_launcher("algo-3", "--trainer-endpoints", "0", args=SHORT, join="algo-2")
    joined.wait_line("serving with 1 endpoint")
    joined.process.kill()
    joined.wait()
    again = start_launcher("algo-3", "--trainer-endpoints", "0", args=SHORT, join="algo-2")
    again.wait_line("serving with 1 endpoint")
    assert [job.wait() for job in (trainer, data, again)] == [ExitCode.OK] * 3, trainer.output + again.output
    assert chains(trainer.directory, 1) == chains_alone(*SHORT)


@pytest.mark.attack("A23")
def test_host_without_the_token_does_not_get_in(start_launcher: StartLauncher) -> None:
    trainer, data = started(start_launcher, LONG)
    joined = start_launcher("algo-3", "--trainer-endpoints", "0", args=LONG, join="algo-2", token="wrong-secret")
    assert joined.wait() == ExitCode.AUTHENTICATION, joined.output
    assert "refuses this host's token" in joined.output
    assert "secret" not in joined.output
    trainer.process.terminate()
    assert [job.wait() for job in (trainer, data)] == [143] * 2
    assert "has joined" not in trainer.output


def test_host_with_another_script_or_name_does_not_get_in(start_launcher: StartLauncher, tmp_path: Path) -> None:
    trainer, data = started(start_launcher, LONG)
    other = tmp_path / "other.py"
    other.write_text(CHAIN.read_text() + "\n# changed\n")
    joined = start_launcher("algo-3", script=other, join="algo-2")
    assert joined.wait() == ExitCode.DISAGREEMENT, joined.output
    assert "algo-3 has a training script with digest" in joined.output
    # The machine of algo-1 has this name already.
    token = data.directory / "token"
    same_name = start_launcher("algo-1", "--port", "17802", args=LONG, join="algo-2")
    assert token.is_file()
    assert same_name.wait() == ExitCode.USAGE, same_name.output
    assert "already has a host 'algo-1'" in same_name.output
    trains = start_launcher("algo-4", "--join-group", "dnn_group", args=LONG, join="algo-2")
    assert trains.wait() == ExitCode.USAGE, trains.output
    assert "group 'dnn_group' trains" in trains.output
    trainer.process.terminate()
    assert [job.wait() for job in (trainer, data)] == [143] * 2


def test_host_waits_for_a_job_that_begins_later(start_launcher: StartLauncher) -> None:
    joined = start_launcher("algo-3", "--trainer-endpoints", "0", args=SHORT, join="algo-2")
    joined.wait_line("waiting for the job at algo-2:17801: ")
    trainer, data = started(start_launcher, SHORT)
    joined.wait_line("serving with 1 endpoint")
    assert [job.wait() for job in (trainer, data, joined)] == [ExitCode.OK] * 3


def test_job_that_loads_its_own_data_admits_nobody(start_launcher: StartLauncher, tmp_path: Path) -> None:
    (tmp_path / "cluster-1.json").write_text(json.dumps({"hosts": ["algo-2"]}))
    trainer = start_launcher("algo-2", "--cluster-file", str(tmp_path / "cluster-1.json"), args=LONG)
    trainer.wait_line("step 5")
    joined = start_launcher("algo-3", args=LONG, join="algo-2")
    assert joined.wait() == ExitCode.USAGE, joined.output
    assert "with --trainer-endpoints 1" in joined.output
    trainer.process.terminate()
    assert trainer.wait() == 143


@pytest.mark.fault("F33")
def test_host_that_is_added_to_the_cluster_file_joins(start_launcher: StartLauncher, tmp_path: Path) -> None:
    trainer, data = started(start_launcher, SHORT)
    cluster_file = tmp_path / "cluster.json"
    document = json.loads(cluster_file.read_text())
    document["instance_groups"][0]["hosts"].append("algo-3")
    cluster_file.write_text(json.dumps(document))
    added = start_launcher("algo-3", "--trainer-endpoints", "0", args=SHORT)
    trainer.wait_line("data host algo-3 has joined the job")
    added.wait_line("serving with 1 endpoint")
    assert [job.wait() for job in (trainer, data, added)] == [ExitCode.OK] * 3, trainer.output + added.output
    assert chains(trainer.directory, 1) == chains_alone(*SHORT)


@pytest.mark.fault("F41")
def test_spot_host_may_be_missing_at_the_start_and_has_its_price(start_launcher: StartLauncher) -> None:
    flags = [
        "--trainer-endpoints",
        "1",
        "--spot",
        "data_group=0.01",
        "--price",
        "ml.p3.2xlarge=3",
        "--start-timeout",
        "4",
    ]
    trainer = start_launcher("algo-2", *flags, args=["--num-samples", "80"])
    assert trainer.wait() == ExitCode.DATA_HOSTS_MISSING, trainer.output  # not even one of them came
    trainer = start_launcher("algo-2", *flags, "--start-timeout", "60", args=SHORT)
    data = start_launcher("algo-1", "--trainer-endpoints", "1", "--spot", "data_group=0.01", args=SHORT)
    trainer.wait_line("step 5")
    data.process.kill()
    data.wait()
    assert trainer.wait() == ExitCode.OK, trainer.output
    found = report(trainer)
    assert found["cost"]["hourly"]["value"] == pytest.approx(3.01)
    assert found["cost"]["missing"] == []
    failure_file = trainer.directory / "ml" / "output" / "failure"
    assert not failure_file.exists() or "HET-20" in failure(trainer)  # of the first attempt
