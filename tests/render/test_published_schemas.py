"""Rendered manifests are valid against the published schemas of JobSet, TrainJob and Volcano.

JobSet, TrainingRuntime and TrainJob: the models of ``kubeflow-trainer-api``, which are generated from the schemas of
Kubeflow Trainer, JobSet and Kubernetes. A model ignores fields that it does not know. So each manifest is loaded and
written again, and both must be equal except for defaults that the model adds. The models check names and types of
fields, and required fields. They check neither the values of texts, such as the operator of a success policy, nor the
rules of the admission webhooks.

Volcano: ``volcano_job_schema.yaml``, which has the fields that are rendered, with its source. It checks values too.

The tests also rename each field, and give it a value of another type. Both must be found.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubeflow_trainer_api import models

from hetero import cli
from hetero.errors import ExitCode

MODELS = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
}
VOLCANO = jsonschema.Draft202012Validator(
    yaml.safe_load((Path(__file__).parent / "volcano_job_schema.yaml").read_text(encoding="utf-8"))
)
PLATFORMS = ("jobset", "trainjob", "volcano")
GROUPS = {
    "trainers": ["node=GPU:8:2"],
    "data": ["node=GPU:8:1", "data=CPU:32:3"],
    "types": ["node=a2-highgpu-1g:1", "data=c3-highcpu-22:2"],
    "data-twice": ["data-a=CPU:16:1", "node=GPU:1:2", "data-b=CPU:4:1000"],
    "cpu": ["node=CPU:4:2"],
}
OPTIONS = {
    "plain": [],
    "hours": ["--hours", "0.5"],
    "volume": ["--volume-claim", "results"],
    "selectors": ["--node-selector", "pool=cpu", "--node-selector", "node:cloud.example/pool=8"],
    "launch-options": ["--audit", "--nproc-per-node", "2", "--output-dir", "/workspace/o u t"],
}
FREE_NAMES = ("labels", "limits", "nodeSelector", "requests")
"""Fields whose own fields have any name."""

Path_ = tuple[str | int, ...]


def rendered(
    capsys: pytest.CaptureFixture[str], platform: str, groups: str, *options: str, name: str = "photos"
) -> list[dict[str, Any]]:
    stated = [word for group in GROUPS[groups] for word in ("--group", group)]
    command = ["render", platform, *stated, "--role", "node=trainer", "--name", name, "--image", "registry/photos:1"]
    script = ["train.py", "--", "--note", 'it\'s "ü" #1: {a}', "--rate", "0x10"]
    assert cli.main([*command, *options, *script]) == ExitCode.OK
    return list(yaml.safe_load_all(capsys.readouterr().out))


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong with a manifest by its published schema."""
    if manifest.get("apiVersion") == "batch.volcano.sh/v1alpha1":
        return [f"{error.json_path}: {error.message}" for error in VOLCANO.iter_errors(manifest)]
    try:
        model = MODELS[manifest["kind"]].from_dict(copy.deepcopy(manifest))
    except (ValueError, TypeError, AttributeError) as error:
        return [str(error)]
    return list(losses(manifest, model.to_dict()))


def losses(written: object, read: object, path: str = "$") -> Iterator[str]:
    """Yield what differs after a manifest was loaded. The model may add defaults."""
    if isinstance(written, dict) and isinstance(read, dict):
        for key, value in written.items():
            if key in read:
                yield from losses(value, read[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}: the schema has no such field"
        for key in read.keys() - written.keys():
            if read[key] in ("", 0):  # what the model puts in place of a required field
                yield f"{path}.{key}: missing"
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for index, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from losses(one, other, f"{path}[{index}]")
    elif type(written) is int and type(read) is float and ".resources." in path:
        if written != read:  # a quantity, which may be a text or any number
            yield f"{path}: {written!r} became {read!r}"
    elif type(written) is not type(read) or written != read:
        yield f"{path}: {written!r} became {read!r}"


def fields(value: object, path: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of each field of a manifest."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from fields(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from fields(inner, (*path, index))


def parent_of(manifest: Any, path: Path_) -> Any:
    for step in path[:-1]:
        manifest = manifest[step]
    return manifest


def full_manifests(capsys: pytest.CaptureFixture[str], platform: str) -> list[dict[str, Any]]:
    options = [*itertools.chain(*OPTIONS.values()), "--spot", "data=0.2"]
    return rendered(capsys, platform, "data", *options, *(["--queue", "research"] if platform == "volcano" else []))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_manifest_is_valid(capsys: pytest.CaptureFixture[str], platform: str, groups: str, options: str) -> None:
    for manifest in rendered(capsys, platform, groups, *OPTIONS[options]):
        assert problems(manifest) == []


@pytest.mark.parametrize("options", [["--spot", "data-a"], ["--spot", "data-a=0.2", "--spot", "data-b"]])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_manifest_with_spot_groups_is_valid(
    capsys: pytest.CaptureFixture[str], platform: str, options: list[str]
) -> None:
    for manifest in rendered(capsys, platform, "data-twice", *options):
        assert problems(manifest) == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_field_of_another_name_is_found(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    num_fields = 0
    for manifest in full_manifests(capsys, platform):
        assert problems(manifest) == []
        for path in fields(manifest):
            if path[0] in ("apiVersion", "kind") or (len(path) > 1 and path[-2] in FREE_NAMES):
                continue
            changed = copy.deepcopy(manifest)
            parent = parent_of(changed, path)
            parent[f"{path[-1]}s"] = parent.pop(path[-1])
            assert problems(changed), path
            num_fields += 1
    assert num_fields > 100


@pytest.mark.parametrize("platform", PLATFORMS)
def test_value_of_another_type_is_found(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    for manifest in full_manifests(capsys, platform):
        for path in fields(manifest):
            changed = copy.deepcopy(manifest)
            parent = parent_of(changed, path)
            value = parent[path[-1]]
            others: dict[type, list[object]] = {str: [7, ["a"]], bool: ["true"], int: ["?", 0.5, [1]]}
            for other in others.get(type(value), ["a"]):
                is_checked = platform == "volcano" and type(value) is int
                if "resources" in path and not isinstance(other, list) and not is_checked:
                    continue  # a quantity may be a text or a number, and the models check no values
                parent[path[-1]] = other
                assert path in (("kind",), ("apiVersion",)) or problems(changed), (path, other)


@pytest.mark.parametrize(
    ("platform", "path"),
    [
        ("jobset", "spec.successPolicy.operator"),
        ("jobset", "spec.replicatedJobs.0.name"),
        ("jobset", "spec.replicatedJobs.0.template"),
        ("jobset", "spec.replicatedJobs.0.template.spec.template"),
        ("jobset", "spec.replicatedJobs.1.template.spec.template.spec.containers"),
        ("jobset", "spec.replicatedJobs.1.template.spec.template.spec.containers.0.name"),
        ("jobset", "spec.replicatedJobs.1.template.spec.template.spec.containers.0.env.0.name"),
        ("jobset", "spec.replicatedJobs.1.template.spec.template.spec.containers.0.ports.0.containerPort"),
        ("jobset", "spec.replicatedJobs.1.template.spec.template.spec.containers.0.volumeMounts.0.mountPath"),
        ("jobset", "spec.replicatedJobs.0.template.spec.template.spec.volumes.0.name"),
        ("trainjob", "spec.template.spec.replicatedJobs.0.name"),
        ("trainjob", "spec.template.spec.replicatedJobs.0.template.spec.template.spec.containers.0.name"),
        ("trainjob", "spec.runtimeRef.name"),
        ("trainjob", "spec.runtimeRef"),
        ("volcano", "spec.tasks"),
        ("volcano", "spec.minAvailable"),
        ("volcano", "spec.tasks.0.name"),
        ("volcano", "spec.tasks.0.replicas"),
        ("volcano", "spec.tasks.0.policies.0.event"),
        ("volcano", "spec.tasks.1.template.spec.containers"),
        ("volcano", "spec.tasks.1.template.spec.containers.0.name"),
        ("volcano", "spec.tasks.1.template.spec.containers.0.volumeMounts.0.mountPath"),
        ("volcano", "spec.tasks.1.template.spec.volumes.0.name"),
    ],
)
def test_missing_field_is_found(capsys: pytest.CaptureFixture[str], platform: str, path: str) -> None:
    steps = tuple(int(step) if step.isdigit() else step for step in path.split("."))
    found = False
    for manifest in full_manifests(capsys, platform):
        if steps in set(fields(manifest)):
            del parent_of(manifest, steps)[steps[-1]]
            assert problems(manifest)
            found = True
    assert found


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.tasks.0.policies.0.event", "PodFails"),
        ("spec.tasks.0.policies.0.action", "SyncJob"),  # only Volcano itself uses it
        ("spec.tasks.0.name", "Node"),
        ("spec.queue", "a b"),
        ("spec.maxRetry", -1),
        ("spec.plugins.ssh", "x"),
        ("spec.tasks.0.template.spec.containers.0.resources.limits.cpu", "8 cores"),
        ("spec.tasks.0.template.spec.restartPolicy", "Sometimes"),
    ],
)
def test_volcano_value_that_is_not_allowed_is_found(
    capsys: pytest.CaptureFixture[str], path: str, value: object
) -> None:
    (manifest,) = full_manifests(capsys, "volcano")
    steps = tuple(int(step) if step.isdigit() else step for step in path.split("."))
    parent_of(manifest, steps)[steps[-1]] = value
    assert problems(manifest)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_references_within_a_manifest_exist(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    """What no schema checks, but the admission webhooks do."""
    for groups in GROUPS:
        manifests = {manifest["kind"]: manifest for manifest in rendered(capsys, platform, groups)}
        if platform == "volcano":
            spec = manifests["Job"]["spec"]
            names = [task["name"] for task in spec["tasks"]]
            assert spec["minAvailable"] == sum(task["replicas"] for task in spec["tasks"])
        else:
            runtime = manifests.get("TrainingRuntime")
            spec = manifests["JobSet"]["spec"] if runtime is None else runtime["spec"]["template"]["spec"]
            names = [job["name"] for job in spec["replicatedJobs"]]
            assert set(spec["successPolicy"]["targetReplicatedJobs"]) <= set(names)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_time_limit_holds_for_every_group(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    for manifest in rendered(capsys, platform, "data", "--hours", "0.5"):
        spec = manifest["spec"].get("template", manifest)["spec"]
        for job in spec.get("replicatedJobs", spec.get("tasks", [])):
            assert job["template"]["spec"]["activeDeadlineSeconds"] == 1800


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1st-photos", "'1st-photos' cannot be the name"),  # a service has the name too
        ("photos-", "'photos-' cannot be the name"),
        ("Photos", "'Photos' cannot be the name"),
        ("p" * 40, ""),
        ("p" * 41, "at most 40 lower-case letters"),
    ],
)
def test_name_that_the_cluster_rejects_is_rejected(
    capsys: pytest.CaptureFixture[str], platform: str, name: str, message: str
) -> None:
    groups = ["--group", "node=GPU:1:1", "--name", name, "--image", "x", "train.py"]
    code = cli.main(["render", platform, *groups])
    assert code == (ExitCode.USAGE if message else ExitCode.OK)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("platform", PLATFORMS)
def test_pod_whose_name_is_too_long_is_rejected(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    groups = ["--group", "node=GPU:1:1", "--group", f"data-{'d' * 20}=CPU:1:100"]
    command = ["render", platform, *groups, "--image", "x", "--name"]
    assert cli.main([*command, "p" * 26, "train.py"]) == ExitCode.OK
    assert cli.main([*command, "p" * 28, "train.py"]) == ExitCode.USAGE
    assert "characters; expected at most 63\n" in capsys.readouterr().err
