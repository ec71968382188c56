"""Results as rows, CSV and Parquet."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from hetero.decide.studies.output.table import _column, communication_ratio, csv_text, rows, write_parquet
from hetero.decide.studies.runs import RunResult
from hetero.decide.studies.study_file import Metric
from hetero.metrics.logged import LoggedMetric
from tests.support.studies import report_of, result_of, small_runs


def results() -> list[RunResult]:
    first, second = small_runs(2)
    report = report_of(wall_s=100.0, f1=0.75)
    metrics = (LoggedMetric(name="f1", value=0.8, at_s=50.0, unix_s=1e9), *report.run.metrics)
    return [
        result_of(
            first,
            wall_s=100.0,
            report=report,
            metrics=metrics,
            phases={"compute": 60.0, "data wait": 1.0, "other": 39.0},
        ),
        result_of(second, state="failed", exit_code=30, cause="it raised, a lot"),
    ]


def test_rows_have_levels_times_costs_and_quality() -> None:
    first, second = rows(results(), metrics=[Metric(name="f1", target=0.8)])
    assert list(first) == list(second)
    assert {name: first[name] for name in ("run_id", "samples", "state", "wall_s", "compute_s", "data_wait_s")} == {
        "run_id": "000-samples=0-r1",
        "samples": 0,
        "state": "finished",
        "wall_s": 100.0,
        "compute_s": 60.0,
        "data_wait_s": 1.0,
    }
    assert first["data_wait_per_step_s"] is None  # the report has no steps
    parts = [first[name] for name in ("compute_s", "data_wait_s", "other_s")]
    assert sum(part for part in parts if isinstance(part, float)) == first["wall_s"]
    assert first["usd"] == pytest.approx(0.1)
    assert (first["f1"], first["f1_best"], first["f1_time_to_target_s"]) == (0.75, 0.8, 50.0)
    assert (second["cause"], second["f1"], second["step_time_s"]) == ("it raised, a lot", None, None)


def test_quality_after_stated_times_has_a_column_for_each() -> None:
    values = [(30.0, 0.5), (60.0, 0.7), (90.0, 0.6), (700.0, 0.8)]
    metrics = tuple(LoggedMetric(name="f1", value=value, at_s=at_s, unix_s=1e9) for at_s, value in values)
    metrics += (LoggedMetric(name="f1", value=0.9, at_s=1.0, rank=1),)  # of another rank than the curve
    metric = Metric(name="f1", after_s=(2.5, 60.0, 600.0, 1e7))
    (row,) = rows([result_of(small_runs(1)[0], metrics=metrics)], metrics=[metric])
    found = {name: value for name, value in row.items() if "_after_" in name}
    assert found == {"f1_after_2.5s": None, "f1_after_60s": 0.7, "f1_after_600s": 0.7, "f1_after_10000000s": 0.8}


def test_metric_with_the_name_of_a_column_keeps_both() -> None:
    (run,) = small_runs(1)
    (row,) = rows([result_of(run, metrics=(LoggedMetric(name="usd", value=7.0, at_s=1.0),))])
    assert (row["usd"], row["metric_usd"]) == (pytest.approx(0.01), 7.0)


def test_logged_metric_with_the_name_of_a_computed_column_keeps_both() -> None:
    values = {"acc": 0.5, "acc_best": 7.0}
    metrics = tuple(LoggedMetric(name=name, value=value, at_s=1.0) for name, value in values.items())
    (row,) = rows([result_of(small_runs(1)[0], metrics=metrics)], metrics=[Metric(name="acc")])
    assert (row["acc"], row["acc_best"], row["metric_acc_best"]) == (0.5, 0.5, 7.0)


def test_metric_has_the_same_column_in_runs_with_and_without_phases() -> None:
    first, second = small_runs(2)
    metrics = (LoggedMetric(name="compute_s", value=7.0, at_s=1.0),)
    table = rows([result_of(first, metrics=metrics, phases={"compute": 60.0}), result_of(second, metrics=metrics)])
    assert [(row["compute_s"], row["metric_compute_s"]) for row in table] == [(60.0, 7.0), (None, 7.0)]


def test_phase_with_the_name_of_a_level_keeps_both() -> None:
    result = result_of(small_runs(1)[0], levels={"training_s": 3}, phases={"training": 60.0})
    (row,) = rows([result])
    assert (row["training_s"], row["phase_training_s"]) == (3, 60.0)


def test_column_of_numbers_beyond_64_bits_has_texts() -> None:
    assert _column([1, 2**64 - 1, None]) == ["1", "18446744073709551615", None]
    assert _column([1, 2**63 - 1]) == [1, 2**63 - 1]


def test_communication_over_computation_is_that_of_all_ranks() -> None:
    (run,) = small_runs(1)
    values = {"communication_s": (1.0, 3.0), "computation_s": (4.0, 4.0)}
    metrics = tuple(
        LoggedMetric(name=name, value=value, at_s=1.0, rank=rank)
        for name, each in values.items()
        for rank, value in enumerate(each)
    )
    (row,) = rows([result_of(run, metrics=metrics)])
    assert row["communication_over_computation"] == 0.5


def test_csv_is_read_back() -> None:
    table = rows(results())
    found = list(csv.DictReader(io.StringIO(csv_text(table))))
    assert [row["run_id"] for row in found] == ["000-samples=0-r1", "001-samples=1-r1"]
    assert (found[0]["wall_s"], found[1]["cause"], found[1]["f1"]) == ("100.0", "it raised, a lot", "")


def test_study_without_results_has_a_table_without_rows() -> None:
    assert rows([]) == []
    assert csv_text([]) == "run_id\n"


def test_parquet_is_read_back_if_pyarrow_is_installed(tmp_path: Path) -> None:
    table = rows(results())
    path = tmp_path / "runs.parquet"
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        assert not write_parquet(path, table)
        assert not path.exists()
        return
    assert write_parquet(path, table)
    assert parquet.read_table(path).to_pylist() == table


def test_communication_ratio_is_over_the_steps_that_both_series_kept() -> None:
    values = [("communication_s", step, 1.0) for step in range(0, 20, 2)]  # thinned
    values += [("computation_s", step, 2.0) for step in range(20)]
    metrics = tuple(LoggedMetric(name=name, value=value, step=step, at_s=1.0) for name, step, value in values)
    assert communication_ratio(result_of(small_runs(1)[0], metrics=metrics)) == pytest.approx(0.5)
