"""docs/studies.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero.config import LaunchOptions
from hetero.config.flags import flag_of
from hetero.decide.studies.checks import CHECKS, check_study
from hetero.decide.studies.output.table import rows
from hetero.decide.studies.plan import catalogue_of, plan_study
from hetero.decide.studies.study_file import _SETTINGS_KEYS, _STUDY_KEYS, MAX_RUNS, RESERVED, Metric, parse_study
from hetero.metrics.logged import MAX_NAMES, MAX_VALUES
from tests.support.studies import SOURCE

PAGE = (Path(__file__).parents[3] / "docs" / "studies.md").read_text(encoding="utf-8")
BLOCKS: list[Any] = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]


def test_example_is_a_study_with_the_named_finding() -> None:
    study = parse_study(BLOCKS[0], Path("STUDY.yaml"))
    catalogue = catalogue_of(study.settings.options)
    plan = plan_study(study, catalogue)
    assert len(plan.runs) == 8
    assert [finding.number for finding in check_study(plan, catalogue)] == ["ST-01"]
    assert {cell.quantities["epochs"] for cell in plan.cells} == {4, 8}


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: next(iter(block)))
def test_part_of_a_file_is_understood(block: dict[str, Any]) -> None:
    assert parse_study({**SOURCE, **block}, Path("STUDY.yaml"))


def test_every_key_and_every_check_is_explained() -> None:
    keys = set(re.findall(r"`(\w+)`", PAGE))
    assert set(_STUDY_KEYS) | set(_SETTINGS_KEYS) <= keys
    assert re.findall(r"^\| (ST-\d\d) \|", PAGE, re.MULTILINE) == list(CHECKS)


def test_named_flags_are_the_stated_options() -> None:
    text = " ".join(PAGE.partition("### Options")[2].partition("## ")[0].split())
    pairs = re.findall(r"`--([\w-]+)` is `(\w+)`", text) + [
        (flag, name) for name, flag in re.findall(r"`(\w+)` for `--([\w-]+)`", text)
    ]
    assert len(pairs) == 4
    assert pairs == [
        (flag, each.name) for flag, name in pairs for each in fields(LaunchOptions) if flag_of(each) == f"--{flag}"
    ]


def test_named_reserved_columns_cannot_be_factors() -> None:
    text = PAGE.partition("It cannot be a column")[2].partition(".\n")[0]
    assert set(re.findall(r"`(\w+)`", text)) <= RESERVED


def test_figures_are_those_of_the_code() -> None:
    text = " ".join(PAGE.split())
    assert f"A rank keeps {MAX_VALUES:,} values of {MAX_NAMES} names" in text
    assert f"every combination of levels, at most {MAX_RUNS:,}" in text
    assert {each.name for each in fields(Metric)} <= set(re.findall(r"`(\w+)`", PAGE))


def test_named_columns_exist() -> None:
    from tests.support.studies import report_of, result_of, small_runs

    (row,) = rows([result_of(small_runs(1)[0], report=report_of())])
    named = set(re.findall(r"`(\w+)`", PAGE.partition("| columns | meaning |")[2].partition("\n\n")[0]))
    phases = {"start_s", "compute_s", "data_wait_s", "other_s"}
    assert "data_wait_s" not in row  # a phase, which the mean of a step must not replace
    assert phases <= named
    of_metrics = {"NAME_best", "NAME_time_to_target_s", "NAME_after_60s", "metric_"}
    assert named - phases - of_metrics - {"finished", "failed"} <= set(row)
