"""The recorded request of SDK 3, beside the one that goes out when the same trainer really trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.sagemaker import offline_session, prepare, record
from tests.support.sagemaker.estimators import IMAGE, ROLE
from tests.support.sagemaker.guards import state_of, watch_network

pytest.importorskip("sagemaker.train", reason="needs the SageMaker SDK 3: make test-v3")

import boto3
from botocore.exceptions import ClientError
from moto import mock_aws
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import InstanceGroup, S3DataSource
from sagemaker.core.training.configs import Compute, InputData, SourceCode, StoppingCondition
from sagemaker.core.utils.utils import SageMakerClient
from sagemaker.train import ModelTrainer

BUCKET = "own-bucket"
OPTED_OUT = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}


@pytest.fixture(autouse=True)
def _one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every job of a trainer the same name. It has the time in it."""
    monkeypatch.setattr("sagemaker.train.model_trainer._get_unique_name", lambda base, *_: f"{base}-1")


@pytest.fixture(autouse=True)
def _own_client() -> Iterator[None]:
    """Leave no client for the next test: one serves the whole process."""
    instances = type(SageMakerClient)._instances
    instances.pop(SageMakerClient, None)
    yield
    instances.pop(SageMakerClient, None)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a real session. Behind it is moto."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with mock_aws():
        boto_session = boto3.Session(region_name="us-east-1")
        # The SDK asks what the role may do, which moto does not know. Most users may not ask.
        denied = {"Error": {"Code": "AccessDenied", "Message": "not for this user"}}
        answer = SimpleNamespace(status_code=403, headers={}), denied
        boto_session.events.register("before-call.iam", lambda **_: answer)
        boto_session.client("s3").create_bucket(Bucket=BUCKET)
        yield Session(boto_session=boto_session, default_bucket=BUCKET, sagemaker_config=OPTED_OUT)


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text("print('train')\n")
    (folder / "notes.md").write_text("not for the job\n")
    return folder


def channel(name: str, group: str) -> InputData:
    source = S3DataSource(
        s3_data_type="S3Prefix",
        s3_uri=f"s3://bucket/{name}",
        s3_data_distribution_type="FullyReplicated",
        instance_group_names=[group],
    )
    return InputData(channel_name=name, data_source=source)


def make(code_dir: Path, session: Any) -> ModelTrainer:
    groups = [
        InstanceGroup(instance_group_name="data_group", instance_type="ml.c5.9xlarge", instance_count=2),
        InstanceGroup(instance_group_name="dnn_group", instance_type="ml.g5.xlarge", instance_count=1),
    ]
    return ModelTrainer(
        training_image=IMAGE,
        source_code=SourceCode(source_dir=str(code_dir), entry_script="train.py", ignore_patterns=["*.md"]),
        compute=Compute(instance_groups=groups, volume_size_in_gb=30),
        stopping_condition=StoppingCondition(max_runtime_in_seconds=3600),
        role=ROLE,
        sagemaker_session=session,
        hyperparameters={"epochs": 3, "name": "two words"},
        environment={"A": "1"},
        input_data_config=[channel("training", "data_group")],
    )


def submit(trainer: ModelTrainer, inputs: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Train for real. Return what went over the wire, and what is in the bucket: URI -> content."""
    bodies: list[bytes] = []
    boto_session = trainer.sagemaker_session.boto_session
    boto_session.events.register(
        "before-call.sagemaker.CreateTrainingJob", lambda params, **_: bodies.append(params["body"])
    )
    trainer.train(inputs, wait=False, logs=False)
    (body,) = bodies
    bucket = boto_session.resource("s3").Bucket(BUCKET)
    return json.loads(body), {f"s3://{BUCKET}/{each.key}": each.get()["Body"].read() for each in bucket.objects.all()}


@pytest.mark.parametrize("is_prepared", [False, True])
def test_recorded_request_is_the_one_that_goes_out(session: Any, code_dir: Path, is_prepared: bool) -> None:
    trainer, inputs = make(code_dir, session), [channel("labels", "dnn_group")]
    if is_prepared:
        prepare(trainer)
    recording = record(trainer, inputs)
    request, objects = submit(trainer, inputs)
    assert recording.request.document == request
    assert recording.objects == objects
    groups = {channel.name: channel.groups for channel in recording.request.channels}
    assert groups["training"] == ("data_group",)
    assert groups["labels"] == ("dnn_group",)
    assert groups["code"] == groups["sm_drivers"] == ("data_group", "dnn_group")


def test_recording_changes_neither_trainer_nor_session(session: Any, code_dir: Path) -> None:
    trainer = make(code_dir, session)
    before = [state_of(each) for each in (trainer, session, session.boto_session)], repr(trainer)
    record(trainer, [channel("labels", "dnn_group")])
    assert ([state_of(each) for each in (trainer, session, session.boto_session)], repr(trainer)) == before
    assert list(session.boto_session.resource("s3").Bucket(BUCKET).objects.all()) == []
    assert session.sagemaker_client.list_training_jobs()["TrainingJobSummaries"] == []


def test_recording_reaches_no_network(code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = watch_network(monkeypatch)
    record(prepare(make(code_dir, offline_session())))
    assert attempts == []


def test_client_of_the_user_is_the_same_afterwards_and_works(session: Any, code_dir: Path) -> None:
    users = SageMakerClient(session=session.boto_session, region_name="us-east-1")
    record(make(code_dir, offline_session()))
    assert SageMakerClient() is users
    assert users.get_client("sagemaker").list_training_jobs()["TrainingJobSummaries"] == []


def test_client_of_a_recording_does_not_stay(session: Any, code_dir: Path) -> None:
    record(make(code_dir, session))
    assert SageMakerClient not in type(SageMakerClient)._instances
    request, _ = submit(make(code_dir, session), None)
    assert (
        session.sagemaker_client.list_training_jobs()["TrainingJobSummaries"][0]["TrainingJobName"]
        == (request["TrainingJobName"])
    )


def test_local_inputs_get_a_stand_in_and_are_not_uploaded(code_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a").write_text("a")
    inputs = [InputData(channel_name="training", data_source=str(data))]
    recording = record(make(code_dir, offline_session()), inputs)
    (uri,) = recording.local_data
    assert recording.local_data[uri] == data
    assert {each.name: each.uri for each in recording.request.channels}["training"] == uri
    assert not any(name.endswith("/a") for name in recording.objects)
    assert inputs[0].data_source == str(data)


def test_offline_session_trains_nothing(code_dir: Path) -> None:
    with pytest.raises(ClientError, match="CreateTrainingJob needs an account, but this session is offline"):
        make(code_dir, offline_session()).train(wait=False)


def test_local_mode_is_an_error_that_says_what_to_do(code_dir: Path) -> None:
    from sagemaker.train.model_trainer import Mode

    trainer = make(code_dir, offline_session())
    trainer.training_mode = Mode.LOCAL_CONTAINER
    with pytest.raises(ConfigError, match="hetero.sagemaker.rehearse runs the job on this machine"):
        record(trainer)
