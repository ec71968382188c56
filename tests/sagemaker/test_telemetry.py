"""The SDK reports its use, and its errors, to AWS: not what happens in our sessions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.sagemaker import offline_session, record
from tests.support.sagemaker.estimators import groups, pytorch

pytest.importorskip("sagemaker.estimator", reason="this is about version 2 of the SDK")


def test_error_of_the_sdk_is_not_reported_to_anybody(source_dir: Path, asked: list[str]) -> None:
    estimator = pytorch(source_dir, py_version="py27")
    with pytest.raises(ValueError, match="py27"):
        record(estimator)
    assert asked == []


def test_defaults_of_the_user_stay_beside_it(source_dir: Path) -> None:
    defaults = {
        "SchemaVersion": "1.0",
        "SageMaker": {"TrainingJob": {"RoleArn": "arn:aws:iam::000000000000:role/defaults"}},
    }
    session = offline_session()
    session.sagemaker_config = defaults
    estimator = pytorch(source_dir, role=None, sagemaker_session=session, instance_groups=groups())
    assert record(estimator).request.document["RoleArn"] == "arn:aws:iam::000000000000:role/defaults"
    assert set(defaults["SageMaker"]) == {"TrainingJob"}
