"""The study files of the distributed-training study, and the summary of its results."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hetero.decide.studies.study import prepare_study
from hetero.decide.studies.study_file import read_study
from hetero.documents.findings import ERROR

pytest.importorskip("transformers")

Script = Callable[[str], ModuleType]
FOLDER = Path(__file__).parents[2] / "examples" / "text_scaling"
STUDIES = sorted(FOLDER.glob("studies/*.yaml"))


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_study_passes_its_checks_and_the_script_takes_its_arguments(
    path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    train = script("text_scaling/train.py")
    preparation = prepare_study(path)
    assert [str(each) for each in preparation.findings if each.severity == ERROR] == []
    for run in preparation.plan.runs:
        args = train.parse_arguments(list(run.script_args))
        assert args.samples * 9 // 10 == run.levels["training_samples"]
        assert args.batch_size * int(run.levels["ranks"]) == run.levels["global_batch"]


@pytest.mark.parametrize("name", ["scaled", "short", "learning_rate"])
def test_scaled_runs_of_a_size_have_the_same_samples_and_whole_epochs(name: str) -> None:
    plan = prepare_study(FOLDER / "studies" / f"{name}.yaml").plan
    for run in plan.runs:
        epochs, batch, training_samples = (run.levels[key] for key in ("epochs", "global_batch", "training_samples"))
        assert isinstance(epochs, int)
        assert training_samples % batch == 0  # so no sample is repeated to fill a step
        assert run.levels["steps"] == epochs * training_samples // batch
    assert len({run.levels["steps"] * run.levels["global_batch"] for run in plan.runs}) == 1


def test_fixed_global_batch_keeps_steps_and_rate_on_all_numbers_of_ranks() -> None:
    plan = prepare_study(FOLDER / "studies" / "scaled.yaml").plan
    fixed = [run.levels for run in plan.runs if run.levels["global_batch"] == 16]
    assert {(each["ranks"], each["batch_per_device"]) for each in fixed} == {(1, 16), (2, 8), (4, 4)}
    assert {(each["steps"], each["learning_rate"]) for each in fixed} == {(540, 2e-4)}


def test_scaled_study_has_three_replicates_and_the_short_one_is_a_part_of_it() -> None:
    scaled, short = (read_study(FOLDER / "studies" / f"{name}.yaml") for name in ("scaled", "short"))
    assert scaled.replicates == 3
    factors = [factor.name for factor in scaled.factors]
    rows = {
        name: {
            tuple(run.levels[factor] for factor in (*factors, "learning_rate"))
            for run in prepare_study(FOLDER / "studies" / f"{name}.yaml").plan.runs
        }
        for name in ("scaled", "short")
    }
    assert rows["short"] == {row for row in rows["scaled"] if row[factors.index("samples")] == 640}
    assert (len(rows["short"]), len(rows["scaled"])) == (7, 21)
    assert [arg for arg in short.args if arg != "1"] == [arg for arg in scaled.args if arg != "3"]  # validations


# ---- summary


@pytest.fixture
def runs_csv(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    columns = ("ranks", "batch_per_device", "learning_rate", "base_learning_rate", "steps", "samples", "seed", "state")
    rows = []
    for seed, (alone, kept, scaled) in enumerate([(0.80, 0.70, 0.79), (0.82, 0.73, 0.81), (0.84, 0.76, 0.83)]):
        rows.append((1, 16, 2e-4, "", 540, 640, seed, "finished", alone))
        rows.append((4, 16, 2e-4, "", 135, 640, seed, "finished", kept))
        rows.append((4, 16, 4e-4, 2e-4, 135, 640, seed, "finished", scaled))
        rows.append((1, 16, 2e-4, "", 540, 1920, seed, "finished", 0.80))
        rows.append((4, 16, 2e-4, "", 135, 1920, seed, "finished", 0.89))
    rows.append((4, 16, 4e-4, 2e-4, 135, 640, 9, "failed", ""))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*columns, "f1", "wall_s"])
        writer.writerows([*row, 20] for row in rows)
    return path


def test_summary_has_means_with_intervals_and_differences_of_pairs_by_size(
    script: Script, runs_csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script("text_scaling/summary.py").main([str(runs_csv)]) == 0
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header.endswith("| f1, 640 samples | f1, 1,920 samples | minus 1 rank, 640 | minus 1 rank, 1,920 |")
    # A loss at one size and a gain at the other stay apart: all six together would be 0.000.
    assert lines == [
        "| 1 x 16 | 16 | 0.0002 | 540 | 0.820 ± 0.050 | 0.800 ± 0.000 |  |  |",  # 4.303 x 0.02 / sqrt(3)
        "| 4 x 16 | 64 | 0.0002 | 135 | 0.730 ± 0.075 | 0.890 ± 0.000 | -0.090 ± 0.025 | +0.090 ± 0.000 |",
        "| 4 x 16 | 64 | 0.0004 | 135 | 0.810 ± 0.050 |  | -0.010 ± 0.000 |  |",
        "",
        "15 runs, 5 minutes in all",
    ]


def test_summary_of_two_settings_on_one_rank_is_refused(
    script: Script, runs_csv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with runs_csv.open("a", newline="") as file:
        csv.writer(file).writerow((1, 32, 2e-4, "", 270, 640, 1, "finished", 0.5, 20))
    with pytest.raises(SystemExit, match="2"):
        script("text_scaling/summary.py").main([str(runs_csv)])
    assert "two runs on one rank have 640 samples, seed 1 and base learning rate 0.0002" in capsys.readouterr().err


def test_summary_of_another_file_is_refused(script: Script, runs_csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script("text_scaling/summary.py").main([str(runs_csv), "--metric", "loss"])
    assert "has no finished run with loss, expected the runs.csv of a study of train.py" in capsys.readouterr().err


def test_summary_of_a_file_without_the_columns_of_a_study_is_refused(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.csv"
    path.write_text("ranks,f1\n1,0.8\n")
    with pytest.raises(SystemExit, match="2"):
        script("text_scaling/summary.py").main([str(path)])
    assert "has no column state, batch_per_device, learning_rate" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["scaled", "learning_rate"])
def test_readme_has_the_summary_of_the_results(name: str, script: Script) -> None:
    summary = script("text_scaling/summary.py")
    runs = summary.read_runs(FOLDER / "results" / f"{name}.csv", "f1")
    plan = prepare_study(FOLDER / "studies" / f"{name}.yaml").plan
    assert {run["run_id"] for run in runs} == {run.run_id for run in plan.runs}
    assert summary.table(runs, "f1") in (FOLDER / "README.md").read_text()
