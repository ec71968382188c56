"""STUDY.yaml: what is read, and what is rejected with the path of the value."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.studies.output.table import rows
from hetero.decide.studies.study_file import RESERVED, read_study
from hetero.errors import ConfigError
from tests.support.studies import SOURCE, plan_of, report_of, result_of, small_runs, study_of


def test_file_is_read_with_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "STUDY.yaml"
    path.write_text(
        "name: s\nscript: train.py\nfactors: {samples: [1000, 2000], learning_rate: [5e-5, 1.0e-4]}\n"
        "constraints: {batch_per_device: 8}\nmetrics: [{name: f1, target: 0.9, after_s: [60, 6e2]}]\nbudget: {usd: 5}\n"
        "executor: {launch: cluster.json}\n"
    )
    study = read_study(path)
    assert [factor.levels for factor in study.factors] == [(1000, 2000), (5e-5, 1e-4)]
    assert (study.metrics[0].goal, study.metrics[0].after_s) == ("max", (60.0, 600.0))
    assert (study.budget.usd, study.budget.hours) == (5.0, None)
    assert study.executor.settings == {"cluster_file": "cluster.json"}
    assert study.script_path == tmp_path / "train.py"


def test_numbers_that_yaml_reads_as_texts_are_numbers_and_texts_may_be_empty() -> None:
    changes = {"args": ["--samples", "{samples}", "--tag", ""], "environment": {"X": ""}, "constraints": {}}
    study = study_of({**changes, "factors": {"samples": ["1e3", "1.5e5", "2.5e-1"], "version": [1.0, "1e"]}})
    assert [factor.levels for factor in study.factors] == [(1000, 150_000, 0.25), (1.0, "1e")]
    (first, *_) = plan_of({**changes, "factors": {"samples": ["1.5e5", "2e5"]}}).runs
    assert first.script_args[1:] in [("150000", "--tag", ""), ("200000", "--tag", "")]
    assert first.environment == {"X": ""}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": {}}, "factor: unknown key, .*did you mean 'factors'"),
        ({"factors": {}}, "factors: found none"),
        ({"factors": {"1st": [1]}}, "factors.1st: expected a name"),
        ({"factors": {"samples": []}}, "factors.samples: found 0 levels"),
        ({"factors": {"samples": [1, 1]}}, "factors.samples: two levels are equal"),
        ({"factors": {"samples": 7}}, "factors.samples: found 7, expected a list"),
        ({"factors": {"samples": [[1]]}}, r"factors.samples\[0\]: found \[1\], expected a text, number or boolean"),
        ({"factors": {"learning_rate_rule": ["cubic"]}}, "found 'cubic', expected one of kept, sqrt, linear"),
        ({"factors": {"cluster": {"a": {"groops": []}}}}, "cluster.a.groops: unknown key, .*did you mean 'groups'"),
        ({"factors": {"cluster": {"a": {"groups": ["x"]}}}}, r"cluster.a.groups\[0\]: 'x': expected NAME=TYPE:COUNT"),
        ({"factors": {"state": [1]}}, "factors.state: state is a column of the results"),
        ({"values": {"wall_s": 1}}, "values.wall_s: wall_s is a column of the results"),
        ({"values": {"seed": 42}}, "values.seed: expected the seed as seed of the study"),
        ({"values": {"train_share": 0.5}}, "values.train_share: expected it in the constraints"),
        ({"values": {"learning_rate_rule": "root"}}, "values.learning_rate_rule: found 'root', expected one of kept"),
        ({"factors": {"a": {"b": {"options": {"region": "x"}}}}}, "factors.a.b.options.region: found in a level"),
        ({"values": {dt.date(2024, 1, 1): 3}}, "values.2024-01-01: expected a name"),
        ({"environment": {"A=B": "x"}}, "environment: found the name 'A=B'"),
        ({"environment": {"A": "x\0"}}, "environment.A: found .*without the character 0"),
        ({"args": ["x\0"]}, r"args\[0\]: found .*without the character 0"),
        ({"options": {"nproc_per_node": 0}}, "options: nproc_per_node is 0; expected a whole number, 1 or more"),
        ({"options": {"nproc_per_node": "two"}}, "options: .*is 'two'; expected a whole number"),
        ({"factors": {"a": {"b": {"options": {"audit": "x"}}}}}, "factors.a.b.options: .*is 'x'"),
        ({"options": {"emulate_sample_s": 1, "emulate-sample-seconds": 1}}, "emulate_sample_s is stated twice"),
        ({"options": [1]}, r"options: found \[1\], expected an object"),
        ({"design": "half"}, "design: found 'half', expected full"),
        ({"design": {"fraction": 0}}, "design.fraction: found 0"),
        ({"design": {"table": [{"cluster": "1 GPU"}]}}, r"design.table\[0\].samples: missing"),
        ({"design": {"table": [{"cluster": "1 GPU", "samples": 5}]}}, r"table\[0\].samples: found 5, expected one of"),
        ({"constraints": {"fix": "time"}}, "constraints.fix: found 'time', expected one of steps, global_batch"),
        ({"constraints": {"train_share": 1.5}}, "constraints.train_share: found 1.5"),
        ({"constraints": {"batch": 1}}, "constraints.batch: unknown key"),
        ({"replicates": 0}, "replicates: found 0, expected a whole number from 1"),
        ({"order": "reverse"}, "order: found 'reverse'"),
        ({"options": {"no_such": 1}}, "options: unknown option 'no_such'"),
        ({"metrics": [{"name": "f1"}, {"name": "f1"}]}, "metrics: two have the same name"),
        ({"metrics": [{"name": "f1", "regex": "f1"}]}, "regex has 0 groups"),
        ({"metrics": [{"name": "f1", "after_s": [0]}]}, r"metrics\[0\].after_s\[0\]: found 0, expected a number"),
        ({"budget": {"euro": 1}}, "budget.euro: unknown key"),
        ({"executor": "kubernetes"}, "executor: found 'kubernetes'"),
        ({"executor": {"simulate": {}, "launch": {}}}, "executor: found 2 entries"),
        ({"expected_minutes": -1}, "expected_minutes: found -1"),
    ],
)
def test_wrong_value_is_rejected_with_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_of(changes)


def test_level_that_yaml_reads_as_a_text_keeps_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "STUDY.yaml"
    path.write_text(
        "name: s\nscript: train.py\nfactors: {learning_rate: {5e-5: {expected_minutes: 3}, 1e-4: {}}}\n"
        "design: {table: [{learning_rate: 5e-5}]}\n"
    )
    study = read_study(path)
    assert study.factors[0].settings[5e-5].expected_minutes == 3
    assert study.design.table == ({"learning_rate": 5e-5},)


def test_options_have_the_names_of_a_configuration_file_or_of_the_flags() -> None:
    names = {"emulate-sample-seconds": 0.5, "price": ["ml.m5.xlarge=1"], "nproc-per-node": "2", "audit": True}
    study = study_of({"options": names})
    assert study.settings.options == {
        "emulate_sample_s": 0.5,
        "prices": ("ml.m5.xlarge=1",),
        "nproc_per_node": 2,
        "audit": True,
    }


def test_option_of_a_data_service_may_be_stated_apart_from_it() -> None:
    factors = {"workers": {"a": {"options": {"tf_workers_per_host": 2}}}}
    changes = {"factors": factors, "options": {"data_service": "tf"}, "constraints": {}, "args": []}
    assert plan_of(changes).runs[0].options == {"data_service": "tf", "tf_workers_per_host": 2}


def test_reserved_names_are_the_columns_of_a_run() -> None:
    (row,) = rows([result_of(small_runs(1)[0], report=report_of(), levels={}, phases={"other": 1.0})])
    assert set(row) <= RESERVED


@pytest.mark.parametrize("name", ["name", "script", "factors"])
def test_missing_value_is_named(name: str) -> None:
    from hetero.decide.studies.study_file import parse_study

    with pytest.raises(ConfigError, match=f"{name}: missing"):
        parse_study({key: value for key, value in SOURCE.items() if key != name}, Path("STUDY.yaml"))
