"""The descriptions of clusters in examples/ray: Ray's own code reads them, and its autoscaler plans nodes for a job.

KubeRay's file was also compared with the schemas of RayJob in KubeRay 1.5.1, 1.6.2 and 1.7.0, with unknown fields as
errors. `JOB` has those fields that the file uses.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hetero.ray.groups import bundle_of, parse_group

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"
GUIDE = Path(__file__).parents[2] / "docs" / "ray.md"
COMMAND = "hetero launch --platform ray --group trainer=GPU:8:1 --group data=CPU:16:2..8 "


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_COUNT = {"type": "integer", "minimum": 0}
_QUANTITIES = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
_CONTAINER = _object("name image resources", name={}, image={}, resources=_object(limits=_QUANTITIES))
_POD = _object(
    "spec",
    spec=_object("containers", terminationGracePeriodSeconds=_COUNT, containers={"type": "array", "items": _CONTAINER}),
)
_WORKERS = _object(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName={"type": "string"},
    minReplicas=_COUNT,
    maxReplicas=_COUNT,
    labels=_TEXTS,
    rayStartParams=_TEXTS,
    template=_POD,
)
JOB = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=_object("name", name={"type": "string"}),
    spec=_object(
        "entrypoint rayClusterSpec",
        entrypoint={"type": "string"},
        runtimeEnvYAML={"type": "string"},
        shutdownAfterJobFinishes={"type": "boolean"},
        rayClusterSpec=_object(
            "headGroupSpec",
            rayVersion={"type": "string"},
            enableInTreeAutoscaling={"type": "boolean"},
            autoscalerOptions=_object(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=_COUNT),
            headGroupSpec=_object("rayStartParams template", rayStartParams=_TEXTS, template=_POD),
            workerGroupSpecs={"type": "array", "items": _WORKERS},
        ),
    ),
)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))
    return found


def kuberay_node_types() -> dict[str, Any]:
    """Return the node types that Ray's autoscaler makes of KubeRay's file."""
    from ray.autoscaler._private.kuberay import autoscaling_config

    job = load("kuberay-job.yaml")
    cluster = {"metadata": {"name": "images", "namespace": "default"}, "spec": job["spec"]["rayClusterSpec"]}
    types: dict[str, Any] = autoscaling_config._derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    del types["headgroup"]
    return types


def vm_node_types() -> dict[str, Any]:
    """Return the node types of the file for `ray up`, except the head."""
    cluster = load("vm-cluster.yaml")
    types: dict[str, Any] = cluster["available_node_types"]
    assert types.pop(cluster["head_node_type"])["resources"] == {"CPU": 0}
    return types


NODE_TYPES = pytest.mark.parametrize("node_types", [kuberay_node_types, vm_node_types])


def planned(types: dict[str, Any], requests: list[Any], *, spread: bool) -> dict[str, int]:
    """Return how many nodes of each type Ray's autoscaler starts."""
    from ray.autoscaler.v2 import scheduler
    from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
    from ray.core.generated.autoscaler_pb2 import GangResourceRequest, ResourceRequestByCount

    configs = {
        name: NodeTypeConfig(
            name=name,
            min_worker_nodes=found["min_workers"],
            max_worker_nodes=found["max_workers"],
            resources=found["resources"],
            labels=found["labels"],
        )
        for name, found in types.items()
    }
    gangs = [GangResourceRequest(requests=requests)] if spread else []
    single = [] if spread else [ResourceRequestByCount(request=request, count=1) for request in requests]
    request = scheduler.SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=configs,
        resource_requests=single,
        gang_resource_requests=gangs,
    )
    reply = scheduler.ResourceDemandScheduler().schedule(request)
    assert not reply.infeasible_resource_requests
    assert not reply.infeasible_gang_resource_requests
    return {launch.instance_type: launch.count for launch in reply.to_launch}


def test_kuberay_job_has_the_fields_that_were_compared_with_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(JOB)
    jsonschema.validate(load("kuberay-job.yaml"), JOB)


def test_kuberay_workers_get_the_time_of_the_job_to_stop() -> None:
    spec = load("kuberay-job.yaml")["spec"]
    stop_s = int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    pods = [group["template"]["spec"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]]
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [stop_s] * 2


def test_vm_cluster_has_the_fields_of_rays_schema() -> None:
    ray = pytest.importorskip("ray.autoscaler", reason="Ray is not installed")
    schema = json.loads((Path(ray.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft7Validator(schema).validate(load("vm-cluster.yaml"))


@pytest.mark.filterwarnings("ignore")  # Ray's own
@NODE_TYPES
def test_autoscaler_starts_the_hosts_of_the_job(node_types: Any) -> None:
    pytest.importorskip("ray")
    from ray.autoscaler.v2.utils import ResourceRequestUtil

    words = shlex.split(COMMAND)
    groups = [parse_group(words[at + 1]) for at, word in enumerate(words) if word == "--group"]
    types = node_types()
    apart = [(ResourceRequestUtil.PlacementConstraintType.ANTI_AFFINITY, "job", "")]
    bundles = [ResourceRequestUtil.make(bundle_of(group), apart) for group in groups for _ in range(group.stated.count)]
    assert planned(types, bundles, spread=True) == {"trainer": 1, "data": 2}
    added = [ResourceRequestUtil.make(bundle_of(groups[1])) for _ in range(groups[1].max_hosts)]
    assert planned(types, added, spread=False)["data"] == 8


@pytest.mark.filterwarnings("ignore")  # Ray's own
@NODE_TYPES
def test_autoscaler_starts_the_data_hosts_of_a_service(node_types: Any) -> None:
    pytest.importorskip("ray")
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.common_pb2 import LabelSelectorOperator

    is_data = [[("role", LabelSelectorOperator.LABEL_OPERATOR_IN, ["data"])]]
    hosts = [ResourceRequestUtil.make({"CPU": 16}, None, is_data) for _ in range(3)]
    assert planned(node_types(), hosts, spread=True)["data"] == 3


@NODE_TYPES
def test_nodes_are_as_many_as_the_job_may_have(node_types: Any) -> None:
    pytest.importorskip("ray")
    types = node_types()
    for words in COMMAND.split("--group ")[1:]:
        group = parse_group(words.split()[0])
        found = types[group.stated.name]
        assert found["min_workers"] <= group.stated.count
        assert found["max_workers"] == group.max_hosts
        assert found["labels"] == {"role": group.stated.name}
        assert all(found["resources"][name] >= need for name, need in bundle_of(group).items())
    assert types["trainer"]["resources"]["CPU"] < types["data"]["resources"]["CPU"]  # no data host is placed there


def test_files_and_guide_have_the_same_command() -> None:
    assert load("kuberay-job.yaml")["spec"]["entrypoint"].startswith(COMMAND)
    assert COMMAND in GUIDE.read_text(encoding="utf-8").replace(" \\\n    ", " ")
