"""Reading a request: what it says, what it leaves out, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero.documents.files import MAX_BYTES
from hetero.errors import ConfigError
from hetero.sagemaker import TrainingRequest, read_request
from hetero.sagemaker.request import ONLY_GROUP, Channel, RequestGroup
from tests.support.sagemaker.estimators import channel, clean


def test_heterogeneous_request_is_read() -> None:
    request = TrainingRequest.parse(clean())
    assert request.is_heterogeneous
    assert request.name == "train"
    assert request.groups == (
        RequestGroup(name="data_group", instance_type="ml.c5.9xlarge", count=2),
        RequestGroup(name="dnn_group", instance_type="ml.g5.xlarge", count=1),
    )
    assert request.channels[0] == Channel(
        name="training", mode="FastFile", uri="s3://bucket/training", groups=("data_group",)
    )
    assert request.hyperparameters == {"hetero_script": '"train.py"', "epochs": "3"}
    assert request.environment == {"OMP_NUM_THREADS": "1"}


def test_request_without_groups_has_the_one_that_the_service_makes() -> None:
    request = TrainingRequest.parse({"ResourceConfig": {"InstanceType": "ml.g5.xlarge", "InstanceCount": 3}})
    assert not request.is_heterogeneous
    assert request.groups == (RequestGroup(name=ONLY_GROUP, instance_type="ml.g5.xlarge", count=3),)
    assert (request.channels, request.hyperparameters, request.environment) == ((), {}, {})


def test_mode_of_a_channel_beats_that_of_the_job_and_file_is_the_last_word() -> None:
    document = clean()
    document["InputDataConfig"] = [channel("a"), {**channel("b"), "InputMode": "Pipe"}]
    assert [item.mode for item in TrainingRequest.parse(document).channels] == ["FastFile", "Pipe"]
    del document["AlgorithmSpecification"]
    assert [item.mode for item in TrainingRequest.parse(document).channels] == ["File", "Pipe"]


def test_channel_of_a_file_system_has_no_uri() -> None:
    document = clean()
    source = {"FileSystemId": "fs-12345678", "FileSystemType": "EFS", "DirectoryPath": "/data"}
    document["InputDataConfig"] = [{"ChannelName": "a", "DataSource": {"FileSystemDataSource": source}}]
    (found,) = TrainingRequest.parse(document).channels
    assert (found.uri, found.groups) == ("", ())


def test_description_of_a_job_is_read(tmp_path: Path) -> None:
    described = clean() | {
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:000000000000:training-job/train",
        "TrainingJobStatus": "Failed",
        "FailureReason": "AlgorithmError",
        "CreationTime": 1.5,
        "SecondaryStatusTransitions": [{"Status": "Starting"}],
        "ModelArtifacts": {"S3ModelArtifacts": "s3://bucket/model.tar.gz"},
        "BillableTimeInSeconds": 12,
        "Environment": None,
    }
    described["ResourceConfig"]["InstanceCount"] = None  # other tools than the CLI write nulls
    path = tmp_path / "job.json"
    path.write_text(json.dumps(described, indent=4))
    request = read_request(path)
    assert request.groups == TrainingRequest.parse(clean()).groups
    assert request.environment == {}


BROKEN = [
    ([], "found [], expected an object"),
    ({}, "ResourceConfig: missing, expected an object"),
    ({"ResourceConfig": []}, "ResourceConfig: found [], expected an object"),
    (
        {"ResourceConfig": {"InstanceType": "ml.c5.xlarge"}},
        "ResourceConfig.InstanceCount: missing, expected an int",
    ),
    (
        {"ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": "2"}},
        "ResourceConfig.InstanceCount: found '2', expected an integer",
    ),
    ({"ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": True}}, "InstanceCount: found True"),
    ({"ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": -1}}, "InstanceCount: found -1"),
    ({"ResourceConfig": {"InstanceType": "ml.c5.xlarge", "InstanceCount": 0}}, "found 0, expected a number from 1"),
    ({"ResourceConfig": {"InstanceType": "", "InstanceCount": 1}}, "found '', expected an instance type"),
    ({"ResourceConfig": {"InstanceCount": 1}}, "ResourceConfig.InstanceType: missing, expected an instance type"),
    (
        {"ResourceConfig": {"InstanceTyp": "ml.c5.xlarge", "InstanceCount": 1}},
        "ResourceConfig.InstanceType: missing, expected an instance type; 'InstanceTyp' is an unknown key",
    ),
    ({"ResourceConfig": {"InstanceGroups": [3]}}, "InstanceGroups[0]: found 3, expected an object"),
    ({"ResourceConfig": {"InstanceGroups": [{}]}}, "InstanceGroups[0].InstanceGroupName: missing, expected a name"),
    ({"ResourceConfig": {"InstanceGroups": {"a": 1}}}, "InstanceGroups: found {'a': 1}, expected a list"),
    ({**clean(), "HyperParameters": {"epochs": 3}}, "HyperParameters.epochs: found 3, expected a string"),
    ({**clean(), "Environment": ["A"]}, "Environment: found ['A'], expected an object"),
    ({**clean(), "InputDataConfig": {"a": 1}}, "InputDataConfig: found {'a': 1}, expected a list"),
    ({**clean(), "InputDataConfig": [channel("a", 3)]}, "S3DataSource.InstanceGroupNames[0]: found 3"),  # type: ignore[arg-type]
    (
        {**clean(), "InputDataConfig": [channel("a", S3Uri=5)]},
        "[0].DataSource.S3DataSource.S3Uri: found 5",
    ),
    (
        {**clean(), "AlgorithmSpecification": {"TrainingInputMode": 1}},
        "Specification.TrainingInputMode: found 1",
    ),
    ({**clean(), "TrainingJobName": 1}, "TrainingJobName: found 1, expected a string"),
]


@pytest.mark.parametrize(("document", "words"), BROKEN, ids=[words for _, words in BROKEN])
def test_malformed_member_is_named(document: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingRequest.parse(document, "job.json")
    assert str(caught.value).startswith("job.json")
    assert words in str(caught.value)


def test_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainingRequest.parse(clean() | {"TrainingJobName": ["x" * 1000]})
    assert len(str(caught.value).splitlines()[0]) < 160


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b" " * MAX_BYTES + b"{}", f"at most {MAX_BYTES} bytes"),
    ],
    ids=["cut off", "nested", "no text", "too large"],
)
def test_file_that_is_no_request_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_request(path)
    assert "request.json" in str(caught.value)
    assert words in str(caught.value)


def test_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the request .*: No such file"):
        read_request(tmp_path / "none.json")
