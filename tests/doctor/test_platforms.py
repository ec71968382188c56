"""What the doctor says of a platform."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.cluster.platforms import slurm
from hetero.doctor import Level
from hetero.doctor.cluster import examine_platform
from tests.support.doctor import here

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "cpu1",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "gpu",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "cpu",
    "SLURM_STEP_ID": "0",
    "SLURMD_NODENAME": "gpu1",
}
POD = {
    "JOBSET_NAME": "photos",
    "REPLICATED_JOB_NAME": "train",
    "JOB_COMPLETION_INDEX": "0",
    "HETERO_GROUPS": "train=GPU:8:1",
}


def found(folder: Path, environ: dict[str, str]) -> list[tuple[Level, str]]:
    return [(each.level, each.found) for each in examine_platform(here(folder, environ))]


@pytest.mark.parametrize(
    ("config", "script", "expected"),
    [
        (
            "KillWait                = 30 sec\nSchedulerParameters     = (null)\n",
            "#SBATCH --no-kill\n",
            ["KillWait of this"],
        ),
        ("KillWait = 120 sec\nSchedulerParameters = bf_interval=30\n", "#SBATCH --nodes=1 -k\n", []),
        ("KillWait = 120 sec\n", "#!/bin/bash\nsrun hetero launch train.py # --no-kill\n", ["no --no-kill"]),
        ("SchedulerParameters = disable_hetero_steps,x=1\n", "#SBATCH --no-kill\n", ["disable_hetero_steps"]),
        ("", "", []),
    ],
)
def test_slurm_settings_that_harm_a_job_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: str, script: str, expected: list[str]
) -> None:
    monkeypatch.setattr(slurm, "_output", lambda *command: config if "config" in command else script)
    first, *others = found(tmp_path, SLURM)
    assert first == (Level.OK, "slurm, which gives a job 30 s to stop")
    assert [level for level, _ in others] == [Level.WARNING] * len(expected)
    assert all(text in sentence for text, (_, sentence) in zip(expected, others, strict=True))


def test_program_that_is_not_there_or_fails_says_nothing(tmp_path: Path) -> None:
    assert slurm._output("no-such-program-here") == ""
    assert slurm._output("false") == ""
    assert slurm._output("sh", "-c", "echo x") == "x\n"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"HETERO_GRACE_S": "120"}, []),
        ({}, [(Level.WARNING, "HETERO_GRACE_S is not set")]),
    ],
)
def test_pods_are_examined(tmp_path: Path, changes: dict[str, str], expected: list[tuple[Level, str]]) -> None:
    _, *others = found(tmp_path, {**POD, **changes})
    assert [level for level, _ in others] == [level for level, _ in expected]
    assert all(sentence.startswith(text) for (_, text), (_, sentence) in zip(expected, others, strict=True))


def test_pod_without_a_headless_service_is_warned_of(tmp_path: Path) -> None:
    environ = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "photos-node-0-0", "HETERO_GRACE_S": "60"}
    assert found(tmp_path, environ)[-1][1].startswith("the name photos-node-0-0 of this pod has no subdomain")


def test_vertex_does_not_document_its_ports(tmp_path: Path) -> None:
    environ = {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0", "index": 0}}'}
    (_, second) = found(tmp_path, {**environ, "CLOUD_ML_JOB_ID": "1"})
    assert second[1].startswith("Vertex AI does not document which ports are open")


def test_no_platform_is_no_problem(tmp_path: Path) -> None:
    assert found(tmp_path, {}) == [(Level.OK, "no job of a platform runs here")]


BATCH = {
    "AWS_BATCH_JOB_ID": "job#1",
    "AWS_BATCH_JOB_NUM_NODES": "3",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.1.17",
    "HETERO_GROUPS": "trainer=GPU:8:1 data=CPU:32:2",
}


def test_node_of_aws_batch_names_the_main_node_and_has_no_problem(tmp_path: Path) -> None:
    snapshot = here(tmp_path, BATCH)
    assert (snapshot.hosts, snapshot.cluster_problem) == (("10.0.1.17",), "")
    assert (Level.OK, "a node of group data; 3 nodes register with the main node 10.0.1.17") in found(tmp_path, BATCH)


def test_main_node_of_aws_batch_knows_that_it_is_the_one(tmp_path: Path) -> None:
    texts = [text for _, text in found(tmp_path, BATCH | {"AWS_BATCH_JOB_NODE_INDEX": "0"})]
    assert "a node of group trainer; 3 nodes register with this node, the main node" in texts


def test_wrong_environment_of_aws_batch_is_a_problem_of_the_description(tmp_path: Path) -> None:
    snapshot = here(tmp_path, BATCH | {"HETERO_GROUPS": "trainer=GPU:8:1"})
    assert "has 1 hosts, and the job has 3 nodes" in snapshot.cluster_problem
    assert examine_platform(snapshot)
