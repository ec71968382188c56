"""Arithmetic, tables and files of the benchmarks' harness, from runs that are made up. Nothing is timed."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]


@pytest.fixture
def harness(load: Load) -> ModuleType:
    """The package."""
    return load("harness")


def make_run(harness: ModuleType, *, num_batches: int = 100, seconds: float = 2.0, **fields: Any) -> Any:
    """Return a run of batches of 10 MB and 4 samples."""
    given = {
        "seconds": seconds,
        "num_batches": num_batches,
        "num_samples": 4 * num_batches,
        "num_bytes": 10_000_000 * num_batches,
        "trainer_cpu_s": 0.5,
        "supply_cpu_s": 1.5,
        "trainer_peak_bytes": 300_000_000,
        "trainer_growth_bytes": 50_000_000,
        "supply_bytes": 200_000_000,
        "first_batch_s": 2.0,
    }
    return harness.Run(**given | fields)


def make_row(
    harness: ModuleType, name: str, *, batches: tuple[int, ...] = (100,), group: str = "", **config: Any
) -> Any:
    """Return a row with a run for each number of batches."""
    trial = harness.Trial(competitor=name, group=group, config=config)
    runs = tuple(make_run(harness, num_batches=count) for count in batches)
    return harness.Row(trial=trial, runs=runs, error="" if runs else "it broke\nin two lines")


def test_public_names_are_those_listed_and_sorted(harness: ModuleType) -> None:
    constants = [name for name in harness.__all__ if name.isupper()]
    classes = [name for name in harness.__all__ if name[0].isupper() and not name.isupper()]
    functions = [name for name in harness.__all__ if name.islower()]
    assert harness.__all__ == sorted(constants) + sorted(classes) + sorted(functions)
    assert all(hasattr(harness, name) for name in harness.__all__)


def test_run_rates_follow_from_counts(harness: ModuleType) -> None:
    run = make_run(harness, num_batches=100, seconds=2.0, facts={"step_time_s": 0.04})
    assert run.batches_per_s == 50
    assert run.samples_per_s == 200
    assert run.gb_per_s == 0.5
    assert run.trainer_cpu_s_per_gb == 0.5
    assert run.supply_cpu_s_per_gb == 1.5
    assert run.value("step_time_s") == 0.04


def test_run_without_bytes_has_no_cpu_per_gigabyte(harness: ModuleType) -> None:
    assert make_run(harness, num_bytes=0).trainer_cpu_s_per_gb == 0


def test_row_gives_median_and_spread(harness: ModuleType) -> None:
    row = make_row(harness, "hetero", batches=(80, 100, 120))
    assert row.median("batches_per_s") == 50
    assert row.spread("batches_per_s") == pytest.approx(0.4)


def test_row_without_runs_has_no_median(harness: ModuleType) -> None:
    row = make_row(harness, "hetero", batches=())
    assert math.isnan(row.median("gb_per_s"))
    assert row.metrics() == []


def test_ratio_is_the_median_of_those_within_a_round(harness: ModuleType) -> None:
    rows = [make_row(harness, "a", batches=(30, 120, 60)), make_row(harness, "b", batches=(30, 40, 120))]
    assert rows[0].ratios(rows[1], "batches_per_s") == pytest.approx([1.0, 3.0, 0.5])
    assert harness.ratio(rows, "a", "b", "batches_per_s") == pytest.approx(1.0)  # of medians: 1.5


def test_ratio_without_the_same_rounds_is_that_of_medians_and_nan_where_one_is_missing(harness: ModuleType) -> None:
    rows = [
        make_row(harness, "a", batches=(30, 90, 60)),
        make_row(harness, "b", batches=(40,)),
        make_row(harness, "c", batches=()),
    ]
    assert harness.ratio(rows, "a", "b", "gb_per_s") == pytest.approx(1.5)
    assert math.isnan(harness.ratio(rows, "a", "c", "gb_per_s"))
    assert math.isnan(harness.ratio(rows, "a", "nobody", "gb_per_s"))


@pytest.mark.parametrize(
    ("found", "at_most", "outcome"),
    [
        (0.9, False, "met"),  # the bound itself
        (0.899, False, "**MISSED**"),
        (0.9, True, "met"),
        (0.901, True, "**MISSED**"),
        (math.nan, False, "not measured"),
        (math.nan, True, "not measured"),
    ],
)
def test_target_says_whether_the_bound_holds(harness: ModuleType, found: float, at_most: bool, outcome: str) -> None:
    assert harness.target("figure", found, 0.9, at_most=at_most).endswith(outcome)


def test_table_shows_ratios_to_the_reference_and_what_failed(harness: ModuleType) -> None:
    rows = [
        make_row(harness, "hetero", batches=(150,)),
        make_row(harness, "peer"),
        make_row(harness, "broken", batches=()),
    ]
    columns = harness.columns(
        "batches_per_s", harness.Column(title="MB/s", metric="gb_per_s", form="{:.0f}", scale=1e3)
    )
    text = harness.table(rows, columns, ratio_metric="batches_per_s", references=["hetero"])
    assert text.splitlines() == [
        "|  | batches/s | MB/s | spread | hetero / this | basis |",
        "|---|---|---|---|---|---|",
        "| hetero | 75.00 | 750 | 0 % | 1.00 | measured |",
        "| peer | 50.00 | 500 | 0 % | 1.50 | measured |",
        "| broken | failed: it broke |",
    ]


def test_report_has_a_table_for_each_group_and_figures_below(harness: ModuleType) -> None:
    rows = [make_row(harness, name, group=group) for group in ("small", "large") for name in ("hetero", "peer")]

    def figures(members: list[Any]) -> list[str]:
        return [f"- {len(members)} rows"] if members[0].trial.group == "small" else []

    text = harness.report("Title", rows, harness.columns("gb_per_s"), figures, ratio_metric="gb_per_s")
    assert text.splitlines()[:6] == ["# Title", "", "## small", "", "|  | GB/s | spread | basis |", "|---|---|---|---|"]
    assert text.splitlines()[8:12] == ["", "- 2 rows", "", "## large"]
    assert text.endswith("| peer | 0.500 | 0 % | measured |")


def test_every_round_runs_everybody_and_begins_with_another(load: Load, harness: ModuleType) -> None:
    comparison = load("harness.comparison")
    rounds = [comparison.rotated(3, index) for index in range(4)]
    assert rounds == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_estimate_counts_a_start_per_round_only_for_new_processes(load: Load, harness: ModuleType) -> None:
    protocol = load("harness.comparison").Protocol(runs=5, seconds=2.0, fresh=False)
    kept = harness.Trial(competitor="kept", start_s=10.0, warmup_s=1.0)
    fresh = harness.Trial(competitor="fresh", start_s=10.0, warmup_s=1.0, fresh=True)
    assert harness.estimate_s([kept], protocol) == 10 + 5 * 3
    assert harness.estimate_s([fresh], protocol) == 5 * 10 + 5 * 3


def test_shared_columns_are_named_by_their_metric(harness: ModuleType) -> None:
    assert [column.title for column in harness.columns("gb_per_s", "first_batch_s")] == ["GB/s", "first batch s"]
    with pytest.raises(KeyError):
        harness.columns("gb_per_h")


@pytest.fixture
def results(load: Load, harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of the committed results."""
    module = load("harness.results")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "SHORT_RESULTS", tmp_path / "results" / "short")
    return tmp_path / "results"


def make_plan(harness: ModuleType, *argv: str) -> Any:
    """Return the plan of a benchmark that has an option of its own."""
    parser = harness.parser("Is it fast?", seconds=3.0, short_seconds=1.0)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--pin", action="store_true")
    return harness.plan("question", parser, parser.parse_args(argv), neutral={"pin"})


@pytest.mark.parametrize(
    ("argv", "path"),
    [
        ((), "question"),
        (("--pin",), "question"),  # said to be neutral
        (("--runs", "7", "--seconds", "9"), "question"),  # more than the full form is full
        (("--short",), "short/question"),
        (("--sizes", "1"), "short/question-partial"),
        (("--only", "hetero"), "short/question-partial"),
        (("--runs", "4"), "short/question-partial"),
        (("--seconds", "1"), "short/question-partial"),
        (("--short", "--runs", "1"), "short/question-partial"),
        (("--short", "--runs", "3"), "short/question"),
    ],
)
def test_only_a_full_run_may_replace_a_full_result(
    harness: ModuleType, results: Path, argv: tuple[str, ...], path: str
) -> None:
    assert make_plan(harness, *argv).path == results / path


@pytest.mark.parametrize(
    ("argv", "expected"),
    [((), (1, 2)), (("--short",), (1,)), (("--sizes", "7"), [7]), (("--short", "--sizes", "7"), [7])],
)
def test_form_decides_what_the_command_line_leaves_open(
    harness: ModuleType, results: Path, argv: tuple[str, ...], expected: object
) -> None:
    plan = make_plan(harness, *argv)
    assert plan.choose(plan.options["sizes"], full=(1, 2), short=(1,)) == expected


def test_short_run_into_the_committed_folder_is_refused(
    harness: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_plan(harness, "--short", "--results", str(results))
    assert "only full ones do" in capsys.readouterr().err


def test_estimate_runs_nothing(harness: ModuleType, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trials = [harness.Trial(competitor="none", start_s=9.0, warmup_s=0.0)] * 4
    with pytest.raises(SystemExit) as end:
        make_plan(harness, "--estimate").compare("script.py", trials)
    assert end.value.code == 0
    assert "4 rows x 5 runs, about 4.0 minutes" in capsys.readouterr().err


def test_result_file_says_basis_configuration_and_protocol_of_each_row(
    load: Load, harness: ModuleType, tmp_path: Path
) -> None:
    protocol = load("harness.comparison").Protocol(runs=2, seconds=1.0)
    row = make_row(harness, "hetero", batches=(100, 120), nbytes=10)
    facts = harness.environment()
    load("harness.results").write(tmp_path / "question", [row], "# Title", protocol, facts, {"scope": "short"})
    content = json.loads((tmp_path / "question.json").read_text())
    (found,) = content["rows"]
    assert found["basis"] == "measured"
    assert found["config"] == {"nbytes": 10}
    assert found["protocol"]["runs"] == 2
    assert found["medians"]["batches_per_s"] == 55
    assert len(found["runs"]) == 2
    assert {"commit", "versions", "hardware", "date", "scope"} <= set(content)
    assert (tmp_path / "question.md").read_text().startswith("# Title\n\nShort form.")


def test_trainer_that_cannot_start_tells_the_cause_and_not_what_stopping_found(load: Load) -> None:
    class Broken(load("harness").Competitor):  # type: ignore[misc]
        def start(self) -> None:
            raise ConnectionError("nobody listens there")

        def stop(self) -> None:
            self.server.stop()

    with pytest.raises(ConnectionError, match="nobody listens there"):
        load("harness.trainer")._be_trainer(Broken({}), io.StringIO())
