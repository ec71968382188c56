"""The recorded request of SDK 2, beside the one that goes out when the same estimator is really submitted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.sagemaker import offline_session, prepare, record
from tests.support.sagemaker.estimators import ROLE, groups
from tests.support.sagemaker.guards import state_of, unpacked, watch_network

pytest.importorskip("sagemaker.estimator", reason="needs the SageMaker SDK 2")

import boto3
from moto import mock_aws
from sagemaker.estimator import Estimator
from sagemaker.inputs import TrainingInput
from sagemaker.pytorch import PyTorch
from sagemaker.session import Session
from sagemaker.tensorflow import TensorFlow

BUCKET = "own-bucket"
INPUTS = {
    "training": TrainingInput("s3://bucket/training", instance_groups=["data_group"], input_mode="Pipe"),
    "labels": TrainingInput("s3://bucket/labels", instance_groups=["dnn_group"]),
}
OPTED_OUT = {
    "SchemaVersion": "1.0",
    "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}},
}


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a real session. Behind it is moto."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        boto_session = boto3.Session(region_name="us-east-1")
        boto_session.client("s3").create_bucket(Bucket=BUCKET)
        yield Session(boto_session=boto_session, default_bucket=BUCKET, sagemaker_config=OPTED_OUT)


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('train')\n")
    return folder


def make(kind: str, code_dir: Path, session: Any) -> Any:
    common = {
        "entry_point": "train.py",
        "source_dir": str(code_dir),
        "role": ROLE,
        "sagemaker_session": session,
        "instance_groups": groups(),
        "hyperparameters": {"epochs": 3, "name": "two words"},
        "max_run": 3600,
        "environment": {"A": "1"},
        "metric_definitions": [{"Name": "loss", "Regex": "loss ([0-9.]+)"}],
    }
    if kind == "PyTorch":
        distribution = {"mpi": {"enabled": True}, "instance_groups": [common["instance_groups"][1]]}
        return PyTorch(**common, framework_version="2.3", py_version="py311", distribution=distribution)
    if kind == "TensorFlow":
        return TensorFlow(**common, framework_version="2.16", py_version="py310", model_dir="s3://bucket/model")
    return Estimator(**common, image_uri="000000000000.dkr.ecr.us-east-1.amazonaws.com/own:1")


def submit(estimator: Any, inputs: Any, job_name: str) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Submit a job. Return what went over the wire, and what is in the bucket: URI -> content."""
    bodies: list[bytes] = []
    session = estimator.sagemaker_session
    events = session.sagemaker_client.meta.events
    events.register("before-call.sagemaker.CreateTrainingJob", lambda params, **_: bodies.append(params["body"]))
    estimator.fit(inputs, wait=False, job_name=job_name)
    (body,) = bodies
    bucket = session.boto_session.resource("s3").Bucket(BUCKET)
    objects = {f"s3://{BUCKET}/{each.key}": each.get()["Body"].read() for each in bucket.objects.all()}
    return json.loads(body), objects


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("kind", ["PyTorch", "TensorFlow", "Estimator"])
def test_recorded_request_is_the_one_that_goes_out(session: Any, code_dir: Path, kind: str, is_prepared: bool) -> None:
    estimator = make(kind, code_dir, session)
    if is_prepared:
        prepare(estimator)
    recording = record(estimator, INPUTS, job_name="job-1")
    request, objects = submit(estimator, INPUTS, "job-1")
    assert recording.request.document == request
    assert recording.request.name == "job-1"
    assert set(recording.objects) == set(objects)
    archives = [uri for uri in objects if uri.endswith(".tar.gz")]
    assert len(archives) == 1
    for uri, content in objects.items():
        if uri in archives:
            assert unpacked(recording.objects[uri]) == unpacked(content)
        else:
            assert recording.objects[uri] == content
    assert record(estimator, INPUTS, job_name="job-1").request.document == request  # after the submission, too


def test_recording_changes_neither_estimator_nor_session(session: Any, code_dir: Path) -> None:
    estimator = make("PyTorch", code_dir, session)
    before = [state_of(each) for each in (estimator, session, session.boto_session)]
    record(estimator, INPUTS)
    assert [state_of(each) for each in (estimator, session, session.boto_session)] == before
    assert session.sagemaker_client.list_training_jobs()["TrainingJobSummaries"] == []
    assert list(session.boto_session.resource("s3").Bucket(BUCKET).objects.all()) == []
    assert INPUTS["training"].config["DataSource"]["S3DataSource"]["S3Uri"] == "s3://bucket/training"


def test_recording_reaches_no_network(code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = watch_network(monkeypatch)
    estimator = make("PyTorch", code_dir, offline_session())
    record(prepare(estimator), INPUTS)
    assert attempts == []


def test_session_without_a_bucket_gets_that_of_an_account_of_zeros(code_dir: Path) -> None:
    recording = record(make("Estimator", code_dir, offline_session()), INPUTS)
    assert recording.request.document["OutputDataConfig"]["S3OutputPath"] == "s3://sagemaker-us-east-1-000000000000/"


def test_local_inputs_get_a_stand_in_and_are_not_uploaded(code_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("a")
    estimator = make("Estimator", code_dir, offline_session())
    local = TrainingInput(f"file://{data}", instance_groups=["data_group"])
    recording = record(estimator, {"training": local, "labels": INPUTS["labels"]})
    (uri,) = recording.local_data
    channels = {channel.name: channel for channel in recording.request.channels}
    assert recording.local_data[uri] == data
    assert (channels["training"].uri, channels["training"].groups) == (uri, ("data_group",))
    assert channels["labels"].uri == "s3://bucket/labels"
    assert not any(name.startswith(uri) for name in recording.objects)
    assert local.config["DataSource"]["S3DataSource"]["S3Uri"] == f"file://{data}"
    with pytest.raises(ConfigError, match="does not exist; give a local folder or an S3 URI"):
        record(estimator, {"training": f"file://{tmp_path}/none"})


def test_offline_session_submits_nothing(code_dir: Path) -> None:
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError, match="CreateTrainingJob needs an account, but this session is offline"):
        make("Estimator", code_dir, offline_session()).fit(INPUTS, wait=False)


def test_what_is_no_estimator_is_an_error() -> None:
    with pytest.raises(ConfigError, match="found an object of type dict; expected an estimator of the SageMaker SDK"):
        record({})


def test_local_mode_is_an_error_that_says_what_to_do(code_dir: Path) -> None:
    estimator = make("Estimator", code_dir, offline_session())
    estimator.sagemaker_session.local_mode = True
    with pytest.raises(ConfigError, match="hetero.sagemaker.rehearse runs the job on this machine"):
        record(estimator)


def test_upload_in_parts_is_refused_before_all_of_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.sagemaker.recording.MAX_CODE_BYTES", 10)
    client = offline_session().boto_session.client("s3")
    upload = {"Bucket": "bucket", "Key": "code", "UploadId": "none"}
    client.upload_part(**upload, PartNumber=1, Body=b"12345678")
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        client.upload_part(**upload, PartNumber=2, Body=b"12345678")


def test_code_with_data_in_it_is_refused(code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.sagemaker.recording.MAX_CODE_BYTES", 10)
    with pytest.raises(ConfigError, match="more than 10 bytes; expected a source_dir without data"):
        record(make("Estimator", code_dir, offline_session()))
