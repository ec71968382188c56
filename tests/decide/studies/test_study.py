"""A study from its file to its results, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hetero import cli, config
from hetero.decide.studies.conduct import Progress
from hetero.decide.studies.executors import SimulateExecutor
from hetero.decide.studies.ledger import LEDGER_FILE_NAME
from hetero.decide.studies.runs import STOPPED, PlannedRun, RunResult
from hetero.decide.studies.study import make_executor, prepare_study, preview_text, progress_text, run_study
from hetero.errors import BudgetError, ConfigError, ExitCode
from tests.support.studies import PretendExecutor

FILE = """
name: small
script: train.py
args: [--samples, "{samples}"]
groups: ["trainer=ml.p3.2xlarge:1"]
factors: {samples: [1000, 2000]}
options: {price_profile: seed-2022}
expected_minutes: 6
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Return the file of a study."""
    (tmp_path / "train.py").write_text("import hetero\n")
    path = tmp_path / "STUDY.yaml"
    path.write_text(FILE)
    return path


def test_results_are_written_also_if_the_budget_ends_the_study(study: Path, tmp_path: Path) -> None:
    study.write_text(FILE + "budget: {hours: 0.15}\n")
    folder = tmp_path / "out"
    with pytest.raises(BudgetError):
        run_study(prepare_study(study), folder, executor=PretendExecutor(wall_s=360.0))
    assert len((folder / "runs.csv").read_text().splitlines()) == 2
    assert "1 of 2 runs finished" in (folder / "study.html").read_text()


def test_changed_study_needs_fresh_and_a_changed_budget_does_not(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run_study(prepare_study(study), folder, executor=PretendExecutor())
    study.write_text(FILE.replace("expected_minutes: 6", "expected_minutes: 9\nbudget: {usd: 100}"))
    again = PretendExecutor()
    run_study(prepare_study(study), folder, executor=again)
    assert again.executed == []
    study.write_text(FILE.replace("2000", "3000"))
    with pytest.raises(ConfigError, match=r"factors.samples: was \[1000, 2000\], is now \[1000, 3000\]"):
        run_study(prepare_study(study), folder, executor=again)
    run_study(prepare_study(study), folder, executor=again, fresh=True)
    assert len(again.executed) == 2


def test_changed_script_is_a_changed_study(study: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    run_study(prepare_study(study), folder, executor=PretendExecutor())
    (tmp_path / "train.py").write_text("import hetero  # changed\n")
    with pytest.raises(ConfigError, match="content of the script: was"):
        run_study(prepare_study(study), folder, executor=PretendExecutor())


def test_budget_is_that_of_the_selected_runs(study: Path) -> None:
    study.write_text(FILE + "budget: {hours: 0.15}\n")
    with pytest.raises(ConfigError, match=r"ST-11.*all 2 runs take 0.20 hours"):
        prepare_study(study).check()
    prepare_study(study, levels={"samples": "2000"}).check()


def test_name_that_is_given_twice_is_rejected(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["study", str(study), "--dry-run", "--only", "samples=1000", "--only", "samples=2000"]
    assert cli.main(command) == ExitCode.USAGE
    assert "samples was given before; expected each name once" in capsys.readouterr().err


def test_replicates_of_the_command_replace_those_of_the_file(study: Path, tmp_path: Path) -> None:
    command = ["study", str(study), "--dry-run", "--replicates"]
    assert cli.main([*command, "3"]) == ExitCode.OK
    assert len(prepare_study(study, replicates=3).plan.runs) == 6
    assert cli.main([*command, "0"]) == ExitCode.USAGE


def test_only_runs_part_of_a_study_and_the_rest_later(study: Path, tmp_path: Path) -> None:
    first, second = PretendExecutor(), PretendExecutor()
    run_study(prepare_study(study, levels={"samples": "2000"}), tmp_path / "out", executor=first)
    run_study(prepare_study(study), tmp_path / "out", executor=second)
    assert (first.executed, second.executed) == (["001-samples=2000-r1"], ["000-samples=1000-r1"])
    third = PretendExecutor()
    results = run_study(prepare_study(study, levels={"samples": "1000"}), tmp_path / "out", executor=third)
    assert (third.executed, [result.run_id for result in results]) == ([], ["000-samples=1000-r1"])
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 3  # of all runs that have ended
    assert "2 of 2 runs finished" in (tmp_path / "out" / "study.html").read_text()


def test_study_goes_on_after_its_folder_has_moved(study: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    for path in (study, tmp_path / "train.py"):
        path.rename(first / path.name)
    (first / "data").mkdir()
    (first / "STUDY.yaml").write_text(FILE + "channels: {train: data}\n")
    results = run_study(prepare_study(first / "STUDY.yaml"), first / "out", executor=PretendExecutor())
    first.rename(tmp_path / "second")
    again = PretendExecutor()
    moved = prepare_study(tmp_path / "second" / "STUDY.yaml")
    assert run_study(moved, tmp_path / "second" / "out", executor=again) == results
    assert again.executed == []
    (tmp_path / "second" / "STUDY.yaml").write_text(FILE + "channels: {train: other}\n")
    with pytest.raises(ConfigError, match="channels.train: was"):
        run_study(prepare_study(tmp_path / "second" / "STUDY.yaml"), tmp_path / "second" / "out", executor=again)


def test_results_are_written_if_a_run_cannot_be_started(study: Path, tmp_path: Path) -> None:
    def before(run: PlannedRun) -> None:
        if run.run_id.startswith("001"):
            raise ConfigError("the script is gone")

    study.write_text(FILE + "order: given\n")
    with pytest.raises(ConfigError, match="the script is gone"):
        run_study(prepare_study(study), tmp_path / "out", executor=PretendExecutor(before=before))
    assert len((tmp_path / "out" / "runs.csv").read_text().splitlines()) == 2


def test_dry_run_shows_runs_findings_and_cost_and_runs_nothing(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = FILE + "constraints: {batch_per_device: 8, epochs: 1.5}\nbudget: {usd: 2}\n"
    study.write_text(text)
    assert cli.main(["study", str(study), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "study small: 2 runs in this order" in shown
    assert "ST-04 warning: epochs are not whole" in shown
    assert "expected: 0.20 h, USD 0.77; budget: USD 2" in shown  # 2 runs of 6 minutes at USD 3.825
    assert not (tmp_path / "studies").exists()


def test_error_of_a_check_is_refused_unless_it_is_ignored(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study.write_text(FILE + "constraints: {batch_per_device: 64, memory_gb_per_sample: 1}\n")
    assert cli.main(["study", str(study), "--dry-run"]) == ExitCode.USAGE
    assert "nothing was run\n  ST-03 error: a batch of 64 per device needs 64.0 GB" in capsys.readouterr().err
    assert cli.main(["study", str(study), "--dry-run", "--ignore", "ST-03"]) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("script: train.py", "script: none.py"), "none.py' does not exist"),
        (("script: train.py", "script: ."), "is a folder; expected a file"),
        (("options: {", "options: {module: true, "), "there is no module 'train.py'"),
        (
            ("script:", "channels: {train: '{samples}'}\nscript:"),
            "channels.train: .*/[12]000 does not exist, expected a folder",
        ),
    ],
)
def test_run_that_cannot_start_is_an_error_of_the_dry_run(
    study: Path, change: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study.write_text(FILE.replace(*change, 1))
    assert cli.main(["study", str(study), "--dry-run"]) == ExitCode.USAGE
    assert re.search(f"nothing was run\n  .*{message}", capsys.readouterr().err)


def test_unknown_check_cannot_be_ignored(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", str(study), "--dry-run", "--ignore", "ST-99"]) == ExitCode.USAGE
    assert "--ignore ST-99: unknown check; expected one of ST-01, " in capsys.readouterr().err


def test_study_of_a_module_identifies_it_by_its_source(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_19").mkdir()
    (tmp_path / "own_19" / "train.py").write_text("import hetero\n")
    study.write_text(FILE.replace("train.py", "own_19.train").replace("options: {", "options: {module: true, "))
    preparation = prepare_study(study)
    preparation.check()
    run_study(preparation, tmp_path / "out", executor=PretendExecutor())
    executor = SimulateExecutor(catalogue=preparation.catalogue)
    (command,) = executor._commands(preparation.plan.runs[0], tmp_path)
    parser = cli._make_parser()
    namespace = config.parse(parser, config.split_at_script(parser, command[3:])[0])
    assert (namespace.script, namespace.module) == ("own_19.train", True)
    (tmp_path / "own_19" / "train.py").write_text("import hetero  # changed\n")
    with pytest.raises(ConfigError, match="content of the script: was"):
        run_study(prepare_study(study), tmp_path / "out", executor=PretendExecutor())


def test_preview_without_durations_says_so(study: Path) -> None:
    study.write_text(FILE.replace("expected_minutes: 6", ""))
    assert "unknown, because the study states no expected_minutes" in preview_text(prepare_study(study), None)


@pytest.mark.parametrize(
    ("executor", "message"),
    [
        ("{simulate: {at_most: 2}}", "executor.simulate.at_most: unknown key"),
        ("launch", "executor.launch.cluster_file: missing"),
        ("{launch: {cluster_file: c.json, start: ssh, host: a}}", "executor.launch.start: found 'ssh'"),
    ],
)
def test_malformed_executor_is_rejected(study: Path, executor: str, message: str) -> None:
    (study.parent / "c.json").write_text(cluster_of("a"))
    study.write_text(FILE + f"executor: {executor}\n")
    preparation = prepare_study(study)
    with pytest.raises(ConfigError, match=message):
        make_executor(preparation.plan.study, preparation.catalogue)


def test_study_on_a_cluster_file_has_its_groups(study: Path, tmp_path: Path) -> None:
    groups = [{"instance_group_name": "trainer", "instance_type": "ml.p3.8xlarge", "hosts": ["a", "b"]}]
    (tmp_path / "cluster.json").write_text(json.dumps({"instance_groups": groups}))
    text = FILE.replace("price_profile: seed-2022", "prices: [ml.p3.8xlarge=14.688]").replace(
        'groups: ["trainer=ml.p3.2xlarge:1"]', ""
    )
    study.write_text(text + 'executor: {launch: {cluster_file: cluster.json, host: a, start: [ssh, "{host}"]}}\n')
    preparation = prepare_study(study)
    assert {cell.quantities["ranks"] for cell in preparation.plan.cells} == {8}
    executor = make_executor(preparation.plan.study, preparation.catalogue)
    assert executor.hourly_usd(preparation.plan.runs[0]) == pytest.approx(2 * 14.688)


def cluster_of(*hosts: str) -> str:
    group = {"instance_group_name": "trainer", "instance_type": "ml.p3.2xlarge", "hosts": hosts}
    return json.dumps({"instance_groups": [group]})


def test_levels_with_cluster_files_have_the_groups_of_their_own_file(study: Path, tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(cluster_of("a"))
    (tmp_path / "two.json").write_text(cluster_of("a", "b"))
    levels = "{one: {options: {cluster_file: one.json}}, two: {options: {cluster_file: two.json}}}"
    text = FILE.replace('groups: ["trainer=ml.p3.2xlarge:1"]', "").replace(
        "factors: {", f"factors: {{cluster: {levels}, "
    )
    study.write_text(text + 'executor: {launch: {cluster_file: one.json, host: a, start: [ssh, "{host}"]}}\n')
    preparation = prepare_study(study)
    found = {(cell.levels["cluster"], cell.quantities["ranks"]) for cell in preparation.plan.cells}
    assert found == {("one", 1), ("two", 2)}
    executor = make_executor(preparation.plan.study, preparation.catalogue)
    prices = {run.levels["cluster"]: executor.hourly_usd(run) for run in preparation.plan.runs}
    assert prices == {"one": pytest.approx(3.825), "two": pytest.approx(2 * 3.825)}


def test_groups_that_the_cluster_file_does_not_have_are_rejected(study: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(cluster_of("a"))
    executor = "executor: {launch: {cluster_file: cluster.json, host: a}}\n"
    study.write_text(FILE + executor)
    prepare_study(study)  # the same groups are no error
    study.write_text(FILE.replace("2xlarge:1", "2xlarge:4") + executor)
    with pytest.raises(ConfigError, match=r"groups are trainer=ml.p3.2xlarge:4, but .*/cluster.json has .*2xlarge:1"):
        prepare_study(study)


def test_ledger_states_what_the_study_is(study: Path, tmp_path: Path) -> None:
    run_study(prepare_study(study), tmp_path / "out", executor=PretendExecutor())
    first = json.loads((tmp_path / "out" / LEDGER_FILE_NAME).read_text().splitlines()[0])
    assert first["identity"]["factors"] == {"samples": [1000, 2000]}
    assert "budget" not in first["identity"]


def test_output_folder_that_is_a_file_is_rejected(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", str(study), "--output-dir", str(study)]) == ExitCode.USAGE
    assert "give another --output-dir" in capsys.readouterr().err


def test_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["study", str(tmp_path / "none.yaml")]) == ExitCode.USAGE
    assert "cannot read the study" in capsys.readouterr().err


def test_study_that_has_moved_goes_on_also_with_a_script_above_it(tmp_path: Path) -> None:
    for place in ("before", "after"):
        folder = tmp_path / place
        (folder / "studies").mkdir(parents=True)
        (folder / "train.py").write_text("import hetero\n")
        (folder / "studies" / "STUDY.yaml").write_text(FILE.replace("script: train.py", "script: ../train.py"))
    first, second = PretendExecutor(), PretendExecutor()
    run_study(prepare_study(tmp_path / "before/studies/STUDY.yaml"), tmp_path / "out", executor=first)
    run_study(prepare_study(tmp_path / "after/studies/STUDY.yaml"), tmp_path / "out", executor=second)
    assert (len(first.executed), second.executed) == (2, [])


def test_stopped_run_is_named_and_does_not_count_as_done() -> None:
    run = PlannedRun(run_id="003-a", levels={}, script="t.py")
    result = RunResult(
        run_id="003-a",
        state=STOPPED,
        exit_code=1,
        cause="the study was interrupted",
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=26.0,
        usd=None,
    )
    progress = Progress(
        run=run,
        result=result,
        num_done=0,
        num_total=6,
        num_failed=0,
        left_s=None,
        left_usd=None,
        num_unknown=6,
    )
    assert progress_text(progress).startswith("run 003-a stopped after 26 s: the study was interrupted; left: 6 runs")
