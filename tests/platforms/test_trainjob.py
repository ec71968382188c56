"""Kubeflow TrainJob (Trainer v2): the environments of its pods, and what is wrong in others."""

from __future__ import annotations

import pytest

from hetero.cluster import Role, find_platform
from hetero.cluster.platforms.trainjob import TrainJob
from hetero.errors import ClusterError
from tests.support.platforms import changed, jobset_variables

GROUPS = "dnn=GPU:8:2 data=CPU:32:3"


def pod(index: int = 0, job: str = "photos", **changes: str | None) -> dict[str, str]:
    """Return the variables of a pod that trains, with the runtime ``torch-distributed`` of Kubeflow."""
    environ = {
        "PET_NNODES": "3",
        "PET_NPROC_PER_NODE": "auto",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{job}-node-0-0.{job}",
        "PET_MASTER_PORT": "29400",
        "JOB_COMPLETION_INDEX": str(index),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }
    return changed(environ, **changes)


def rendered_pod(group: str, index: int, **changes: str | None) -> dict[str, str]:
    """Return the variables of a pod with the runtime that `hetero render trainjob` makes."""
    environ = {
        **jobset_variables(group, index, GROUPS),
        **({} if group == "data" else pod(index, PET_NNODES="2", PET_MASTER_ADDR="photos-dnn-0-0.photos")),
    }
    return changed(environ, **changes)


@pytest.mark.parametrize("job", ["photos", "photos-0", "a-node-0-0"])
@pytest.mark.parametrize("index", range(3))
def test_pod_finds_the_pods_that_train(index: int, job: str) -> None:
    platform = find_platform(pod(index, job))
    cluster = platform.read_cluster()
    assert platform.name == "trainjob"
    (group,) = cluster.groups
    assert (group.name, group.role) == ("trainer", Role.TRAINER)
    assert group.hosts == tuple(f"{job}-node-0-{number}.{job}" for number in range(3))
    assert cluster.current_host == f"{job}-node-0-{index}.{job}"
    assert [host.name for host in cluster.hosts].index(cluster.current_host) == index


@pytest.mark.parametrize(("job", "expected"), [("photos", "photos"), ("photos-0", "photos-0")])
def test_job_is_named_after_its_pods(job: str, expected: str) -> None:
    platform = find_platform(pod(1, job))
    assert platform.job_id(platform.read_cluster()) == expected


@pytest.mark.parametrize(("group", "index"), [("dnn", 0), ("dnn", 1), ("data", 0), ("data", 1), ("data", 2)])
def test_runtime_of_render_has_all_groups(group: str, index: int) -> None:
    platform = find_platform(rendered_pod(group, index))
    cluster = platform.read_cluster()
    assert [(each.name, each.hosts, each.role) for each in cluster.groups] == [
        ("dnn", tuple(f"photos-dnn-0-{number}.photos" for number in range(2)), Role.TRAINER),
        ("data", tuple(f"photos-data-0-{number}.photos" for number in range(3)), Role.DATA),
    ]
    assert cluster.current_host == f"photos-{group}-0-{index}.photos"
    assert platform.job_id(cluster) == "photos-0"
    assert platform.kill_after_s == 120.0


def test_restart_is_another_job() -> None:
    platform = find_platform(rendered_pod("dnn", 0, JOBSET_RESTART_ATTEMPT="2"))
    assert platform.job_id(platform.read_cluster()) == "photos-2"


def test_folders_are_those_of_a_pod() -> None:
    folders = find_platform(pod(HETERO_WORKSPACE="/mnt/photos")).folders
    assert str(folders.checkpoints) == "/mnt/photos/checkpoints"
    assert str(folders.failure) == "/dev/termination-log"


@pytest.mark.parametrize(
    ("changes", "hosts"),
    [
        ({"PET_NNODES": "1:3"}, 3),  # torchrun's form of an elastic job
        ({"PET_NNODES": "1", "PET_MASTER_ADDR": None}, 1),
        ({"PET_NNODES": "1", "PET_MASTER_ADDR": "10.0.0.7"}, 1),
        ({"PET_MASTER_ADDR": "photos-node-0-0"}, 3),
        ({"PET_MASTER_ADDR": "photos-node-0-0.photos.team.svc.cluster.local"}, 3),
        ({"PET_NPROC_PER_NODE": "8"}, 3),
        ({"PET_MASTER_PORT": None}, 3),
        ({"PET_NNODES": "4096"}, 4096),
    ],
)
def test_forms_of_a_trainjob(changes: dict[str, str | None], hosts: int) -> None:
    assert len(TrainJob(pod(**changes)).read_cluster().hosts) == hosts


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PET_NNODES": "many"}, "PET_NNODES is 'many'"),
        ({"PET_NNODES": ""}, "PET_NNODES is ''"),
        ({"PET_NNODES": "0"}, "PET_NNODES is '0'"),
        ({"PET_NNODES": "-3"}, "PET_NNODES is '-3'"),
        ({"PET_NNODES": "4097"}, "PET_NNODES is '4097'"),
        ({"PET_NNODES": "9999999"}, "PET_NNODES is '9999999'"),
        ({"PET_NNODES": "٣"}, "PET_NNODES is"),
        ({"PET_NODE_RANK": "x"}, "PET_NODE_RANK is 'x'"),
        ({"PET_NODE_RANK": ""}, "PET_NODE_RANK is not set"),
        ({"PET_NODE_RANK": "-1"}, "PET_NODE_RANK is '-1'"),
        ({"PET_NODE_RANK": "3"}, "PET_NODE_RANK is 3, and PET_NNODES 3"),
        ({"PET_MASTER_ADDR": None}, "PET_MASTER_ADDR is ''\n.*\n.*hetero render trainjob"),
        ({"PET_MASTER_ADDR": "10.0.0.7"}, "PET_MASTER_ADDR is '10.0.0.7'"),
        ({"PET_MASTER_ADDR": "a/b-0.c"}, "PET_MASTER_ADDR is 'a/b-0.c'"),
    ],
)
def test_wrong_environment_is_one_clear_sentence(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ClusterError, match=message) as caught:
        TrainJob(pod(**changes)).read_cluster()
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HETERO_GROUPS": "dnn"}, "expected NAME=TYPE:COUNT"),
        ({"REPLICATED_JOB_NAME": "node"}, "'node', and HETERO_GROUPS has dnn, data"),
        ({"JOB_INDEX": "1"}, "several replicas"),
        ({"JOB_COMPLETION_INDEX": None}, "JOB_COMPLETION_INDEX is not set"),
        ({"JOB_COMPLETION_INDEX": "2"}, "which is not among the hosts"),
    ],
)
def test_wrong_environment_with_the_runtime_of_render(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        find_platform(rendered_pod("dnn", 0, **changes)).read_cluster()


@pytest.mark.parametrize("changes", [{"PET_NNODES": None}, {"PET_NODE_RANK": None}])
def test_pod_without_the_variables_of_torchrun_is_no_trainjob(changes: dict[str, str | None]) -> None:
    assert not TrainJob(pod(**changes)).is_here()
