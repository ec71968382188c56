"""`plan` for a ``ModelTrainer`` of SDK 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.sagemaker import offline_session, plan, record
from tests.support.planning import make_profile
from tests.support.sagemaker.estimators import IMAGE, ROLE

pytest.importorskip("sagemaker.train", reason="needs the SageMaker SDK 3: make test-v3")

from sagemaker.core.shapes import InstanceGroup
from sagemaker.core.training.configs import Compute, SourceCode
from sagemaker.train import ModelTrainer

PRICES: dict[str, Any] = {"price_profile": "seed-2022", "menu": ["ml.c5.9xlarge"]}
STARVING = make_profile(headspace_s=0.18, cpu_s=0.15)
BUSY = make_profile(headspace_s=1.16, cpu_s=0.1, step_s=1.19)


def trainer(source_dir: Path, compute: Compute | None) -> Any:
    return ModelTrainer(
        training_image=IMAGE,
        source_code=SourceCode(source_dir=str(source_dir), entry_script="launcher.py"),
        compute=compute,
        role=ROLE,
        sagemaker_session=offline_session(),
    )


def group(name: str, instance_type: str, count: int) -> InstanceGroup:
    return InstanceGroup(instance_group_name=name, instance_type=instance_type, instance_count=count)


def test_plan_of_a_starving_job_returns_groups_that_the_sdk_sends(source_dir: Path) -> None:
    own = trainer(source_dir, Compute(instance_type="ml.p3.2xlarge", instance_count=1))
    groups = plan(own, STARVING, **PRICES)
    assert groups == [group("trainer", "ml.p3.2xlarge", 1), group("data", "ml.c5.9xlarge", 1)]
    request = record(trainer(source_dir, Compute(instance_groups=groups))).request
    assert [(each.name, each.instance_type, each.count) for each in request.groups] == [
        ("trainer", "ml.p3.2xlarge", 1),
        ("data", "ml.c5.9xlarge", 1),
    ]


def test_groups_of_a_trainer_keep_their_names(source_dir: Path) -> None:
    own = [group("data_group", "ml.c5.18xlarge", 4), group("dnn_group", "ml.p3.2xlarge", 1)]
    given = trainer(source_dir, Compute(instance_groups=own))
    assert plan(given, STARVING, **PRICES) == [own[1], group("data_group", "ml.c5.9xlarge", 1)]
    assert plan(given, BUSY, **PRICES) == [own[1]]
    assert given.compute.instance_groups == own


def test_trainer_without_a_stated_type_is_rejected(source_dir: Path) -> None:
    given = trainer(source_dir, Compute(instance_type="ml.p3.2xlarge", instance_count=1))
    given.compute = None
    with pytest.raises(ConfigError, match="the estimator does not state its instance types"):
        plan(given, STARVING, **PRICES)
