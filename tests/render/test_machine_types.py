"""Groups whose machine type hetero knows: nodes are selected by it, and its accelerators are stated."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from hetero import cli
from hetero.cluster.roles import has_accelerator
from hetero.errors import ExitCode
from hetero.pricing import Catalogue

GOOGLE_GPUS = [
    info
    for info in Catalogue.load().types()
    if info.num_accelerators and not info.instance_type.startswith(("ml.", "Standard_"))
]


def rendered(capsys: pytest.CaptureFixture[str], platform: str, *arguments: str) -> dict[str, Any]:
    assert cli.main(["render", platform, "--image", "x", *arguments, "train.py"]) == ExitCode.OK
    (manifest,) = yaml.safe_load_all(capsys.readouterr().out)
    return manifest


def pods(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    jobs = rendered(capsys, "jobset", *arguments)["spec"]["replicatedJobs"]
    return {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}


@pytest.mark.parametrize(
    ("trainer", "gpus", "data", "vcpus"),
    [
        ("a2-highgpu-4g", 4, "n2-highcpu-32", 32),
        ("n1-standard-16+GPU:2", 2, "c2-standard-60", 60),
        ("Standard_ND96isr_H100_v5", 8, "Standard_F72s_v2", 72),
    ],
)
def test_pods_of_a_machine_type_get_nodes_of_their_own(
    capsys: pytest.CaptureFixture[str], trainer: str, gpus: int, data: str, vcpus: int
) -> None:
    found = pods(capsys, "--group", f"train={trainer}:2", "--group", f"data={data}:3")
    label = "node.kubernetes.io/instance-type"
    assert found["train"]["nodeSelector"] == {label: trainer.partition("+")[0]}
    assert found["train"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": gpus}
    assert found["data"]["nodeSelector"] == {label: data}
    for name, instance_type in (("train", trainer), ("data", data)):
        info = Catalogue.load().get(instance_type)
        assert info.vcpus is not None
        assert info.memory_gib is not None
        requests = found[name]["containers"][0]["resources"]["requests"]
        assert info.vcpus / 2 < requests["cpu"] <= info.vcpus / 2 + 1  # two such pods are too many for a node
        assert info.memory_gib / 2 < int(requests["memory"].removesuffix("Gi")) <= info.memory_gib / 2 + 1
    assert Catalogue.load().get(data).vcpus == vcpus
    assert "limits" not in found["data"]["containers"][0]["resources"]


def test_pods_of_stated_resources_request_cpus_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    found = pods(capsys, "--group", "train=GPU:8:1", "--group", "data=CPU:32:2")
    resources = {name: pod["containers"][0]["resources"] for name, pod in found.items()}
    assert resources == {
        "train": {"requests": {"cpu": 16, "memory": "64Gi"}, "limits": {"nvidia.com/gpu": 8}},
        "data": {"requests": {"cpu": 32, "memory": "32Gi"}, "limits": {"cpu": 32}},
    }


def test_selector_of_the_user_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "train=g2-standard-8:1", "--group", "data=CPU:4:1"]
    found = pods(capsys, *groups, "--node-selector", "train:pool=l4")
    assert found["train"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "g2-standard-8", "pool": "l4"}
    assert "nodeSelector" not in found["data"]


def test_unknown_type_leaves_the_choice_to_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    found = pods(capsys, "--group", "train=GPU:1:1", "--group", "data=ml.c5.9xlarge:1")["data"]
    assert "nodeSelector" not in found
    assert found["containers"][0]["resources"] == {}


@pytest.mark.parametrize("info", GOOGLE_GPUS, ids=lambda info: info.instance_type)
def test_vertex_states_the_accelerators_of_a_type(capsys: pytest.CaptureFixture[str], info: Any) -> None:
    arguments = ["--group", f"train={info.instance_type}:1", "--token", "gs://b/t"]
    (pool,) = rendered(capsys, "vertex", *arguments)["workerPoolSpecs"]
    machine = pool["machineSpec"]
    assert machine["machineType"] == info.instance_type
    assert machine["acceleratorCount"] == info.num_accelerators
    assert machine["acceleratorType"].startswith("NVIDIA_")
    assert has_accelerator(f"{info.instance_type}+GPU:{info.num_accelerators}")  # as a host reads it


def test_vertex_keeps_stated_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--group", "train=n1-standard-16+NVIDIA_TESLA_T4:2:1", "--token", "gs://b/t"]
    (pool,) = rendered(capsys, "vertex", *arguments)["workerPoolSpecs"]
    assert pool["machineSpec"] == {
        "machineType": "n1-standard-16",
        "acceleratorType": "NVIDIA_TESLA_T4",
        "acceleratorCount": 2,
    }


def test_vertex_needs_the_name_of_accelerators(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--group", "train=n1-standard-16+GPU:2:1", "--token", "gs://b/t", "train.py"]
    assert cli.main(["render", "vertex", "--image", "x", *arguments]) == ExitCode.USAGE
    assert "accelerators n1-standard-16+NVIDIA_TESLA_V100:4" in capsys.readouterr().err
