"""Checks of real objects of version 3 of the SDK."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hetero.sagemaker import check, offline_session
from hetero.sagemaker.checks.check import unprepared
from hetero.sagemaker.recording import record
from tests.support.sagemaker.estimators import IMAGE, ROLE

# The SDK leaves the folder into which it copies code for the collector.
pytestmark = pytest.mark.filterwarnings("ignore:Implicitly cleaning up <TemporaryDirectory:ResourceWarning")
train = pytest.importorskip("sagemaker.train", reason="this is about version 3 of the SDK")


def trainer(source_dir: Path, **arguments: Any) -> Any:
    """Return a trainer with two groups. Arguments beat what it would have."""
    from sagemaker.core.shapes import InstanceGroup
    from sagemaker.core.training.configs import Compute, SourceCode, StoppingCondition

    groups = [
        InstanceGroup(instance_group_name=name, instance_type=kind, instance_count=count)
        for name, kind, count in (("data_group", "ml.c5.9xlarge", 2), ("dnn_group", "ml.g5.xlarge", 1))
    ]
    given = {
        "training_image": IMAGE,
        "source_code": SourceCode(source_dir=str(source_dir), entry_script="launcher.py"),
        "compute": Compute(instance_groups=groups),
        "stopping_condition": StoppingCondition(max_runtime_in_seconds=7200),
        "role": ROLE,
        "sagemaker_session": offline_session(),
    }
    return train.ModelTrainer(**(given | arguments))


def inputs(*groups: str) -> list[Any]:
    from sagemaker.core.shapes import S3DataSource
    from sagemaker.core.training.configs import InputData

    source = S3DataSource(
        s3_data_type="S3Prefix",
        s3_uri="s3://bucket/training",
        s3_data_distribution_type="FullyReplicated",
        instance_group_names=list(groups) or None,
    )
    return [InputData(channel_name="training", data_source=source)]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="sagemaker")


def numbers(*arguments: Any) -> list[str]:
    return [finding.number for finding in check(*arguments)]


def test_clean_trainer_gives_no_finding(source_dir: Path) -> None:
    assert numbers(trainer(source_dir)) == []
    assert numbers(trainer(source_dir), inputs("data_group")) == []


def test_default_run_is_cut_off_after_an_hour(source_dir: Path) -> None:
    (finding,) = check(trainer(source_dir, stopping_condition=None))
    assert (finding.number, "after 3600 s" in finding.found) == ("SM-09", True)


def test_distributed_with_groups_is_found(source_dir: Path) -> None:
    from sagemaker.train.distributed import Torchrun

    (finding,) = check(trainer(source_dir, distributed=Torchrun()))
    assert (finding.number, "distributed=" in finding.found) == ("SM-01", True)


def test_trainer_that_was_not_prepared_is_found(source_dir: Path) -> None:
    from sagemaker.core.training.configs import SourceCode

    (source_dir / "train.py").touch()
    made = trainer(source_dir, source_code=SourceCode(source_dir=str(source_dir), entry_script="train.py"))
    (finding,) = check(made)
    assert (finding.number, "runs 'train.py'" in finding.found) == ("SM-26", True)
    assert unprepared(made, record(made).request) == [finding]


def test_unknown_group_of_a_channel_is_found(source_dir: Path) -> None:
    assert numbers(trainer(source_dir), inputs("gpu_group")) == ["SM-04"]


def test_error_of_the_sdk_is_not_reported_to_anybody(source_dir: Path, asked: list[str]) -> None:
    made = trainer(source_dir)
    shutil.rmtree(source_dir)
    with pytest.raises(ValueError, match="Not a valid S3 URI or local file path"):
        check(made)
    for thread in threading.enumerate():
        if thread.name == "sagemaker-telemetry":
            thread.join()
    assert asked == []


def test_warm_pool_is_found(source_dir: Path) -> None:
    made = trainer(source_dir)
    made.compute.keep_alive_period_in_seconds = 600
    assert numbers(made) == ["SM-16"]


def test_local_mode_is_found(source_dir: Path) -> None:
    made = trainer(source_dir)
    made.training_mode = train.model_trainer.Mode.LOCAL_CONTAINER
    (finding,) = check(made)
    assert (finding.number, "local mode" in finding.found) == ("SM-17", True)
