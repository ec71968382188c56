"""Vertex AI: the environments of its replicas, and what is wrong in others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.cluster import Role, find_platform
from hetero.cluster.platforms.vertex import Vertex
from hetero.errors import ClusterError
from tests.support.platforms import changed

POOLS = {
    "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
    "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "cmle-training-workerpool1-ab-1:2222"],
    "workerpool2": [f"cmle-training-workerpool2-ab-{number}:2222" for number in range(3)],
}
MACHINES = [
    {"machine_type": "n1-standard-16", "accelerator_type": "NVIDIA_TESLA_V100", "accelerator_count": 4},
    {"machine_type": "n1-standard-16", "accelerator_type": "NVIDIA_TESLA_V100", "accelerator_count": 4},
    {"machine_type": "n2-highcpu-32"},
]


def spec(pool: str = "workerpool0", index: object = 0, **changes: Any) -> str:
    job = {"worker_pool_specs": [{"machine_spec": machine, "replica_count": 1} for machine in MACHINES]}
    content = {
        "cluster": POOLS,
        "environment": "cloud",
        "task": {"type": pool, "index": index, "trial": ""},
        "job": json.dumps(job),
    }
    return json.dumps({name: value for name, value in {**content, **changes}.items() if value is not None})


def replica(pool: str = "workerpool0", index: object = 0, **changes: Any) -> dict[str, str]:
    return {
        "CLUSTER_SPEC": spec(pool, index, **changes),
        "CLOUD_ML_JOB_ID": "1234567890",
        "AIP_MODEL_DIR": "gs://bucket/model/",
        "TF_CONFIG": "{}",
    }


def names(pool: str) -> tuple[str, ...]:
    return tuple(host.partition(":")[0] for host in POOLS[pool])


@pytest.mark.parametrize(
    ("pool", "index"),
    [(pool, index) for pool, hosts in POOLS.items() for index in range(len(hosts))],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_replica_finds_its_place(pool: str, index: int, as_text: bool) -> None:
    platform = find_platform(replica(pool, str(index) if as_text else index))
    cluster = platform.read_cluster()
    assert platform.name == "vertex"
    assert [(each.name, each.hosts, each.role) for each in cluster.groups] == [
        ("workerpool0", names("workerpool0"), Role.TRAINER),
        ("workerpool1", names("workerpool1"), Role.TRAINER),
        ("workerpool2", names("workerpool2"), Role.DATA),
    ]
    assert cluster.current_host == names(pool)[index]
    assert platform.job_id(cluster) == "vertex-1234567890"


def test_types_are_those_of_the_machines() -> None:
    cluster = Vertex(replica()).read_cluster()
    types = [each.instance_type for each in cluster.groups]
    assert types == ["n1-standard-16+GPU:4", "n1-standard-16+GPU:4", "n2-highcpu-32"]


@pytest.mark.parametrize(
    "job",
    [
        {"workerPoolSpecs": [{"machineSpec": {"machineType": "a2-highgpu-1g", "acceleratorCount": "1"}}]},
        {"worker_pool_specs": [{"machine_spec": {"machine_type": "a2-highgpu-1g"}}, "x", {"machine_spec": []}]},
        {"worker_pool_specs": [{"machine_spec": {"machine_type": "g2-standard-4", "accelerator_count": "x"}}]},
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_forms_of_the_job(job: dict[str, Any], as_text: bool) -> None:
    cluster = Vertex(replica(job=json.dumps(job) if as_text else job)).read_cluster(roles=["workerpool1=trainer"])
    assert cluster.groups[0].instance_type.startswith(("a2-", "g2-"))
    assert [each.role for each in cluster.groups] == [Role.TRAINER, Role.TRAINER, Role.DATA]


@pytest.mark.parametrize("job", ["not JSON", "[]", "{}", None, "[" * 100_000])
def test_job_that_cannot_be_read_gives_no_types(job: str | None) -> None:
    roles = ["workerpool1=trainer", "workerpool2=data"]
    cluster = Vertex(replica(job=job)).read_cluster(roles=roles)
    assert {each.instance_type for each in cluster.groups} == {""}


def test_homogeneous_job_has_trainers_only() -> None:
    pools = {name: POOLS[name] for name in ("workerpool0", "workerpool1")}
    cluster = Vertex(replica(cluster=pools)).read_cluster()
    assert {each.role for each in cluster.groups} == {Role.TRAINER}


def test_pool_0_may_be_told_to_preprocess() -> None:
    cluster = Vertex(replica()).read_cluster(roles=["workerpool0=data"])
    assert cluster.groups[0].role is Role.DATA


def test_folders_are_mounted_buckets_or_local() -> None:
    folders = Vertex(replica()).folders
    assert (folders.model, folders.checkpoints) == (Path("/gcs/bucket/model"), Path("/workspace/checkpoints"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[]", "expected: an object"),
        (spec(cluster=None), "cluster is None"),
        (spec(cluster=[]), r"cluster is \[\]"),
        (spec(cluster={}), "cluster is {}"),
        (spec(cluster={"chief": ["a:1"]}), "cluster is .*'chief'"),
        (spec(cluster={"workerpool0": []}), "workerpool0 and others"),
        (spec(cluster={"workerpool0": "a:1"}), "workerpool0 and others"),
        (spec(cluster={"workerpool0": ["a b:1"]}), "a host name or address"),
        (spec(cluster={**POOLS, "workerpool2": POOLS["workerpool1"]}), "which group 'workerpool1' also has"),
        (spec(task=None), "task is {}"),
        (spec(task={"type": "workerpool7", "index": 0}), "task is .*workerpool7"),
        (spec("workerpool1", 2), "the pool and the index of a host"),
        (spec("workerpool1", -1), "the pool and the index"),
        (spec("workerpool1", "x"), "the pool and the index"),
        (spec("workerpool1", None), "the pool and the index"),
    ],
)
def test_wrong_environment_is_one_clear_sentence(text: str, message: str) -> None:
    environ = changed(replica(), CLUSTER_SPEC=text)
    assert Vertex(environ).is_here()
    with pytest.raises(ClusterError, match=message):
        Vertex(environ).read_cluster()


@pytest.mark.parametrize("missing", ["CLUSTER_SPEC", "CLOUD_ML_JOB_ID"])
def test_other_places_are_not_vertex(missing: str) -> None:
    assert not Vertex(changed(replica(), **{missing: None})).is_here()
