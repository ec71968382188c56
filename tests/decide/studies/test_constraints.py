"""What follows from the levels: the source's Tables 1 and 2, and the fixed global batch that it leaves open."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hetero.decide.studies.cells.constraints import derive
from hetero.decide.studies.runs import Level
from hetero.errors import ConfigError
from tests.support.studies import CLUSTERS, PRICED, plan_of, study_of


def quantities(changes: dict[str, Any], name: str) -> list[Level | None]:
    return [cell.quantities.get(name) for cell in plan_of({"args": [], **changes}).cells]


def test_published_table_1_follows_from_the_clusters() -> None:
    changes = {
        "factors": {"cluster": CLUSTERS},
        "constraints": {**study_of().document["constraints"], "samples": 100_000},
    }
    assert quantities(changes, "ranks") == [1, 4, 8, 16, 32]
    assert quantities(changes, "global_batch") == [32, 128, 256, 512, 1024]
    assert quantities(changes, "steps") == [84_375, 21_094, 10_547, 5_273, 2_637]
    assert quantities(changes, "learning_rate") == [5e-5] * 5


def test_published_table_2_gives_epochs_that_are_whole_on_every_cluster() -> None:
    cells = plan_of().cells
    assert len(cells) == 15
    epochs = {cell.levels["samples"]: cell.quantities["epochs"] for cell in cells}
    assert epochs == {100_000: 30, 600_000: 5, 1_000_000: 3}
    assert all(cell.quantities["epochs"] == epochs[cell.levels["samples"]] for cell in cells)
    assert all(isinstance(cell.quantities["epochs"], int) for cell in cells)


def test_learning_rate_grows_by_its_rule() -> None:
    rules = {"factors": {"cluster": CLUSTERS, "samples": [100_000], "learning_rate_rule": ["kept", "sqrt", "linear"]}}
    found = {
        (cell.quantities["ranks"], cell.levels["learning_rate_rule"]): cell.quantities["learning_rate"]
        for cell in plan_of(rules).cells
    }
    assert found[32, "kept"] == 5e-5
    assert found[32, "sqrt"] == pytest.approx(math.sqrt(32) * 5e-5)
    assert found[32, "sqrt"] == pytest.approx(2.83e-4, rel=1e-3)  # as the source prints it
    assert found[32, "linear"] == pytest.approx(32 * 5e-5)
    assert {found[1, rule] for rule in ("kept", "sqrt", "linear")} == {5e-5}


def test_fixed_global_batch_divides_over_the_ranks() -> None:
    fixed = {"fix": "global_batch", "global_batch": 1024, "train_share": 0.9, "steps": 2637, "learning_rate": 5e-5}
    changes = {"factors": {"cluster": CLUSTERS, "samples": [100_000]}, "constraints": fixed}
    assert quantities(changes, "batch_per_device") == [1024, 256, 128, 64, 32]
    assert set(quantities(changes, "steps")) == {2637}
    assert set(quantities(changes, "epochs")) == {2637 * 1024 / 90_000}  # not whole, and not rounded


def test_batch_that_does_not_divide_stays_a_fraction() -> None:
    fixed = {"fix": "global_batch", "global_batch": 100}
    changes = {"factors": {"cluster": CLUSTERS, "samples": [1000]}, "constraints": fixed}
    assert quantities(changes, "batch_per_device") == [100, 25, 12.5, 6.25, 3.125]


def test_steps_follow_from_stated_epochs() -> None:
    kept = {"epochs": 3, "batch_per_device": 32}
    changes = {"factors": {"cluster": CLUSTERS, "samples": [96_000]}, "constraints": kept}
    assert quantities(changes, "steps") == [9000, 2250, 1125, 563, 281]


def test_stated_quantity_that_changes_keeps_its_base() -> None:
    first, *_, last = plan_of().cells
    assert (last.quantities["steps"], last.quantities["base_steps"]) == (2637, 84_375)
    assert (first.quantities["steps"], first.quantities["base_steps"]) == (84_375, 84_375)


def test_ranks_are_stated_ones_before_accelerators() -> None:
    levels = {
        "by option": {"groups": ["trainer=ml.p3.16xlarge:2"], "options": {"nproc_per_node": 3}},
        "by value": {"groups": ["trainer=ml.p3.16xlarge:2"], "ranks": 4},
        "data hosts do not count": {"groups": ["trainer=ml.p3.8xlarge:1", "data=ml.c5.9xlarge:4"]},
        "unknown type": {"groups": ["trainer=ml.none.large:2"]},
        "TensorFlow": {"groups": ["trainer=ml.p3.16xlarge:2"], "options": {"framework": "tensorflow"}},
        "no groups": {"options": {"nproc_per_node": 3}},
    }
    assert quantities({"factors": {"cluster": levels}, "constraints": {}, "args": []}, "ranks") == [6, 4, 4, 2, 2, 3]


@pytest.mark.parametrize(
    ("level", "found"),
    [
        ({"groups": ["trainer=ml.p3.16xlarge:2"], "ranks": 3}, "found 3 .*, but 1 on each of 2 hosts are 2"),
        ({"groups": ["trainer=ml.none:1"], "ranks": 4, "options": {"nproc_per_node": 1}}, "1 on each of 1 hosts are 1"),
        ({"groups": ["trainer=ml.p3.2xlarge:1", "train2=ml.p3.8xlarge:1"]}, "found 5 .*, but 2 on each of 2 hosts"),
    ],
)
def test_ranks_that_hosts_do_not_share_equally_are_rejected(level: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        plan_of({"factors": {"cluster": {"one": level}}, "constraints": {}, "args": []})


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        ({"hosts": [1, 2, 4]}, {"hosts": [1, 2, 4], "ranks": [2, 4, 8]}),
        ({"ranks": [1, 2, 4]}, {"hosts": [1, 1, 1], "ranks": [1, 2, 4]}),
    ],
)
def test_ranks_and_hosts_are_stated_ones_if_no_groups_decide_them(
    factor: dict[str, Any], expected: dict[str, list[int]]
) -> None:
    changes = {"factors": factor, "constraints": {}, "options": {"nproc_per_node": 2}, "executor": "sagemaker"}
    assert {name: quantities(changes, name) for name in expected} == expected
    runs = plan_of({**changes, "args": ["{ranks}", "{hosts}"]}).runs
    assert [run.script_args for run in runs] == [
        (str(ranks), str(hosts)) for ranks, hosts in zip(expected["ranks"], expected["hosts"], strict=True)
    ]
    assert not [name for run in runs for name in run.levels if name.startswith("base_")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factors": {"ranks": [1, 2]}}, "ranks: found 2, but 1 follows from groups"),
        ({"factors": {"hosts": [2]}}, "hosts: found 2, but 1 follows from groups"),
        ({"factors": {"global_batch": [8]}}, "global_batch: found 8, but 4 follows from batch_per_device"),
        ({"factors": {"training_samples": [8]}}, "training_samples: found 8, but 100 follows from samples"),
        ({"constraints": {"steps": 9, "epochs": 2}}, "steps: found 9, but 50 follows from epochs"),
        ({"constraints": {"fix": "steps", "steps": 9, "epochs": 2}}, "epochs: found 2.0, but 0.36 follows from steps"),
        ({"constraints": {"fix": "global_batch", "global_batch": 8}}, "batch_per_device: found 4, but 8 follows"),
        ({"constraints": {"learning_rate_rule": "sqrt"}}, "learning_rate_rule: found sqrt without learning_rate"),
        ({"factors": {"learning_rate_rule": ["kept", "linear"]}}, "learning_rate_rule: found linear without"),
        ({"constraints": {"train_share": 0.001}}, "samples: found 100 with train_share 0.001, which leaves no sample"),
    ],
)
def test_statements_that_contradict_each_other_are_rejected(changes: dict[str, Any], message: str) -> None:
    kept = {"samples": 100, "batch_per_device": 4, **changes.get("constraints", {})}
    base = {"factors": {"dropout": [0.1]}, "groups": ["trainer=ml.p3.2xlarge:1"], "args": []}
    with pytest.raises(ConfigError, match=message):
        plan_of({**base, **changes, "constraints": kept})


def test_options_of_two_levels_are_checked_together() -> None:
    factors = {
        "service": {"a": {"options": {"data_service": "tf"}}, "b": None},
        "mode": {"c": {"options": {"profile": True}}},
    }
    with pytest.raises(ConfigError, match="options: profile is true and data_service is 'tf'"):
        plan_of({"factors": factors, "constraints": {}, "args": []})


def test_rule_without_a_global_batch_is_rejected() -> None:
    kept = {"learning_rate": 0.1, "learning_rate_rule": "sqrt"}
    with pytest.raises(ConfigError, match="learning_rate_rule: found sqrt without a global batch"):
        plan_of({"factors": {"cluster": CLUSTERS}, "constraints": kept, "args": []})


def test_value_of_one_level_may_begin_with_base() -> None:
    levels = {"a": {"values": {"base_size": 3}}, "b": {}}
    assert quantities({"factors": {"model": levels}, "constraints": {}}, "base_size") == [3, None]


@pytest.mark.parametrize(
    ("constraints", "message"),
    [
        ({"fix": "steps", "batch_per_device": 32, "samples": 10}, "constraints.steps: missing"),
        ({"fix": "steps", "steps": 10, "samples": 10}, "constraints.batch_per_device: missing"),
        ({"fix": "steps", "steps": 10, "batch_per_device": 1}, "constraints.samples: missing"),
        ({"fix": "global_batch"}, "constraints.global_batch: missing"),
    ],
)
def test_quantity_that_is_needed_and_missing_is_named(constraints: dict[str, Any], message: str) -> None:
    study = study_of({"factors": {"cluster": CLUSTERS}, "constraints": constraints})
    with pytest.raises(ConfigError, match=message):
        derive(study, [{"cluster": "1 GPU"}], PRICED)


def test_quantity_that_is_no_number_is_rejected() -> None:
    with pytest.raises(ConfigError, match="samples: found 'many', expected a number above 0"):
        plan_of({"factors": {"cluster": CLUSTERS, "samples": ["many"]}})
