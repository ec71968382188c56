"""Submitting a ``ModelTrainer`` of SDK 3. moto replaces the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.sagemaker import submit
from tests.support.sagemaker.estimators import IMAGE, ROLE

pytest.importorskip("sagemaker.train", reason="needs the SageMaker SDK 3: make test-v3")

import boto3
from moto import mock_aws
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.shapes import InstanceGroup
from sagemaker.core.training.configs import Compute, SourceCode
from sagemaker.core.utils.utils import SageMakerClient
from sagemaker.train import ModelTrainer

OPTED_OUT = {"SchemaVersion": "1.0", "SageMaker": {"PythonSDK": {"Modules": {"TelemetryOptOut": True}}}}
SHORT = {"Error": {"Code": "ResourceLimitExceeded", "Message": "the quota of ml.g5.xlarge is used up"}}


@pytest.fixture
def boto_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a session with an account at moto's, which takes every job and says that it has completed."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    instances = type(SageMakerClient)._instances
    instances.pop(SageMakerClient, None)
    with mock_aws():
        made = boto3.Session(region_name="us-east-1")
        # The SDK asks what the role may do, which moto does not know. Most users may not ask.
        denied = SimpleNamespace(status_code=403, headers={}), {"Error": {"Code": "AccessDenied", "Message": "no"}}
        made.events.register("before-call.iam", lambda **_: denied)
        made.client("s3").create_bucket(Bucket="own-bucket")
        yield made
    instances.pop(SageMakerClient, None)


def trainer(boto_session: Any, folder: Path) -> ModelTrainer:
    (folder / "train.py").write_text("print('train')\n")
    groups = [
        InstanceGroup(instance_group_name="data_group", instance_type="ml.c5.9xlarge", instance_count=2),
        InstanceGroup(instance_group_name="dnn_group", instance_type="ml.g5.xlarge", instance_count=1),
    ]
    return ModelTrainer(
        training_image=IMAGE,
        source_code=SourceCode(source_dir=str(folder), entry_script="train.py"),
        compute=Compute(instance_groups=groups),
        role=ROLE,
        base_job_name="photos",
        sagemaker_session=Session(boto_session=boto_session, default_bucket="own-bucket", sagemaker_config=OPTED_OUT),
    )


def test_trainer_is_submitted_again_while_there_are_no_instances(boto_session: Any, tmp_path: Path) -> None:
    answers: list[Any] = [(SimpleNamespace(status_code=400, headers={}), SHORT)]
    boto_session.events.register(
        "before-call.sagemaker.CreateTrainingJob", lambda **_: answers.pop() if answers else None
    )
    waits_s: list[float] = []
    done = submit(trainer(boto_session, tmp_path), first_wait_s=7, sleep=waits_s.append)
    assert (done.status, done.num_attempts, done.exit_code, waits_s) == ("Completed", 2, 0, [7])
    jobs = boto_session.client("sagemaker").list_training_jobs()["TrainingJobSummaries"]
    assert [job["TrainingJobName"] for job in jobs] == [done.job_name]
