"""The channels of a canary job of SDK 3: the user's inputs, with a manifest, and nothing of the SDK's own."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from hetero.sagemaker import offline_session, prepare, record
from hetero.sagemaker.canaries.canary import _estimators, _name_of
from hetero.sagemaker.canaries.identity import identity_of
from hetero.sagemaker.canaries.manifests import channels_of, channels_of_sdk, sdk_inputs
from tests.support.sagemaker.estimators import IMAGE, ROLE

pytest.importorskip("sagemaker.train", reason="needs the SageMaker SDK 3: make test-v3")

from sagemaker.core.shapes import Channel, DataSource, S3DataSource, ShuffleConfig
from sagemaker.core.training.configs import Compute, InputData, SourceCode
from sagemaker.train import ModelTrainer

MANIFEST = "s3://bucket/a.manifest"


def test_channels_of_a_canary_are_those_of_the_user_with_a_manifest(source_dir: Path) -> None:
    trainer = ModelTrainer(
        training_image=IMAGE,
        source_code=SourceCode(source_dir=str(source_dir), entry_script="launcher.py"),
        compute=Compute(instance_type="ml.m5.large", instance_count=1),
        role=ROLE,
        sagemaker_session=offline_session(),
    )
    train = S3DataSource(
        s3_data_type="S3Prefix", s3_uri="s3://bucket/train/", s3_data_distribution_type="ShardedByS3Key"
    )
    inputs = [
        Channel(
            channel_name="train",
            data_source=DataSource(s3_data_source=train),
            content_type="text/csv",
            compression_type="Gzip",
            record_wrapper_type="RecordIO",
            input_mode="Pipe",
            shuffle_config=ShuffleConfig(seed=5),
        ),
        InputData(channel_name="labels", data_source="s3://bucket/labels/"),
    ]
    request = record(trainer, inputs).request
    channels = channels_of(request, without=channels_of_sdk(trainer, version=3))
    assert [channel.name for channel in channels] == ["train", "labels"]
    assert {"code", "sm_drivers"} <= {channel.name for channel in request.channels}
    after = record(trainer, sdk_inputs(3, channels, {"train": MANIFEST})).request
    expected = {each["ChannelName"]: copy.deepcopy(each) for each in request.document["InputDataConfig"]}
    expected["train"]["DataSource"]["S3DataSource"] |= {"S3Uri": MANIFEST, "S3DataType": "ManifestFile"}
    found = {each["ChannelName"]: each for each in after.document["InputDataConfig"]}
    assert set(found) == set(expected)
    assert {name: found[name] for name in ("train", "labels")} == {name: expected[name] for name in ("train", "labels")}
    assert {"InputMode", "CompressionType", "RecordWrapperType", "ShuffleConfig"} <= set(found["train"])
    assert _name_of(trainer) == "launcher.py"
    assert list(_estimators(trainer, ["ml.m5.large:1", "ml.c5.large:2"])) == ["1 x ml.m5.large", "2 x ml.c5.large"]


def test_identity_is_that_of_the_job_and_not_of_the_process(source_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter("abcd")
    monkeypatch.setattr("sagemaker.train.model_trainer._get_unique_name", lambda base, *_: f"{base}-{next(names)}")

    def identity(**parameters: int) -> dict[str, object]:
        trainer = ModelTrainer(
            training_image=IMAGE,
            source_code=SourceCode(source_dir=str(source_dir), entry_script="launcher.py"),
            compute=Compute(instance_type="ml.m5.large", instance_count=1),
            role=ROLE,
            sagemaker_session=offline_session(),
            hyperparameters=parameters,
        )
        return identity_of(record(prepare(trainer)))

    first = identity(epochs=1)
    assert identity(epochs=1) == first
    assert identity(epochs=10) != first
    (source_dir / "launcher.py").write_text("import hetero  # changed\n")
    assert identity(epochs=1)["content of the sources"] != first["content of the sources"]
