"""Runs of a study: their names, arguments and order."""

from __future__ import annotations

import pytest

from hetero.decide.studies.checks import check_study
from hetero.decide.studies.plan import only
from hetero.errors import ConfigError
from tests.support.studies import CLUSTERS, PRICED, plan_of


def test_run_has_the_arguments_of_its_cell() -> None:
    run = plan_of().runs[-1]
    assert run.run_id == "014-cluster=32_GPUs-samples=1000000-r1"
    assert run.script_args == ("--epochs", "3", "--learning-rate", "5e-05", "--samples", "1000000")
    assert run.groups == ("trainer=ml.p3.16xlarge:4",)
    assert run.options == {"nproc_per_node": 8}
    assert run.script.endswith("/train.py")


def test_random_order_is_that_of_the_seed() -> None:
    orders = [[run.run_id for run in plan_of({"order": "random", "seed": seed}).runs] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == [run.run_id for run in plan_of().runs]


def test_replicates_have_seeds_of_their_own() -> None:
    runs = plan_of({"replicates": 3, "seed": 7}).runs
    assert [(run.replicate, run.levels["seed"]) for run in runs[:4]] == [(1, 7), (2, 8), (3, 9), (1, 7)]
    assert len({run.run_id for run in runs}) == len(runs) == 45


def test_combination_that_a_table_has_twice_is_a_replicate() -> None:
    row = {"cluster": "1 GPU", "samples": 100_000}
    runs = plan_of({"design": {"table": [row, row]}}).runs
    assert [run.replicate for run in runs] == [1, 2]


def test_braces_and_variables_are_filled_in() -> None:
    changes = {
        "args": ["{{{samples}}}", "{run_id}"],
        "environment": {"SAMPLES": "{samples}"},
        "channels": {"train": "data/{samples}"},
        "factors": {"cluster": CLUSTERS, "samples": [100_000]},
    }
    run = plan_of(changes).runs[0]
    assert run.script_args == ("{100000}", run.run_id)
    assert run.environment == {"SAMPLES": "100000"}
    assert run.channels["train"].endswith("/data/100000")


def test_unknown_placeholder_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"STUDY.yaml: args\[0\]: \{sample\} is unknown, expected one of .*samples"):
        plan_of({"args": ["{sample}"]})


def test_types_and_counts_of_groups_are_crossed() -> None:
    changes = {
        "groups": ["trainer={type}:{count}"],
        "factors": {"type": ["ml.p3.2xlarge", "ml.p3.8xlarge"], "count": [1, 2]},
        "constraints": {},
        "args": [],
    }
    plan = plan_of(changes)
    assert [run.groups for run in plan.runs] == [
        ("trainer=ml.p3.2xlarge:1",),
        ("trainer=ml.p3.2xlarge:2",),
        ("trainer=ml.p3.8xlarge:1",),
        ("trainer=ml.p3.8xlarge:2",),
    ]
    assert [run.levels["ranks"] for run in plan.runs] == [1, 2, 4, 8]
    assert "ST-07" not in {finding.number for finding in check_study(plan, PRICED)}
    with pytest.raises(ConfigError, match=r"groups\[0\]: \{kind\} is unknown, expected one of count, type"):
        plan_of({**changes, "groups": ["trainer={kind}:{count}"]})
    with pytest.raises(ConfigError, match=r"groups\[0\]: 'trainer=x:0': found 0 hosts"):
        plan_of({**changes, "factors": {"type": ["x"], "count": [0]}})


def test_settings_of_a_level_add_to_those_of_the_study() -> None:
    levels = {"own": {"groups": ["trainer=ml.p3.2xlarge:1"], "options": {"warmup_steps": 3}}, "study's": None}
    changes = {
        "factors": {"cluster": levels},
        "groups": ["trainer=ml.p3.8xlarge:1"],
        "options": {"audit": True},
        "constraints": {},
        "args": [],
    }
    own, others = plan_of(changes).runs
    assert (own.groups, own.options) == (
        ("trainer=ml.p3.2xlarge:1",),
        {"audit": True, "warmup_steps": 3, "nproc_per_node": 1},
    )
    assert (others.groups, others.options) == (("trainer=ml.p3.8xlarge:1",), {"audit": True, "nproc_per_node": 4})


def test_only_keeps_runs_with_a_level() -> None:
    plan = plan_of()
    found = only(plan, {"samples": "600000", "cluster": "1 GPU"})
    assert [run.run_id for run in found.runs] == ["001-cluster=1_GPU-samples=600000-r1"]
    with pytest.raises(ConfigError, match="expected a factor, one of cluster, samples"):
        only(plan, {"sample": "1"})
    with pytest.raises(ConfigError, match="expected a level of samples, one of 100000"):
        only(plan, {"samples": "1"})


def test_stated_durations_are_those_of_levels() -> None:
    levels = {"a": {"expected_minutes": 2}, "b": {}}
    plan = plan_of({"factors": {"cluster": levels}, "constraints": {}, "args": [], "expected_minutes": 5})
    assert sorted(plan.expected_s.values()) == [120.0, 300.0]
