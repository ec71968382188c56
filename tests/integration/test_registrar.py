"""Nodes of AWS Batch as processes: they know only the main node, and find one another through its registrar."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hetero.errors import ExitCode
from tests.support.integration.harness import CHAIN, Job, Start, chains, chains_alone

NETWORK = f"127.{100 + os.getpid() % 100}.8"
ARGS = ["--epochs", "1", "--num-samples", "400"]


def start_node(start: Start, folder: Path, index: int, number: int, *flags: str, **changes: str) -> Job:
    directory = folder / f"node-{index}"
    (directory / "ml").mkdir(parents=True)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text("token-of-the-job-0123456789")
    environment = {
        "AWS_BATCH_JOB_ID": f"job#{index}",
        "AWS_BATCH_JOB_ATTEMPT": "1",
        "AWS_BATCH_JOB_NUM_NODES": str(number),
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
        **({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": f"{NETWORK}.1"} if index else {}),
        "HETERO_GROUPS": f"trainer=GPU:1:1 data=CPU:1:{number - 1}",
        "HETERO_TOKEN_FILE": str(token),
        "HETERO_TIME_SCALE": "0.2",
        "HETERO_WORKSPACE": str(directory / "ml"),
    } | changes
    # Nodes of one machine lack separate addresses.
    command = [sys.executable, "-m", "hetero.cli", "launch", "--host", f"{NETWORK}.{index + 1}", "--port", "17803"]
    command += ["--endpoints-per-host", "1", "--trainer-endpoints", "0", "--nproc-per-node", "1", *flags]
    return start([*command, str(CHAIN), "--", "--output", str(directory), *ARGS], directory, environment)


def test_nodes_register_and_train_as_one_host_alone(start: Start, tmp_path: Path) -> None:
    jobs = {index: start_node(start, tmp_path, index, 3) for index in (2, 0, 1)}
    assert [job.wait() for job in jobs.values()] == [ExitCode.OK] * 3, jobs[0].output + jobs[1].output
    assert "platform: joined job, from the registrar on" in jobs[1].output
    assert chains(jobs[0].directory, 1) == chains_alone(*ARGS)


def test_node_that_does_not_come_is_counted(start: Start, tmp_path: Path) -> None:
    jobs = [start_node(start, tmp_path, index, 3, "--start-timeout", "5") for index in (0, 1)]
    assert jobs[0].wait() == ExitCode.CLUSTER, jobs[0].output
    assert "1 of 3 hosts have not registered yet" in jobs[0].output
    assert jobs[1].wait() == ExitCode.CLUSTER, jobs[1].output


@pytest.mark.attack("A23")
def test_node_without_the_token_is_refused(start: Start, tmp_path: Path) -> None:
    main = start_node(start, tmp_path, 0, 2, "--start-timeout", "6")
    stranger = start_node(start, tmp_path, 1, 2, HETERO_TOKEN_FILE="/dev/null")
    assert stranger.wait() == ExitCode.AUTHENTICATION, stranger.output
    assert main.wait() == ExitCode.CLUSTER, main.output
