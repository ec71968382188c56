"""`plan` for estimators of version 2 of the SDK."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import ClusterError, ConfigError
from hetero.metrics.profile.profile import Profile, write_profile
from hetero.sagemaker import plan, prepare
from tests.support.planning import make_profile
from tests.support.sagemaker.estimators import pytorch

pytest.importorskip("sagemaker.estimator", reason="needs the SageMaker SDK 2")

from sagemaker.instance_group import InstanceGroup

PRICES: dict[str, Any] = {"price_profile": "seed-2022", "menu": ["ml.c5.9xlarge"]}
STARVING = make_profile(headspace_s=0.18, cpu_s=0.15)
BUSY = make_profile(headspace_s=1.16, cpu_s=0.1, step_s=1.19)


def homogeneous(source_dir: Path, instance_type: str = "ml.p3.2xlarge", count: int = 1, **more: Any) -> Any:
    return pytorch(source_dir, instance_groups=None, instance_type=instance_type, instance_count=count, **more)


def rows(groups: list[Any]) -> list[tuple[str, str, int]]:
    assert all(type(group) is InstanceGroup for group in groups)
    return [(group.instance_group_name, group.instance_type, group.instance_count) for group in groups]


def test_plan_of_a_starving_job_returns_groups_that_the_sdk_takes(
    source_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    estimator = homogeneous(source_dir)
    groups = plan(estimator, STARVING, **PRICES)
    assert rows(groups) == [("trainer", "ml.p3.2xlarge", 1), ("data", "ml.c5.9xlarge", 1)]
    assert "Add 1 x ml.c5.9xlarge as data hosts: a step takes " in caplog.text
    assert "note: The speed of ml.c5.9xlarge's vCPUs was not measured." in caplog.text
    assert estimator.instance_groups is None
    heterogeneous = pytorch(source_dir, instance_groups=groups)
    assert heterogeneous.instance_groups == groups


def test_plan_against_data_hosts_returns_the_estimators_groups_and_logs_why(
    source_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert rows(plan(homogeneous(source_dir), BUSY, **PRICES)) == [("trainer", "ml.p3.2xlarge", 1)]
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (
        logging.WARNING,
        "Do not add data hosts: the accelerator is busy 97 % of each step.",
    )


@pytest.mark.parametrize(("profile", "data_hosts"), [(STARVING, [("data_group", "ml.c5.9xlarge", 1)]), (BUSY, [])])
def test_groups_of_an_estimator_keep_their_names(
    source_dir: Path, profile: Profile, data_hosts: list[tuple[str, str, int]]
) -> None:
    groups = [InstanceGroup("data_group", "ml.c5.18xlarge", 4), InstanceGroup("dnn_group", "ml.p3.2xlarge", 1)]
    estimator = pytorch(source_dir, instance_groups=groups)
    assert rows(plan(estimator, profile, **PRICES)) == [("dnn_group", "ml.p3.2xlarge", 1), *data_hosts]
    assert estimator.instance_groups is groups


def test_data_group_that_the_plan_does_not_use_is_named(source_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    groups = [
        InstanceGroup("data1", "ml.c5.9xlarge", 2),
        InstanceGroup("data2", "ml.c5.9xlarge", 2),
        InstanceGroup("dnn", "ml.p3.2xlarge", 1),
    ]
    found = rows(plan(pytorch(source_dir, instance_groups=groups), STARVING, **PRICES))
    assert found == [("dnn", "ml.p3.2xlarge", 1), ("data1", "ml.c5.9xlarge", 1)]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        "the plan does not use the groups data2; change channels that name them"
    ]


def test_several_groups_of_one_type_are_the_trainer_hosts_of_one_plan(source_dir: Path) -> None:
    groups = [InstanceGroup("data", "ml.p3.2xlarge", 1), InstanceGroup("more", "ml.p3.2xlarge", 2)]
    estimator = pytorch(source_dir, instance_groups=groups)
    found = rows(plan(estimator, STARVING, roles=["data=trainer", "more=trainer"], **PRICES))
    assert found[:2] == [("data", "ml.p3.2xlarge", 1), ("more", "ml.p3.2xlarge", 2)]
    (data_hosts,) = found[2:]
    assert data_hosts[:2] == ("data2", "ml.c5.9xlarge")  # the name data is taken
    assert data_hosts[2] > 1


def test_roles_of_a_prepared_estimator_are_known(source_dir: Path) -> None:
    groups = [InstanceGroup("a", "ml.c5.9xlarge", 2), InstanceGroup("b", "ml.p3.2xlarge", 1)]
    estimator = prepare(pytorch(source_dir, instance_groups=groups), roles=("a=data", "b=trainer"))
    assert rows(plan(estimator, STARVING, **PRICES)) == [("b", "ml.p3.2xlarge", 1), ("a", "ml.c5.9xlarge", 1)]


def test_bigger_machine_replaces_the_type_of_the_trainer_group(source_dir: Path) -> None:
    job = make_profile(headspace_s=0.1, cpu_s=0.025, vcpus=4, processes=4, trainer="ml.g5.xlarge")
    prices = ["ml.g5.xlarge=1.4", "ml.g5.4xlarge=2.0", "ml.c5.9xlarge=1.8"]
    found = plan(homogeneous(source_dir, "ml.g5.xlarge"), job, prices=prices)
    assert rows(found) == [("trainer", "ml.g5.4xlarge", 1)]


def test_options_that_prepare_needs_are_logged(source_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan(homogeneous(source_dir), STARVING, **PRICES, endpoints_per_host=32)
    assert "the plan needs these options: prepare(estimator, endpoints_per_host=32" in caplog.text


def test_profile_and_prices_may_be_files(source_dir: Path, tmp_path: Path) -> None:
    write_profile(STARVING, tmp_path / "profile.json")
    (tmp_path / "prices.yaml").write_text("hourly_usd: {ml.p3.2xlarge: 3.825, ml.c5.9xlarge: 1.836}\n")
    found = plan(homogeneous(source_dir), tmp_path, price_file=tmp_path / "prices.yaml", prices=["ml.c5.18xlarge=900"])
    assert rows(found) == rows(plan(homogeneous(source_dir), STARVING, **PRICES))


def test_prices_of_another_region_than_the_sessions_are_rejected(source_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("region: eu-west-1\nhourly_usd: {ml.p3.2xlarge: 3.8}\n")
    with pytest.raises(ConfigError, match="found prices of eu-west-1, but the job runs in us-east-1"):
        plan(homogeneous(source_dir), STARVING, price_file=tmp_path / "prices.yaml")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mneu": []}, "unknown option 'mneu' of a plan; did you mean 'menu'"),
        ({"menu": "ml.c5.9xlarge"}, r"menu is 'ml.c5.9xlarge'; expected a list of instance types"),
        ({"trainer_type": "ml.p3.2xlarge"}, "trainer_type is given, but the estimator states it"),
        ({"spot_usd": {"ml.c5.9xlarge": 0.6}}, "all groups of a job are spot instances, or none"),
        ({"goal": "speed"}, "goal is 'speed'; expected one of cost, time"),
    ],
)
def test_option_that_a_plan_does_not_take_is_rejected(source_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(homogeneous(source_dir), STARVING, **{**PRICES, **options})


def test_estimator_that_the_profile_is_not_of_is_rejected(source_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"the profile was measured on ml\.p3\.2xlarge, the baseline is ml\.p4d"):
        plan(homogeneous(source_dir, "ml.p4d.24xlarge"), STARVING, **PRICES)
    with pytest.raises(ConfigError, match="expected an estimator of the SageMaker SDK 2"):
        plan(object(), STARVING, **PRICES)


def test_groups_without_a_clear_role_or_of_two_types_are_rejected(source_dir: Path) -> None:
    unclear = [InstanceGroup("a", "ml.c5.9xlarge", 1), InstanceGroup("b", "ml.c5.18xlarge", 1)]
    with pytest.raises(ClusterError, match="cannot tell whether group 'a' preprocesses or trains"):
        plan(pytorch(source_dir, instance_groups=unclear), STARVING, **PRICES)
    two = [InstanceGroup("dnn1", "ml.p3.2xlarge", 1), InstanceGroup("dnn2", "ml.g5.xlarge", 1)]
    with pytest.raises(ConfigError, match=r"the trainer groups have 2 instance types: dnn1 \(ml\.p3\.2xlarge\), dnn2"):
        plan(pytorch(source_dir, instance_groups=two), STARVING, **PRICES)


def test_estimator_without_a_known_number_of_instances_is_rejected(source_dir: Path) -> None:
    estimator = homogeneous(source_dir)
    estimator.instance_count = None
    with pytest.raises(ConfigError, match="the estimator does not state its instance types"):
        plan(estimator, STARVING, **PRICES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"menu": 5}, "menu is 5; expected a list of instance types"),
        ({"menu": [5]}, r"menu is \[5\]; expected a list of instance types"),
        ({"prices": "ml.p3.2xlarge=3"}, "prices is 'ml.p3.2xlarge=3'; expected a list of texts such as"),
        ({"prices": {"ml.p3.2xlarge": 3}}, "expected a list of texts such as 'ml.c5.9xlarge=1.8'"),
        ({"prices": [3.0]}, r"prices is \[3.0\]; expected a list of texts"),
        ({"vcpu_speeds": {"ml.c5.9xlarge": 0}}, r"vcpu_speeds\['ml.c5.9xlarge'\] is 0; expected a number above"),
        ({"max_hours": "2", "num_steps": 10}, "max_hours is '2'; expected a number above 0"),
    ],
)
def test_option_of_another_type_is_rejected(source_dir: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(homogeneous(source_dir), STARVING, **{**PRICES, **options})


def test_profile_that_is_none_is_rejected(source_dir: Path) -> None:
    missing: Any = None
    with pytest.raises(ConfigError, match=r"profile is None; expected a Profile, or the path of profile\.json"):
        plan(homogeneous(source_dir), missing, **PRICES)


def test_plan_of_an_estimator_with_spot_instances_says_which_prices_it_counts(
    source_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    estimator = homogeneous(source_dir, use_spot_instances=True, max_run=3600, max_wait=7200)
    plan(estimator, STARVING, **PRICES)
    assert "the estimator uses spot instances, but the plan counts the prices as given" in caplog.text
    caplog.clear()
    plan(homogeneous(source_dir), STARVING, **PRICES)
    assert "spot" not in caplog.text
