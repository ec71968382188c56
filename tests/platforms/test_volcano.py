"""Volcano: the environments of its pods, and what is wrong in others."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.cluster import Role, find_platform
from hetero.cluster.platforms.volcano import Volcano
from hetero.errors import ClusterError
from tests.support.platforms import changed


def pod(task: str = "dnn", index: int = 0, **changes: str | None) -> dict[str, str]:
    """Return the variables that the plugins svc and env give to a pod."""
    environ = {
        "VC_DNN_HOSTS": "photos-dnn-0.photos,photos-dnn-1.photos",
        "VC_DNN_NUM": "2",
        "VC_DATA_GROUP_HOSTS": ",".join(f"photos-data-group-{number}.photos" for number in range(3)),
        "VC_DATA_GROUP_NUM": "3",
        "VC_TASK_INDEX": str(index),
        "VK_TASK_INDEX": str(index),
        "HOSTNAME": f"photos-{task}-{index}",
        "HETERO_GRACE_S": "90",
    }
    return changed(environ, **changes)


@pytest.mark.parametrize("with_groups", [False, True])
@pytest.mark.parametrize(
    ("task", "index"), [("dnn", 0), ("dnn", 1), ("data-group", 0), ("data-group", 1), ("data-group", 2)]
)
def test_pod_finds_its_task(task: str, index: int, with_groups: bool) -> None:
    groups = "dnn=GPU:8:2 data-group=CPU:32:3" if with_groups else None
    platform = find_platform(pod(task, index, HETERO_GROUPS=groups))
    cluster = platform.read_cluster()
    assert platform.name == "volcano"
    name = "data-group" if with_groups else "data_group"
    assert {each.name: (each.hosts, each.role) for each in cluster.groups} == {
        "dnn": (("photos-dnn-0.photos", "photos-dnn-1.photos"), Role.TRAINER),
        name: (tuple(f"photos-data-group-{number}.photos" for number in range(3)), Role.DATA),
    }
    assert {each.instance_type for each in cluster.groups} == ({"GPU:8", "CPU:32"} if with_groups else {""})
    assert cluster.current_host == f"photos-{task}-{index}.photos"
    assert platform.job_id(cluster) == "photos"
    assert platform.kill_after_s == 90


def test_job_grows_with_its_hosts() -> None:
    hosts = pod()["VC_DATA_GROUP_HOSTS"] + ",photos-data-group-3.photos"
    assert len(Volcano(pod(VC_DATA_GROUP_HOSTS=hosts)).read_cluster().data_hosts) == 4


def test_single_task_trains() -> None:
    environ = pod("dnn", 0, VC_DATA_GROUP_HOSTS=None, VC_DATA_GROUP_NUM=None)
    assert Volcano(environ).read_cluster().role is Role.TRAINER


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({"VC_DNN_HOSTS": None, "VC_WORKER_HOSTS": "photos-worker-0.photos", "HOSTNAME": "photos-worker-0"}, "worker"),
        ({"VC_DNN_HOSTS": None, "VC_MASTER_HOSTS": "photos-master-0.photos", "HOSTNAME": "photos-master-0"}, "master"),
    ],
)
def test_flag_gives_the_role_that_no_name_shows(changes: dict[str, str | None], roles: str) -> None:
    with pytest.raises(ClusterError, match=f"cannot tell whether group '{roles}' preprocesses or trains"):
        Volcano(pod(**changes)).read_cluster()
    assert Volcano(pod(**changes)).read_cluster(roles=[f"{roles}=trainer"]).role is Role.TRAINER


@pytest.mark.parametrize(("text", "seconds"), [("60", 60.0), (None, 30.0), ("-1", 30.0), ("inf", 30.0)])
def test_grace_is_that_of_the_manifest_or_of_kubernetes(text: str | None, seconds: float) -> None:
    assert Volcano(pod(HETERO_GRACE_S=text)).kill_after_s == seconds


def test_files_are_in_the_workspace() -> None:
    assert Volcano(pod()).folders.checkpoints == Path("/workspace/checkpoints")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"VC_DNN_HOSTS": None, "VC_DATA_GROUP_HOSTS": None}, "no VC_<TASK>_HOSTS\n.*\n.*plugin svc"),
        ({"VC_DNN_HOSTS": "", "VC_DATA_GROUP_HOSTS": " , "}, "no VC_<TASK>_HOSTS"),
        ({"HOSTNAME": None}, "HOSTNAME is '', which is no host of a task"),
        ({"HOSTNAME": "other"}, "HOSTNAME is 'other', which is no host of a task"),
        ({"VC_COPY_HOSTS": "photos-dnn-0.photos"}, "more than one host of a task"),
        ({"VC_DNN_HOSTS": "photos-dnn-0.photos,photos-dnn-0.photos"}, "more than one host"),
        ({"VC_DATA_GROUP_HOSTS": "a b"}, "a host name or address"),
        ({"VC_DATA_GROUP_HOSTS": "x," * 5000 + "y"}, "instance_groups"),
        ({"VC_DATA_GROUP_HOSTS": "y,y"}, "'y' twice"),
        ({"HETERO_GROUPS": "gnn=GPU:8:2"}, "HETERO_GROUPS has gnn, and the tasks are data_group, dnn"),
        ({"HETERO_GROUPS": "dnn=GPU"}, "expected NAME=TYPE:COUNT"),
    ],
)
def test_wrong_environment_is_one_clear_sentence(changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Volcano(pod(**changes)).read_cluster()


def test_pod_without_the_plugin_env_is_not_detected() -> None:
    assert not Volcano(pod(VC_TASK_INDEX=None)).is_here()
