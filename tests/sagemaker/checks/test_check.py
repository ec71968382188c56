"""Every rule: a request that breaks it gives that one finding, and a clean request gives none."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import cli
from hetero.errors import ConfigError
from hetero.sagemaker import Finding, TrainingRequest, check, check_request
from hetero.sagemaker.checks.check import NUMBERS, findings_text
from tests.support.sagemaker.estimators import channel, clean, groups, pytorch

DOCS = Path(__file__).parents[3] / "docs" / "sagemaker.md"
Document = dict[str, Any]
Change = Callable[[Document], Any]


def in_groups(**members: Any) -> Change:
    """Return a change of the first group."""
    return lambda document: document["ResourceConfig"]["InstanceGroups"][0].update(members)


def in_resources(**members: Any) -> Change:
    return lambda document: document["ResourceConfig"].update(members)


def in_whole(**members: Any) -> Change:
    return lambda document: document.update(members)


def hyperparameters(**values: str) -> Change:
    return lambda document: document["HyperParameters"].update(values)


def types(*names: str, volume_gb: int | None = 30) -> Change:
    """Return a change of the types of both groups and of the volume."""

    def change(document: Document) -> None:
        config = document["ResourceConfig"]
        for group, name in zip(config["InstanceGroups"], names, strict=True):
            group["InstanceType"] = name
        config["VolumeSizeInGB"] = volume_gb

    return change


def image(tag: str, *names: str) -> Change:
    def change(document: Document) -> None:
        types(*names)(document)
        document["AlgorithmSpecification"]["TrainingImage"] = f"763104351884.dkr.ecr.us-east-1.amazonaws.com/{tag}"

    return change


def channels(*found: Document) -> Change:
    return lambda document: document.update(InputDataConfig=list(found))


def metrics(count: int, regex: str = "x") -> Change:
    found = [{"Name": f"m{index}", "Regex": regex} for index in range(count)]
    return lambda document: document["AlgorithmSpecification"].update(MetricDefinitions=found)


def both(first: Change, second: Change) -> Change:
    return lambda document: (first(document), second(document))


def without_script(change: Change) -> Change:
    return both(lambda document: document["HyperParameters"].pop("hetero_script"), change)


def named(first: str, second: str) -> Change:
    """Return a change of the groups' names, here and where channels say them."""

    def change(document: Document) -> None:
        for group, name in zip(document["ResourceConfig"]["InstanceGroups"], (first, second), strict=True):
            group["InstanceGroupName"] = name
        document["InputDataConfig"] = [channel("training", first), channel("labels", first, second)]

    return change


SIX = [{"InstanceGroupName": f"data_{index}", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1} for index in range(5)]
SIX += [{"InstanceGroupName": "dnn", "InstanceType": "ml.g5.xlarge", "InstanceCount": 1}]
TWO_DISTRIBUTED = {
    "sagemaker_mpi_enabled": "true",
    "sagemaker_distribution_instance_groups": '["data_group", "dnn_group"]',
}
VPC = {"SecurityGroupIds": ["sg-1", "sg-2"], "Subnets": ["subnet-1"]}

# number, severity, change of the clean request, words of the finding, words of the fix
CASES = [
    (
        "SM-01",
        "error",
        without_script(hyperparameters(sagemaker_torch_distributed_enabled="true")),
        "torchrun",
        "leave",
    ),
    # The launcher lets one torchrun per host go on.
    ("SM-01", "warning", hyperparameters(sagemaker_torch_distributed_enabled="true"), "holds back", "leave out"),
    (
        "SM-02",
        "error",
        hyperparameters(**TWO_DISTRIBUTED),
        "2 groups, 'data_group', 'dnn_group'. SageMaker",
        "exactly one",
    ),
    ("SM-02", "error", hyperparameters(sagemaker_mpi_enabled="true"), "names no group", "exactly one group"),
    ("SM-02", "error", hyperparameters(sagemaker_distribution_instance_groups='["gpu"]'), "unknown group 'gpu'", "one"),
    ("SM-02", "error", hyperparameters(sagemaker_distribution_instance_groups='["data_group"]'), "only prepare", "one"),
    ("SM-03", "error", channels(channel("a", "data_group"), channel("b")), "channels 'b' name no", "every channel"),
    (
        "SM-04",
        "error",
        channels(channel("a", "data_grup")),
        "'a' is for unknown group 'data_grup'",
        "instance_groups",
    ),
    (
        "SM-03",
        "error",
        channels(channel("a", "data_group"), channel("code"), channel("sm_drivers")),
        "'code', 'sm_drivers' name no instance groups",
        "needs 3.18 or newer",
    ),
    ("SM-06", "error", image("pytorch-training:2.5-cpu-py311", "ml.c5.xlarge", "ml.g5.xlarge"), "for GPU", "first"),
    ("SM-06", "error", image("pytorch-training:2.5-cpu-py311", "ml.c5.xlarge", "ml.trn1.2xlarge"), "NEURON", "first"),
    ("SM-06", "error", image("pytorch-training:2.5-gpu-py311", "ml.c5.xlarge", "ml.trn1.2xlarge"), "NEURON", "first"),
    ("SM-06", "error", image("x/y-neuronx:1-py310", "ml.c5.xlarge", "ml.p4d.24xlarge"), "for GPU", "training_image"),
    (
        "SM-07",
        "error",
        both(in_resources(InstanceGroups=SIX), channels(channel("a"))),
        "found 6 items, expected at most 5",
        "API_ResourceConfig",
    ),
    ("SM-08", "error", named("data" * 17, "dnn_group"), "68 characters, expected at most 64", "letters"),
    ("SM-08", "error", named("data", "data"), "the name 'data'", "a different name"),
    ("SM-08", "warning", named("data/cpu", "dnn_group"), "characters of paths", "letters"),
    ("SM-08", "warning", named("data", "dnn\n"), "characters of paths", "letters"),
    ("SM-09", "warning", in_whole(StoppingCondition={}), "a day of 2 x ml.c5.9xlarge, 1 x ml.g5.xlarge", "max_run"),
    (
        "SM-09",
        "warning",
        in_whole(StoppingCondition={"MaxRuntimeInSeconds": 86400}),
        "86400 s. The service bills a day",
        "max_run",
    ),
    ("SM-10", "warning", types("ml.c5.xlarge", "ml.g5.xlarge", volume_gb=500), "It has 250 GB of local", "FastFile"),
    ("SM-10", "warning", types("ml.r5d.xlarge", "ml.g5.xlarge", volume_gb=100), "150 GB of local NVMe", "volume_size"),
    ("SM-11", "error", types("ml.c5.xlarge", "ml.g5.xlarge", volume_gb=None), "has only EBS storage", "volume_size"),
    ("SM-11", "error", types("ml.c5.xlarge", "ml.g5.xlarge", volume_gb=0), "has only EBS storage", "volume_size"),
    ("SM-12", "error", in_resources(VolumeKmsKeyId="1234"), "ml.g5.xlarge of group 'dnn_group'", "volume_kms_key"),
    ("SM-13", "warning", in_whole(VpcConfig=VPC), "'sg-1', 'sg-2'", "all TCP ports from and to"),
    ("SM-14", "warning", in_whole(EnableInterContainerTrafficEncryption=True), "encrypts all batches", "measure"),
    ("SM-15", "error", in_whole(Environment={"HETERO_TOKEN": "x" * 43}), "HETERO_TOKEN", "prepare(estimator, token"),
    ("SM-15", "error", in_whole(Environment={"HETERO_TOKEN_FILE": "x" * 43}), "HETERO_TOKEN_FILE", "token=...)"),
    ("SM-15", "error", hyperparameters(hetero_token='"short"'), "'hetero_token'", "prepare(estimator, token"),
    ("SM-15", "warning", in_whole(Environment={"DB_PASSWORD": "hunter2!"}), "DB_PASSWORD", "Secrets Manager"),
    ("SM-15", "warning", in_whole(Environment={"HF_TOKEN": "hf_" + "x" * 34}), "HF_TOKEN", "Secrets Manager"),
    ("SM-15", "warning", hyperparameters(wandb_api_key='"' + "1f" * 20 + '"'), "'wandb_api_key'", "Secrets"),
    ("SM-15", "warning", hyperparameters(user="AKIA" + "A" * 16), "'user'", "Secrets"),
    ("SM-16", "error", in_resources(KeepAlivePeriodInSeconds=600), "is 600", "keep_alive_period_in_seconds"),
    ("SM-17", "error", types("c5.xlarge", "ml.g5.xlarge"), "'c5.xlarge', which SageMaker does not have", "ml.c5"),
    ("SM-17", "error", types("local", "ml.g5.xlarge"), "Local mode does not support", "rehearse"),
    ("SM-17", "warning", types("ml.c5.9xlarg", "ml.g5.xlarge"), "a size that hetero does not know", "ml.c5.9xlarge,"),
    ("SM-18", "error", in_resources(InstanceType="ml.m5.large", InstanceCount=1), "'InstanceType', 'I", "leave out"),
    (
        "SM-19",
        "warning",
        both(named("a", "b"), types("ml.c5.xlarge", "ml.m5.large")),
        "whether group 'a'",
        "hetero_roles",
    ),
    ("SM-19", "warning", named("gpu_a", "gpu_b"), "'gpu_a', 'gpu_b' all train", "hetero_roles"),
    ("SM-19", "warning", hyperparameters(hetero_roles="data_grup=data"), "no group has that name", "hetero_roles"),
    ("SM-20", "error", channels(channel("a", S3DataDistributionType="ShardedByS3Key")), "2 data hosts", "FullyRep"),
    (
        "SM-21",
        "error",
        channels(*(channel(f"c{index}") for index in range(21))),
        "21 items, expected at most 20",
        "API_",
    ),
    ("SM-21", "error", channels(channel("a b")), "ChannelName: does not match", "API_Channel"),
    (
        "SM-21",
        "error",
        channels({**channel("a"), "InputMode": "Fast"}),
        "expected one of File, Pipe, FastFile",
        "API_Ch",
    ),
    ("SM-22", "error", metrics(41), "41 items, expected at most 40", "API_AlgorithmSpecification"),
    ("SM-22", "error", metrics(1, "x" * 501), "501 characters, expected at most 500", "API_MetricDefinition"),
    ("SM-23", "error", hyperparameters(**{f"p{index}": "1" for index in range(100)}), "102 items", "API_Create"),
    ("SM-23", "error", hyperparameters(note="x" * 2501), "['note']: found 2501 characters", "API_CreateTrainingJob"),
    ("SM-24", "error", in_whole(Environment={f"N{index}": "1" for index in range(101)}), "101 items", "API_Create"),
    ("SM-24", "error", in_whole(Environment={"A-B": "1"}), "Environment['A-B']: does not match", "API_Create"),
    ("SM-25", "error", in_whole(TrainingJobName="x" * 64), "64 characters, expected at most 63", "API_Create"),
    ("SM-25", "error", in_whole(StoppingCondition={"MaxRuntimeInSeconds": 2419201}), "at most 2419200", "API_Stop"),
    ("SM-26", "warning", without_script(hyperparameters(sagemaker_program="train.py")), "runs 'train.py'", "prepare"),
    (
        "SM-27",
        "warning",
        channels(channel("a", "dnn_group"), channel("b", "data_group", "dnn_group")),
        "no data host gets the channels 'a'",
        "name 'data_group'",
    ),
]


def findings(change: Change) -> list[Finding]:
    document = clean()
    change(document)
    return check_request(TrainingRequest.parse(document))


@pytest.mark.parametrize(("number", "severity", "change", "found", "fix"), CASES, ids=[case[0] for case in CASES])
def test_rule_gives_one_finding_and_its_fix(number: str, severity: str, change: Change, found: str, fix: str) -> None:
    (finding,) = findings(change)
    assert (finding.number, finding.severity) == (number, severity)
    assert found in finding.found
    assert fix in finding.fix


def test_every_number_has_a_request_that_gives_it() -> None:
    assert sorted({case[0] for case in CASES}) == sorted(NUMBERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_number_is_in_the_documentation(number: str) -> None:
    assert f"| {number} | {NUMBERS[number]} |" in DOCS.read_text(encoding="utf-8")


CLEAN_CHANGES = {
    "as it is": in_whole(),
    "no channels": lambda document: document.pop("InputDataConfig"),
    "channels for all": channels(channel("a"), channel("b")),
    "one group": both(in_resources(InstanceGroups=SIX[-1:]), channels(channel("a"))),
    "no groups, and a list of none": lambda document: document.update(
        ResourceConfig={
            "InstanceType": "ml.g5.xlarge",
            "InstanceCount": 2,
            "VolumeSizeInGB": 30,
            "InstanceGroups": [],
            "KeepAlivePeriodInSeconds": 600,
        },
        InputDataConfig=[channel("a")],
    ),
    "no groups": lambda document: document.update(
        ResourceConfig={"InstanceType": "ml.g5.xlarge", "InstanceCount": 2, "VolumeSizeInGB": 30},
        InputDataConfig=[channel("a")],
    ),
    "MPI on the trainer group": hyperparameters(
        sagemaker_mpi_enabled="true", sagemaker_distribution_instance_groups='["dnn_group"]'
    ),
    "MPI without groups": both(
        hyperparameters(sagemaker_mpi_enabled="true"),
        both(in_resources(InstanceGroups=SIX[-1:]), channels(channel("a"))),
    ),
    "an image of one's own": image("train:latest", "ml.c5.xlarge", "ml.trn1.2xlarge"),
    "Trainium's image": image("pytorch-training-neuronx:2.1.2-py310", "ml.c5.xlarge", "ml.trn1.2xlarge"),
    "a volume for hosts with EBS, less than the others have": types("ml.c5.xlarge", "ml.g5.xlarge", volume_gb=200),
    "a type that is not known": types("ml.c5.xlarge", "ml.g99.xlarge", volume_gb=500),
    "no volume, all have NVMe": types("ml.r5d.xlarge", "ml.g5.xlarge", volume_gb=None),
    "one host in a VPC": both(
        in_resources(InstanceGroups=SIX[-1:]), both(channels(channel("a")), in_whole(VpcConfig=VPC))
    ),
    "no encryption": in_whole(EnableInterContainerTrafficEncryption=False),
    "an hour, from version 2": in_whole(StoppingCondition={"MaxRuntimeInSeconds": 3600}),
    "a day, from version 3": both(
        in_whole(StoppingCondition={"MaxRuntimeInSeconds": 86400}), channels(channel("code"), channel("sm_drivers"))
    ),
    "roles that are stated": both(
        both(named("a", "b"), types("ml.c5.xlarge", "ml.m5.large")),
        hyperparameters(hetero_roles='["a=data", "b=trainer"]'),
    ),
    "roles that are stated otherwise": both(
        both(named("a", "b"), types("ml.c5.xlarge", "ml.m5.large")), hyperparameters(hetero_roles='"a=data,b=trainer"')
    ),
    "shards for one data host": both(
        in_groups(InstanceCount=1), channels(channel("a", "data_group", S3DataDistributionType="ShardedByS3Key"))
    ),
    "names and values near secrets": both(
        hyperparameters(max_tokens="2048", tokenizer='"bert-base-uncased-tokenizer"', pad_token='"<|endoftext|>"'),
        in_whole(
            Environment={
                "HETERO_TOKEN_FILE": "/opt/ml/code/token",
                "hetero_token_file": "token.txt",
                "AWS_SECRET": "arn:aws:secretsmanager:x:y",
                "DB_PASSWORD": "arn:aws:secretsmanager:x:z",
            }
        ),
    ),
}


@pytest.mark.parametrize("change", CLEAN_CHANGES.values(), ids=CLEAN_CHANGES)
def test_clean_request_gives_no_finding(change: Change) -> None:
    assert findings(change) == []


def test_hour_of_version_3_says_that_the_job_is_cut_off() -> None:
    added = channels(channel("code"), channel("sm_drivers"))
    (finding,) = findings(both(in_whole(StoppingCondition={"MaxRuntimeInSeconds": 3600}), added))
    assert (finding.number, finding.severity) == ("SM-09", "warning")
    assert "after 3600 s" in finding.found


def test_encryption_of_a_job_in_a_vpc_needs_two_more_rules() -> None:
    found = findings(in_whole(VpcConfig=VPC, EnableInterContainerTrafficEncryption=True))
    assert [finding.number for finding in found] == ["SM-13", "SM-14"]
    assert "UDP 500 and protocol 50" in found[0].fix


def test_encryption_with_tls_says_that_it_is_done_twice() -> None:
    change = both(in_whole(EnableInterContainerTrafficEncryption=True), hyperparameters(hetero_tls_dir="/tls"))
    (finding,) = findings(change)
    assert "a second time" in finding.found


def test_secrets_are_never_shown() -> None:
    secret = "hf_" + "S" * 600  # too long as well
    found = findings(in_whole(Environment={"HF_TOKEN": secret}))
    assert [finding.number for finding in found] == ["SM-15", "SM-24"]
    assert "SSSS" not in findings_text(found)


@given(st.data())
def test_values_of_wrong_types_are_refused_or_checked(data: st.DataObject) -> None:
    document = clean()
    document |= {"VpcConfig": copy.deepcopy(VPC), "Tags": [], "EnableInterContainerTrafficEncryption": True}
    where: Any = document
    while isinstance(where, (dict, list)) and where:
        keys = list(where) if isinstance(where, dict) else list(range(len(where)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(where[key], (dict, list)) or data.draw(st.booleans()):
            break
        where = where[key]
    else:
        return
    where[key] = data.draw(st.sampled_from([None, 0, -1, 1.5, True, "", "x", [], [1], {}, {"x": 1}]))
    with contextlib.suppress(ConfigError):
        check_request(TrainingRequest.parse(document))


def test_findings_come_by_number_and_are_counted() -> None:
    found = findings(both(in_whole(StoppingCondition={}), hyperparameters(sagemaker_mpi_enabled="true")))
    text = findings_text(found)
    assert [finding.number for finding in found] == ["SM-02", "SM-09"]
    assert text.startswith("SM-02 error: the distribution names no group")
    assert "\n  fix: in distribution['instance_groups'], name exactly one group" in text
    assert text.endswith("\nerrors: 1, warnings: 1")


def write(path: Path, change: Change) -> str:
    document = clean()
    change(document)
    path.write_text(json.dumps(document))
    return str(path)


@pytest.mark.parametrize(
    ("change", "status"),
    [(in_whole(), 0), (in_whole(StoppingCondition={}), 0), (in_resources(KeepAlivePeriodInSeconds=1), 1)],
    ids=["clean", "warning", "error"],
)
def test_command_ends_with_1_for_errors_only(
    change: Change, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "request.json", change)
    assert cli.main(["check", path]) == status
    assert capsys.readouterr().out.splitlines()[-1].startswith("errors: ")
    assert cli.main(["check", "--json", path]) == status
    document = json.loads(capsys.readouterr().out)
    assert [Finding(**item) for item in document["findings"]] == findings(change)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"ResourceConfig": {}}'])
def test_command_with_no_request_ends_with_2(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    if content is not None:
        path.write_text(content)
    assert cli.main(["check", str(path)]) == 2
    assert "request.json" in capsys.readouterr().err


def test_object_that_is_no_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="type dict"):
        check({})


class TestVersion2:
    """Real estimators of version 2 of the SDK."""

    @pytest.fixture(autouse=True)
    def _has_version_2(self) -> None:
        pytest.importorskip("sagemaker.estimator", reason="this is about version 2 of the SDK")

    def test_clean_estimator_gives_no_finding(self, source_dir: Path) -> None:
        from sagemaker.inputs import TrainingInput

        inputs = {
            "training": TrainingInput("s3://bucket/training", instance_groups=["data_group"]),
            "labels": TrainingInput("s3://bucket/labels", instance_groups=["data_group", "dnn_group"]),
        }
        assert check(pytorch(source_dir), inputs) == []

    def test_channel_without_groups_beside_others_is_found(self, source_dir: Path) -> None:
        from sagemaker.inputs import TrainingInput

        inputs = {"a": TrainingInput("s3://bucket/a", instance_groups=["data_group"]), "b": "s3://bucket/b"}
        (finding,) = check(pytorch(source_dir), inputs)
        assert (finding.number, "'b'" in finding.found) == ("SM-03", True)

    def test_arguments_of_the_estimator_are_found(self, source_dir: Path) -> None:
        estimator = pytorch(
            source_dir,
            max_run=None,
            volume_kms_key="1234",
            subnets=["subnet-1"],
            security_group_ids=["sg-1"],
            encrypt_inter_container_traffic=True,
            environment={"HF_TOKEN": "hf_" + "x" * 34},
            hyperparameters={"wandb_api_key": "1f" * 20},
            keep_alive_period_in_seconds=600,
            metric_definitions=[{"Name": f"m{index}", "Regex": "x"} for index in range(41)],
        )
        numbers = [finding.number for finding in check(estimator)]
        assert numbers == ["SM-09", "SM-12", "SM-13", "SM-14", "SM-15", "SM-15", "SM-16", "SM-22"]

    def test_order_of_the_groups_decides_the_image(self, source_dir: Path) -> None:
        from sagemaker.instance_group import InstanceGroup

        pair = [InstanceGroup("data_group", "ml.c5.9xlarge", 1), InstanceGroup("trn_group", "ml.trn1.32xlarge", 1)]
        version = {"framework_version": "1.11.0", "py_version": "py38"}
        (finding,) = check(pytorch(source_dir, instance_groups=pair, **version))
        assert (finding.number, "-cpu-" in finding.found) == ("SM-06", True)
        assert check(pytorch(source_dir, instance_groups=pair[::-1], **version)) == []
        assert check(pytorch(source_dir, instance_groups=groups())) == []  # here it looks for a type with GPUs

    def test_torch_distributed_with_groups_is_found(self, source_dir: Path) -> None:
        pair = groups()
        distribution = {"torch_distributed": {"enabled": True}, "instance_groups": [pair[1]]}
        version = {"framework_version": "2.1.0", "py_version": "py310"}
        (finding,) = check(pytorch(source_dir, instance_groups=pair, distribution=distribution, **version))
        assert finding.number == "SM-01"

    def test_several_distribution_groups_are_refused_by_the_sdk_and_found_if_they_come_later(
        self, source_dir: Path
    ) -> None:
        pair = groups()
        distribution = {"mpi": {"enabled": True}, "instance_groups": pair}
        with pytest.raises(ValueError, match="only contain one instance group"):
            pytorch(source_dir, instance_groups=pair, distribution=distribution)
        estimator = pytorch(source_dir, instance_groups=pair, distribution=distribution | {"instance_groups": pair[1:]})
        assert check(estimator) == []
        estimator.distribution["instance_groups"] = ["data_group", "dnn_group"]
        assert [finding.number for finding in check(estimator)] == ["SM-02"]

    def test_local_mode_is_found(self, source_dir: Path) -> None:
        estimator = pytorch(source_dir)
        estimator.sagemaker_session.local_mode = True
        (finding,) = check(estimator)
        assert (finding.number, "rehearse" in finding.fix) == ("SM-17", True)
