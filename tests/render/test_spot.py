"""Groups on spot capacity: what each platform's text says for it, and what a platform lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero import cli
from hetero.errors import ExitCode

GKE = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
AKS = {"key": "kubernetes.azure.com/scalesetpriority", "operator": "Equal", "value": "spot", "effect": "NoSchedule"}
GROUPS = ["--group", "node=GPU:8:1", "--group", "data=CPU:16:3", "--group", "data-b=CPU:4:1"]
MACHINES = ["--group", "train=a2-highgpu-1g:1", "--group", "data=n2-highcpu-32:2", "--token", "gs://b/t"]


def rendered(capsys: pytest.CaptureFixture[str], platform: str, *arguments: str) -> str:
    image = [] if platform == "slurm" else ["--image", "x"]
    assert cli.main(["render", platform, *image, *arguments, "train.py"]) == ExitCode.OK
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], platform: str, *arguments: str) -> str:
    image = [] if platform == "slurm" else ["--image", "x"]
    assert cli.main(["render", platform, *image, *arguments, "train.py"]) == ExitCode.USAGE
    return capsys.readouterr().err


def groups_of(text: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return the job or task of each group in a manifest, and the spec of its pods."""
    manifest = next(iter(yaml.safe_load_all(text)))
    spec = manifest["spec"].get("template", manifest)["spec"]
    if "tasks" in spec:
        return {task["name"]: (task, task["template"]["spec"]) for task in spec["tasks"]}
    jobs = {job["name"]: job["template"]["spec"] for job in spec["replicatedJobs"]}
    return {name: (job, job["template"]["spec"]) for name, job in jobs.items()}


@pytest.mark.parametrize("platform", ["jobset", "trainjob", "volcano"])
def test_pods_of_a_spot_group_run_on_spot_nodes(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    found = groups_of(rendered(capsys, platform, *GROUPS, "--spot", "data=0.21"))
    _, pod = found["data"]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    assert pod["tolerations"] == [GKE, AKS]
    for name, (_, other) in found.items():
        assert name == "data" or not {"nodeSelector", "tolerations"} & other.keys()
        assert "--spot=data=0.21" in other["containers"][0]["command"]  # all launchers have the same options


@pytest.mark.parametrize("platform", ["jobset", "trainjob"])
def test_pod_that_is_moved_from_a_spot_node_is_no_failure(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    found = groups_of(rendered(capsys, platform, *GROUPS, "--spot", "data"))
    job, pod = found["data"]
    rule = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert job["podFailurePolicy"] == {"rules": [rule]}
    assert pod["restartPolicy"] == "Never"  # Kubernetes rejects a podFailurePolicy otherwise
    assert job["backoffLimit"] == 100
    for name in ("node", "data-b"):
        assert "podFailurePolicy" not in found[name][0]
    assert found["data-b"][1]["restartPolicy"] == "OnFailure"


def test_group_of_azure_selects_the_nodes_of_aks(capsys: pytest.CaptureFixture[str]) -> None:
    groups = ["--group", "node=Standard_NC24ads_A100_v4:1", "--group", "data=Standard_F32s_v2:2"]
    _, pod = groups_of(rendered(capsys, "jobset", *groups, "--spot", "data"))["data"]
    assert pod["nodeSelector"] == {
        "node.kubernetes.io/instance-type": "Standard_F32s_v2",
        "kubernetes.azure.com/scalesetpriority": "spot",
    }


def test_selector_of_the_user_replaces_the_label_of_spot_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    selector = ["--node-selector", "data:eks.amazonaws.com/capacityType=SPOT"]
    _, pod = groups_of(rendered(capsys, "jobset", *GROUPS, *selector, "--spot", "data"))["data"]
    assert pod["nodeSelector"] == {"eks.amazonaws.com/capacityType": "SPOT"}
    assert pod["tolerations"] == [GKE, AKS]


@pytest.mark.parametrize(("platform", "groups"), [("jobset", GROUPS), ("volcano", GROUPS), ("vertex", MACHINES)])
def test_group_without_price_is_not_passed_on_and_a_comment_says_so(
    capsys: pytest.CaptureFixture[str], platform: str, groups: list[str]
) -> None:
    every = ["--spot", "train"] if platform == "vertex" else []
    text = rendered(capsys, platform, *groups, *every, "--spot", "data")
    assert "--spot=" not in text
    assert "# --spot data has no price, so the job waits for all hosts of data at the start." in text
    assert "# --spot train" not in text  # a job never starts without its trainers
    text = rendered(capsys, platform, *groups, *every, "--spot", "data=0.3")
    assert "--spot=data=0.3" in text
    assert "has no price" not in text


def test_price_in_a_configuration_file_makes_a_spot_group(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "hetero.yaml"
    path.write_text("spot_groups: [data=0.4]\n")
    text = rendered(capsys, "jobset", *GROUPS, "--config", str(path))
    assert groups_of(text)["data"][1]["tolerations"] == [GKE, AKS]
    assert '"--spot=data=0.4"' in text


def test_vertex_has_spot_for_the_whole_job(capsys: pytest.CaptureFixture[str]) -> None:
    text = rendered(capsys, "vertex", *MACHINES, "--hours", "2", "--spot", "train", "--spot", "data=0.3")
    assert yaml.safe_load(text)["scheduling"] == {"timeout": "7200s", "strategy": "SPOT"}
    assert yaml.safe_load(rendered(capsys, "vertex", *MACHINES)).get("scheduling") is None
    only = rendered(capsys, "vertex", *MACHINES, "--spot", "train", "--spot", "data")
    assert yaml.safe_load(only)["scheduling"] == {"strategy": "SPOT"}


def test_slurm_takes_the_nodes_that_the_user_names(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = ["--partition", "data:cheap", "--constraint", "data-b:spot"]
    text = rendered(capsys, "slurm", *GROUPS, *nodes, "--spot", "data=0.1", "--spot", "data-b=0.2")
    assert "#SBATCH --partition=cheap" in text
    assert "--spot=data=0.1" in text


@pytest.mark.parametrize(
    ("platform", "arguments", "message"),
    [
        ("jobset", [*GROUPS, "--spot", "node"], "--spot node: this group trains, and the job ends"),
        ("volcano", [*GROUPS, "--spot", "node=1"], "expected: a group of data hosts; this job has data, data-b"),
        (
            "trainjob",
            ["--group", "node=GPU:1:1", "--spot", "node"],
            "this job has none",
        ),
        ("slurm", [*GROUPS, "--partition", "p", "--spot", "node"], "--spot node: this group trains"),
        ("slurm", [*GROUPS, "--spot", "data"], "--spot data: Slurm has no common way to ask for spot nodes"),
        ("slurm", [*GROUPS, "--spot", "data"], "with --partition data:PARTITION or --constraint data:FEATURE"),
        ("vertex", [*MACHINES, "--spot", "data"], "only for all pools of a job; --spot is missing for train"),
        ("jobset", [*GROUPS, "--spot", "date"], "no group has that name; expected one of node, data, data-b"),
        ("jobset", [*GROUPS, "--spot", "data", "--spot", "data=1"], "data is given twice"),
        ("jobset", [*GROUPS, "--spot", "data=x"], "expected GROUP=USD"),
        ("jobset", [*GROUPS, "--spot", "data="], "expected GROUP=USD"),
        ("jobset", [*GROUPS, "--spot", "data=-1"], "expected GROUP=USD"),
    ],
)
def test_spot_that_the_platform_lacks_is_rejected(
    capsys: pytest.CaptureFixture[str], platform: str, arguments: list[str], message: str
) -> None:
    assert message in refusal(capsys, platform, *arguments)
