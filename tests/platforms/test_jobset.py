"""JobSet: the environments of its pods, and what is wrong in others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hetero.cluster import Role, find_platform
from hetero.cluster.platforms.jobset import JobSet
from hetero.errors import ClusterError
from tests.support.platforms import changed, jobset_variables

GROUPS = "dnn=GPU:8:2 data=CPU:32:3"
TRAINERS = tuple(f"photos-dnn-0-{index}.photos" for index in range(2))
DATA = tuple(f"photos-data-0-{index}.photos" for index in range(3))


def pod(group: str = "dnn", index: int = 0, **changes: str | None) -> dict[str, str]:
    """Return the variables of a pod of the manifest that `hetero render jobset` makes."""
    environ = {
        **jobset_variables(group, index, GROUPS),
        "HOSTNAME": f"photos-{group}-0-{index}",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }
    return changed(environ, **changes)


@pytest.mark.parametrize(
    ("group", "index"), [("dnn", 0), ("dnn", 1), ("data", 0), ("data", 1), ("data", 2)], ids=lambda value: str(value)
)
def test_pod_of_a_jobset_finds_its_place(group: str, index: int) -> None:
    platform = find_platform(pod(group, index))
    cluster = platform.read_cluster()
    assert platform.name == "jobset"
    assert [(each.name, each.hosts, each.role) for each in cluster.groups] == [
        ("dnn", TRAINERS, Role.TRAINER),
        ("data", DATA, Role.DATA),
    ]
    assert cluster.current_host == f"photos-{group}-0-{index}.photos"
    assert [each.instance_type for each in cluster.groups] == ["GPU:8", "CPU:32"]
    assert platform.job_id(cluster) == "photos-0"
    assert platform.kill_after_s == 120


@pytest.mark.parametrize(
    ("changes", "host"),
    [
        ({"JOBSET_SUBDOMAIN": "net"}, "photos-dnn-0-0.net"),
        ({"JOB_INDEX": None}, "photos-dnn-0-0.photos"),
        ({"JOB_COMPLETION_INDEX": "1"}, "photos-dnn-0-1.photos"),
    ],
)
def test_names_of_pods_follow_the_rule(changes: dict[str, str | None], host: str) -> None:
    assert JobSet(pod(**changes)).read_cluster().current_host == host


def test_restart_is_another_job() -> None:
    first, second = (JobSet(pod(JOBSET_RESTART_ATTEMPT=number)) for number in ("0", "1"))
    assert first.job_id(first.read_cluster()) != second.job_id(second.read_cluster())
    assert JobSet(pod(JOBSET_RESTART_ATTEMPT=None)).job_name() == "photos"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90.0), (None, 30.0), ("soon", 30.0), ("0", 30.0), ("nan", 30.0)])
def test_grace_is_that_of_the_manifest_or_of_kubernetes(text: str | None, seconds: float) -> None:
    assert JobSet(pod(HETERO_GRACE_S=text)).kill_after_s == seconds


def test_failure_is_the_termination_message_and_files_are_in_the_workspace() -> None:
    folders = JobSet(pod(HETERO_WORKSPACE="/mnt/shared")).folders
    assert (folders.failure, folders.output) == (Path("/dev/termination-log"), Path("/mnt/shared/output"))
    assert JobSet(pod()).folders.root == Path("/workspace")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"HETERO_GROUPS": None}, "HETERO_GROUPS is not set"),
        ({"HETERO_GROUPS": "dnn"}, "HETERO_GROUPS 'dnn': expected NAME=TYPE:COUNT"),
        ({"HETERO_GROUPS": "dnn=GPU:8:x"}, "expected NAME=TYPE:COUNT"),
        ({"HETERO_GROUPS": "dnn=GPU:8:99999"}, "found 99999 hosts"),
        ({"HETERO_GROUPS": "dmn=GPU:8:2 data=CPU:32:3"}, "'dnn', and HETERO_GROUPS has dmn, data\n.*\n.*for 'dmn'"),
        ({"HETERO_GROUPS": "a=GPU:8:2 b=CPU:32:3"}, "a group with the name of each replicated job"),
        ({"HETERO_GROUPS": "dnn=GPU:8:2 dnn=CPU:32:3"}, "'dnn' a second time"),
        ({"JOB_INDEX": "1"}, "JOB_INDEX is 1, so the replicated job has several replicas"),
        ({"JOB_INDEX": "x"}, "JOB_INDEX is 'x'"),
        ({"JOB_COMPLETION_INDEX": None}, "JOB_COMPLETION_INDEX is not set\n.*\n.*completionMode: Indexed"),
        ({"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX is '-1'"),
        ({"JOB_COMPLETION_INDEX": "99999999999"}, "JOB_COMPLETION_INDEX is '99999999999'"),
        ({"JOB_COMPLETION_INDEX": "2"}, "'photos-dnn-0-2.photos', which is not among the hosts"),
        ({"JOBSET_NAME": "a b"}, "instance_groups.*hosts"),
    ],
)
def test_wrong_environment_of_a_pod_is_one_clear_sentence(changes: Mapping[str, str | None], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        JobSet(pod(**changes)).read_cluster()


@pytest.mark.parametrize("changes", [{"JOBSET_NAME": None}, {"REPLICATED_JOB_NAME": None}, {"JOBSET_NAME": ""}])
def test_pod_without_the_labels_is_no_jobset(changes: dict[str, str | None]) -> None:
    assert not JobSet(pod(**changes)).is_here()
