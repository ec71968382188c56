"""AWS Batch: the environments of the nodes of a multi-node parallel job, and what is wrong in others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hetero.cluster import Role, find_platform
from hetero.cluster.groups import stated_groups
from hetero.cluster.platforms.aws_batch import AwsBatch
from hetero.cluster.platforms.platform import Registration
from hetero.errors import ClusterError
from tests.support.platforms import changed

MAIN = "10.0.1.17"
GROUPS = "trainer=GPU:8:2 data=CPU:32:3"


def node(index: int = 0, number: int = 5, main: int = 0, **changes: str | None) -> dict[str, str]:
    """Return the variables of a node, in the form of the service's documentation."""
    environ = {
        "AWS_BATCH_CE_NAME": "ce",
        "AWS_BATCH_JOB_ATTEMPT": "1",
        "AWS_BATCH_JOB_ID": f"9a6d4f1e-0b1c-4f5e-8d2a-3f7b6c5d4e3f#{index}",
        "AWS_BATCH_JOB_MAIN_NODE_INDEX": str(main),
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": MAIN,
        "AWS_BATCH_JOB_NODE_INDEX": str(index),
        "AWS_BATCH_JOB_NUM_NODES": str(number),
        "AWS_BATCH_JQ_NAME": "queue",
        "HETERO_GROUPS": GROUPS,
    }
    if index == main:  # the main node does not get it
        del environ["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    return changed(environ, **changes)


@pytest.mark.parametrize("main", [0, 1])
@pytest.mark.parametrize(
    ("index", "group", "instance_type"),
    [(0, "trainer", "GPU:8"), (1, "trainer", "GPU:8"), *((index, "data", "CPU:32") for index in (2, 3, 4))],
)
def test_node_knows_its_group_and_the_main_node(index: int, group: str, instance_type: str, main: int) -> None:
    platform = find_platform(node(index, main=main))
    assert platform.name == "aws-batch"
    assert platform.registration() == Registration(
        num_hosts=5,
        main_address="" if index == main else MAIN,
        group=group,
        instance_type=instance_type,
        groups=("trainer", "data"),
    )


@pytest.mark.parametrize("index", [0, 1, 2])
def test_nodes_without_groups_all_train(index: int) -> None:
    found = AwsBatch(node(index, 3, HETERO_GROUPS=None)).registration()
    assert found is not None
    assert (found.group, found.instance_type, found.groups) == ("trainer", "", ("trainer",))


@pytest.mark.parametrize("groups", [None, "trainer=GPU:8:1"])
def test_job_of_one_node_needs_no_registrar(groups: str | None) -> None:
    platform = AwsBatch(node(0, 1, HETERO_GROUPS=groups))
    assert platform.registration() is None
    cluster = platform.read_cluster()
    assert [(host.name, host.role) for host in cluster.hosts] == [("127.0.0.1", Role.TRAINER)]


@pytest.mark.parametrize("index", [0, 4])
@pytest.mark.parametrize("attempt", ["1", "2"])
def test_id_of_the_job_is_the_same_on_all_nodes_and_not_in_all_attempts(index: int, attempt: str) -> None:
    platform = AwsBatch(node(index, AWS_BATCH_JOB_ATTEMPT=attempt))
    assert platform.job_name() == f"9a6d4f1e-0b1c-4f5e-8d2a-3f7b6c5d4e3f-{attempt}"


def test_folders_are_below_the_workspace() -> None:
    assert str(AwsBatch(node()).folders.output) == "/workspace/output"
    assert str(AwsBatch(node(HETERO_WORKSPACE="/mnt/efs")).folders.checkpoints) == "/mnt/efs/checkpoints"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"AWS_BATCH_JOB_NODE_INDEX": None}, "AWS_BATCH_JOB_NODE_INDEX is not set"),
        ({"AWS_BATCH_JOB_NODE_INDEX": "x"}, "AWS_BATCH_JOB_NODE_INDEX is 'x'"),
        ({"AWS_BATCH_JOB_NODE_INDEX": "-1"}, "AWS_BATCH_JOB_NODE_INDEX is '-1'"),
        ({"AWS_BATCH_JOB_NODE_INDEX": "5"}, "node 5 of 5"),
        ({"AWS_BATCH_JOB_NODE_INDEX": "٣"}, "AWS_BATCH_JOB_NODE_INDEX is"),
        ({"AWS_BATCH_JOB_NUM_NODES": "0"}, "of 0, with"),
        ({"AWS_BATCH_JOB_NUM_NODES": ""}, "AWS_BATCH_JOB_NUM_NODES is not set"),
        ({"AWS_BATCH_JOB_NUM_NODES": "99999"}, "NUM_NODES is '99999'"),
        ({"AWS_BATCH_JOB_NUM_NODES": "1e3"}, "is '1e3'"),
        ({"AWS_BATCH_JOB_MAIN_NODE_INDEX": None}, "AWS_BATCH_JOB_MAIN_NODE_INDEX is not set"),
        ({"AWS_BATCH_JOB_MAIN_NODE_INDEX": "7"}, "with node 7 as the main node"),
        ({"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": None}, "MAIN_NODE_PRIVATE_IPV4_ADDRESS is not set"),
        ({"HETERO_GROUPS": "trainer=GPU:8:2 data=CPU:32:2"}, "has 4 hosts, and the job has 5 nodes"),
        ({"HETERO_GROUPS": "trainer=GPU:8:2 data=CPU:32:4"}, "has 6 hosts, and the job has 5 nodes"),
        ({"HETERO_GROUPS": "trainer:2"}, "HETERO_GROUPS 'trainer:2'"),
        ({"HETERO_GROUPS": "trainer=GPU:8:0"}, "found 0 hosts"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(changes: dict[str, str | None], found: str) -> None:
    with pytest.raises(ClusterError) as caught:
        AwsBatch(node(3, **changes)).registration()
    assert found in str(caught.value)
    assert "expected" in str(caught.value)


def test_job_of_several_nodes_has_no_description_before_they_have_registered() -> None:
    with pytest.raises(ClusterError, match="found: several nodes"):
        AwsBatch(node()).describe()


@pytest.mark.parametrize("variable", ["AWS_BATCH_JOB_ID", "AWS_BATCH_JOB_ATTEMPT", "AWS_BATCH_CE_NAME"])
def test_job_of_one_container_is_no_job_of_several_nodes(variable: str) -> None:
    assert not AwsBatch({variable: "x"}).is_here()


def test_documented_job_definition_is_one_of_the_service() -> None:
    session = pytest.importorskip("botocore.session", reason="boto3 is not installed").get_session()
    from botocore.validate import ParamValidator

    guide = (Path(__file__).parents[2] / "docs" / "aws_batch.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```json\n(.*?)```", guide, re.DOTALL)
    definition = json.loads(text)
    shape = session.get_service_model("batch").operation_model("RegisterJobDefinition").input_shape
    report = ParamValidator().validate({"jobDefinitionName": "photos", **definition}, shape)
    assert not report.has_errors(), report.generate_report()
    groups = stated_groups({"HETERO_GROUPS": "trainer=GPU:8:1 data=CPU:32:2"})
    ranges = definition["nodeProperties"]["nodeRangeProperties"]
    for group, nodes in zip(groups, ranges, strict=True):
        first, last = map(int, nodes["targetNodes"].split(":"))
        container = nodes["container"]
        needs = {each["type"]: int(each["value"]) for each in container["resourceRequirements"]}
        assert last - first + 1 == group.count
        assert needs.get("GPU", 0) == (8 if group.name == "trainer" else 0)
        assert needs["VCPU"] >= 1
        assert 64 < container["linuxParameters"]["sharedMemorySize"] < needs["MEMORY"]
