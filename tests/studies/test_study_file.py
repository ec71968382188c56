"""STUDY.yaml: what is read, and what is rejected with the path of the value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from study_reports import SOURCE, study_of

from hetero.errors import ConfigError
from hetero.studies.study_file import read_study


def test_file_is_read_with_numbers_as_yaml_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "STUDY.yaml"
    path.write_text(
        "name: s\nscript: train.py\nfactors: {samples: [1000, 2000], learning_rate: [5e-5, 1.0e-4]}\n"
        "constraints: {batch_per_device: 8}\nmetrics: [{name: f1, target: 0.9}]\nbudget: {usd: 5}\n"
        "executor: {launch: cluster.json}\n"
    )
    study = read_study(path)
    assert [factor.levels for factor in study.factors] == [(1000, 2000), (5e-5, 1e-4)]
    assert study.metrics[0].goal == "max"
    assert (study.budget.usd, study.budget.hours) == (5.0, None)
    assert study.executor.settings == {"cluster_file": "cluster.json"}
    assert study.script_path == tmp_path / "train.py"


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
        ({"factors": {"cluster": {"a": {"groups": ["x"]}}}}, "expected NAME=TYPE:COUNT"),
        ({"design": "half"}, "design: found 'half', expected full"),
        ({"design": {"fraction": 0}}, "design.fraction: found 0"),
        ({"design": {"table": [{"cluster": "1 GPU"}]}}, r"design.table\[0\].samples: missing"),
        ({"design": {"table": [{"cluster": "1 GPU", "samples": 5}]}}, r"table\[0\].samples: found 5, expected one of"),
        ({"constraints": {"fix": "time"}}, "constraints.fix: found 'time'"),
        ({"constraints": {"train_share": 1.5}}, "constraints.train_share: found 1.5"),
        ({"constraints": {"batch": 1}}, "constraints.batch: unknown key"),
        ({"replicates": 0}, "replicates: found 0, expected a whole number from 1"),
        ({"order": "reverse"}, "order: found 'reverse'"),
        ({"options": {"no_such": 1}}, "options: unknown option 'no_such'"),
        ({"metrics": [{"name": "f1"}, {"name": "f1"}]}, "metrics: two have the same name"),
        ({"metrics": [{"name": "f1", "regex": "f1"}]}, "regex has 0 groups"),
        ({"budget": {"euro": 1}}, "budget.euro: unknown key"),
        ({"executor": "kubernetes"}, "executor: found 'kubernetes'"),
        ({"executor": {"simulate": {}, "launch": {}}}, "executor: found 2 entries"),
        ({"expected_minutes": -1}, "expected_minutes: found -1"),
    ],
)
def test_wrong_value_is_rejected_with_its_path(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        study_of(changes)


@pytest.mark.parametrize("name", ["name", "script", "factors"])
def test_missing_value_is_named(name: str) -> None:
    from hetero.studies.study_file import parse_study

    with pytest.raises(ConfigError, match=f"{name}: missing"):
        parse_study({key: value for key, value in SOURCE.items() if key != name}, Path("STUDY.yaml"))
