"""The report as JSON: schema, version, bounds, and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from hetero.documents.records import decode, encode, json_text
from hetero.errors import ConfigError
from hetero.metrics.skips import SkippedSample
from hetero.metrics.steps import StepSummary
from hetero.pricing import Catalogue
from hetero.report import RankFacts, Report, RunFacts, build_report, load_report, show_file, write_report
from tests.report import json_schemas

FactsMaker = Callable[..., RunFacts]


@pytest.fixture
def report(make_facts: FactsMaker, summary_of: Callable[..., StepSummary]) -> Report:
    skipped = SkippedSample(index="17", epoch=1, host="algo-2/0", exception="ValueError: bad")
    loaders = (summary_of(0.184, num_skips=3, skips=(skipped,)),)
    facts = make_facts(
        is_heterogeneous=True,
        ranks=(RankFacts(rank=0, host="algo-1", loaders=loaders),),
        events={"endpoint restarts": 1},
        versions={"hetero": "1"},
        options={"emulate_sample_s": "0.02"},
    )
    return build_report(facts, Catalogue.load("seed-2022"))


def shipped_schema() -> dict[str, Any]:
    text = resources.files("hetero.report").joinpath("data/report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


@pytest.mark.parametrize("path", json_schemas.SCHEMAS)
def test_schemas_shipped_are_valid_and_fresh(path: str) -> None:
    schema = json.loads((json_schemas.PACKAGE / path).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    fresh = json_schemas.json_schema(*json_schemas.SCHEMAS[path])
    assert schema == json.loads(json.dumps(fresh)), "run python -m tests.report.json_schemas"


def test_report_json_satisfies_the_schema_and_survives(report: Report, make_facts: FactsMaker) -> None:
    empty = build_report(make_facts(ranks=(), hosts=()), Catalogue.load())
    for each in (report, empty):
        value = json.loads(json_text(each))
        jsonschema.validate(value, shipped_schema())
        assert decode(Report, value) == each


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version: found 2, expected 1"),
        ("schema_version", "1", "schema_version: found '1', expected an integer"),
        ("run.placement", "elsewhere", "run.placement: found 'elsewhere', expected one of homogeneous"),
        ("run.groups.0.count", 0, r"run.groups\[0\].count: found 0"),
        ("run.groups.0.role", "gpu", r"run.groups\[0\].role"),
        ("run.ranks.0.loaders.0.num_steps", -1, r"run.ranks\[0\].loaders\[0\].num_steps: found -1"),
        ("run.ranks.0.loaders.0.skips.0.epoch", -1, r"loaders\[0\].skips\[0\].epoch: found -1"),
        ("run.ranks.0.loaders.0.skips", [{}] * 33, "skips: 33 entries, expected at most 32"),
        ("run.hosts.0.cpu_seconds", "1", r"run.hosts\[0\].cpu_seconds: found '1', expected a number"),
        ("run.events.endpoint restarts", 1.5, "run.events.endpoint restarts: found 1.5"),
        ("run.versions", ["1"], "run.versions: found .* expected an object"),
        ("run.command", "x" * 5000, "run.command: string of 5000 characters"),
        ("run.simulated", ["x"] * 10_001, "run.simulated: 10001 entries"),
        ("headline.step_time_mean.value", float("inf"), "headline.step_time_mean.value: found inf"),
        ("headline.step_time_mean.basis", "guessed", "headline.step_time_mean.basis"),
        ("cost", None, "cost: found None, expected an object"),
        ("verdict.\x1b[31m", 1, r"verdict.\\x1b\[31m: unknown key"),
    ],
)
def test_report_from_bad_json_names_the_key_path(report: Report, path: str, value: object, message: str) -> None:
    document: Any = encode(report)
    *parents, last = path.split(".")
    target = document
    for key in parents:
        target = target[int(key)] if key.isdigit() else target[key]
    target[last] = value
    with pytest.raises(ConfigError, match=message):
        decode(Report, document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, shipped_schema())


def test_report_written_is_shown_by_file_or_directory(report: Report, tmp_path: Path) -> None:
    json_path, markdown_path = write_report(report, tmp_path)
    assert (json_path.name, markdown_path.name) == ("report.json", "report.md")
    assert load_report(tmp_path) == load_report(json_path) == report
    assert show_file(tmp_path) == show_file(str(json_path)) == markdown_path.read_text(encoding="utf-8")


def test_report_of_a_very_long_command_can_be_read_back(make_facts: FactsMaker, tmp_path: Path) -> None:
    write_report(build_report(make_facts(command="x" * 100_000), Catalogue.load()), tmp_path)
    assert load_report(tmp_path).run.command.endswith("x...")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "schema_version: missing"),
        ('{"schema_version": 9}', "found 9"),
        ("\xff", "not valid JSON"),
    ],
)
def test_report_file_malformed_names_the_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=message) as caught:
        show_file(tmp_path)
    assert str(path) in str(caught.value)


def test_report_file_missing_says_what_to_pass(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*pass report.json or its directory"):
        load_report(tmp_path)
