"""Runs of a study: what is executed, what is kept, and when the study ends."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest

from hetero.decide.studies.conduct import Progress, conduct, read_results
from hetero.decide.studies.runs import PlannedRun, RunResult
from hetero.decide.studies.study_file import Budget
from hetero.documents.records import json_text
from hetero.errors import BudgetError, ConfigError, ExitCode
from hetero.metrics.logged import LoggedMetric
from tests.support.studies import PretendExecutor, report_of, result_of, small_runs


def fails(run: PlannedRun) -> RunResult | None:
    """Let the second run fail."""
    if not run.run_id.startswith("001"):
        return None
    return result_of(run, state="failed", exit_code=30, cause="HET-30 algo-1: it raised")


def kills_at(run_id: str, error: type[BaseException]):  # type: ignore[no-untyped-def]
    def before(run: PlannedRun) -> None:
        if run.run_id.startswith(run_id):
            raise error

    return before


class KilledError(BaseException):
    """The process of the study is killed here."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.decide.studies.conduct._LOOK_INTERVAL_S", 0.01)


def test_failed_run_is_kept_with_its_cause_and_the_study_goes_on(tmp_path: Path) -> None:
    runs = small_runs(3)
    results = conduct(runs, PretendExecutor(before=fails), tmp_path)
    assert [result.state for result in results] == ["finished", "failed", "finished"]
    assert results[1].cause == "HET-30 algo-1: it raised"
    again = PretendExecutor()
    assert [result.state for result in conduct(runs, again, tmp_path)] == ["finished", "failed", "finished"]
    assert again.executed == []
    results = conduct(runs, again, tmp_path, retry_failed=True)
    assert again.executed == [runs[1].run_id]
    assert [result.state for result in results] == ["finished"] * 3


def test_killed_study_goes_on_after_the_last_run_that_ended(tmp_path: Path) -> None:
    runs = small_runs(4)
    first = PretendExecutor(before=kills_at("002", KilledError))
    with pytest.raises(KilledError):
        conduct(runs, first, tmp_path)
    second = PretendExecutor()
    results = conduct(runs, second, tmp_path)
    assert first.executed == [run.run_id for run in runs[:3]]
    assert second.executed == [run.run_id for run in runs[2:]]
    assert [result.run_id for result in results] == [run.run_id for run in runs]
    assert results == read_results(runs, tmp_path)


def test_line_that_was_not_written_completely_is_ignored(tmp_path: Path) -> None:
    runs = small_runs(2)
    conduct(runs, PretendExecutor(), tmp_path)
    ledger = tmp_path / "runs.jsonl"
    content = ledger.read_bytes()
    ledger.write_bytes(content[:-20])
    again = PretendExecutor()
    conduct(runs, again, tmp_path)
    assert again.executed == [runs[1].run_id]
    assert len(read_results(runs, tmp_path)) == 2


def test_interrupted_run_counts_with_what_it_cost_until_then(tmp_path: Path) -> None:
    runs = small_runs(1)
    alive = tmp_path / "runs" / runs[0].run_id / "alive"

    def dies_later(run: PlannedRun) -> None:
        seen: set[str] = set()
        while len(seen) < 3:  # the study sees its run
            seen.add(alive.read_text() if alive.exists() else "")
            time.sleep(0.001)
        raise KilledError

    with pytest.raises(KilledError):
        conduct(runs, PretendExecutor(before=dies_later, hourly_usd=3600.0), tmp_path)
    conduct(runs, PretendExecutor(wall_s=1.0, hourly_usd=3600.0), tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["study", "started", "ended", "started", "ended"]
    assert (lines[2]["state"], lines[2]["cause"]) == ("stopped", "the study was interrupted")
    assert lines[2]["usd"] == pytest.approx(lines[2]["wall_s"])
    assert lines[2]["wall_s"] > 0


def test_changed_study_is_refused_with_the_difference(tmp_path: Path) -> None:
    runs = small_runs(1)
    conduct(runs, PretendExecutor(), tmp_path, identity={"factors": {"samples": [1, 2]}, "seed": 1})
    with pytest.raises(ConfigError) as caught:
        conduct(runs, PretendExecutor(), tmp_path, identity={"factors": {"samples": [1, 3]}, "seed": 1})
    assert "factors.samples: was [1, 2], is now [1, 3]" in str(caught.value)
    assert "--fresh" in str(caught.value)


def test_run_with_the_same_name_that_was_another_is_refused(tmp_path: Path) -> None:
    (run,) = small_runs(1)
    conduct([run], PretendExecutor(), tmp_path)
    with pytest.raises(ConfigError, match="has a run 000-samples=0-r1 with other arguments"):
        conduct([dataclasses.replace(run, script_args=("--other",))], PretendExecutor(), tmp_path)


def test_run_that_would_pass_the_budget_is_not_started(tmp_path: Path) -> None:
    runs = small_runs(5)  # the first run costs USD 0.01, so each other one is expected to
    executor = PretendExecutor()
    with pytest.raises(BudgetError) as caught:
        conduct(runs, executor, tmp_path, budget=Budget(usd=0.035))
    assert len(executor.executed) == 3
    assert caught.value.exit_code is ExitCode.BUDGET
    assert "the budget of USD 0.035 does not allow run 003-samples=3-r1: USD 0.03 are spent" in str(caught.value)
    assert "2 of 5 runs are left" in str(caught.value)
    assert len(conduct(runs, executor, tmp_path, budget=Budget(usd=0.05))) == 5  # what was spent counts


def test_large_run_is_refused_by_its_stated_duration_although_small_ones_have_finished(tmp_path: Path) -> None:
    runs = small_runs(2)
    executor = PretendExecutor(wall_s=60.0)
    stated = {runs[0].run_id: 60.0, runs[1].run_id: 7200.0}
    with pytest.raises(BudgetError, match="does not allow run 001.*expected to take 2.00 h"):
        conduct(runs, executor, tmp_path, budget=Budget(hours=1), expected_s=stated)
    assert executor.executed == [runs[0].run_id]


def test_first_run_is_refused_if_its_stated_duration_passes_the_budget(tmp_path: Path) -> None:
    runs = small_runs(1)
    executor = PretendExecutor()
    with pytest.raises(BudgetError, match="does not allow run 000.*expected to take 2.00 h"):
        conduct(runs, executor, tmp_path, budget=Budget(hours=1), expected_s={runs[0].run_id: 7200.0})
    assert executor.executed == []


def test_running_run_is_stopped_when_the_budget_is_passed(tmp_path: Path) -> None:
    runs = small_runs(2)
    executor = PretendExecutor(hourly_usd=3600.0, wall_s=0.5)

    def lasts(run: PlannedRun) -> RunResult:
        assert executor.stopped.wait(300.0)
        return result_of(run, wall_s=0.5, usd=0.5, state="failed", exit_code=143, cause="stopped")

    executor._before = lasts
    with pytest.raises(BudgetError, match="the budget of USD 0.3 is spent"):
        conduct(runs, executor, tmp_path, budget=Budget(usd=0.3))
    assert executor.executed == [runs[0].run_id]
    assert read_results(runs, tmp_path) == []
    again = PretendExecutor(hourly_usd=3600.0, wall_s=0.5)
    results = conduct(runs, again, tmp_path, budget=Budget(usd=5))  # a stopped run runs again
    assert [result.state for result in results] == ["finished", "finished"]


def test_time_that_is_not_billed_does_not_spend_the_budget(tmp_path: Path) -> None:
    class Queueing(PretendExecutor):
        def billed_s(self, run: PlannedRun) -> float:
            return 0.0

    executor = Queueing(hourly_usd=3600.0, wall_s=0.01)
    executor._before = lambda run: None if not executor.stopped.wait(0.2) else pytest.fail("it was stopped")
    assert len(conduct(small_runs(1), executor, tmp_path, budget=Budget(usd=0.1))) == 1


def test_budget_in_usd_without_prices_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a budget in USD needs the prices of all hosts"):
        conduct(small_runs(1), PretendExecutor(hourly_usd=None), tmp_path, budget=Budget(usd=1))


def test_at_most_so_many_runs_execute_at_once(tmp_path: Path) -> None:
    lock, both = threading.Lock(), threading.Barrier(2)
    running: list[int] = []
    most: list[int] = []

    def before(run: PlannedRun) -> None:
        with lock:
            running.append(1)
            most.append(len(running))
        both.wait(300.0)  # two runs meet here, so both execute
        with lock:
            running.pop()

    results = conduct(small_runs(6), PretendExecutor(max_parallel=2, before=before), tmp_path)
    assert len(results) == 6
    assert max(most) == 2


def test_runs_beside_one_that_cannot_be_executed_end_normally(tmp_path: Path) -> None:
    is_logged = threading.Event()

    def before(run: PlannedRun) -> None:
        if run.run_id.startswith("000"):
            is_logged.set()
            raise ConfigError("its job is lost")
        assert is_logged.wait(300.0)
        assert not executor.stopped.wait(0.1)

    runs = small_runs(3)
    executor = PretendExecutor(max_parallel=2, before=before)
    with pytest.raises(ConfigError, match="its job is lost"):
        conduct(runs, executor, tmp_path)
    assert sorted(executor.executed) == [run.run_id for run in runs[:2]]
    assert [result.run_id for result in read_results(runs, tmp_path)] == [runs[1].run_id]


def test_parallel_runs_do_not_pass_the_budget_together(tmp_path: Path) -> None:
    runs = small_runs(4)
    executor = PretendExecutor(max_parallel=4)
    stated = {run.run_id: 10.0 for run in runs}
    with pytest.raises(BudgetError):
        conduct(runs, executor, tmp_path, budget=Budget(usd=0.025), expected_s=stated)
    assert len(executor.executed) == 2


def test_interrupt_stops_the_run_and_is_recorded(tmp_path: Path) -> None:
    runs = small_runs(2)
    executor = PretendExecutor()

    def ends_when_stopped(run: PlannedRun) -> RunResult:
        assert executor.stopped.wait(300.0)
        return result_of(run, state="failed", exit_code=143)

    def interrupts(progress: Progress) -> None:
        raise KeyboardInterrupt

    executor._before = ends_when_stopped
    with pytest.raises(KeyboardInterrupt):
        conduct(runs, executor, tmp_path, on_progress=interrupts)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert (lines[-1]["state"], lines[-1]["cause"]) == ("stopped", "the study was interrupted")


def test_progress_states_what_is_left(tmp_path: Path) -> None:
    runs = small_runs(3)
    found: list[Progress] = []
    conduct(runs, PretendExecutor(), tmp_path, on_progress=found.append, expected_s={runs[0].run_id: 20.0})
    begun, ended, *_, last = found
    assert (begun.result, begun.left_s, begun.num_unknown) == (None, 20.0, 2)
    assert (ended.num_done, ended.num_total, ended.left_s, ended.num_unknown) == (1, 3, 20.0, 0)  # 2 runs of 10 s
    assert ended.left_usd == pytest.approx(0.02)
    assert (last.num_done, last.left_s, last.left_usd) == (3, 0, 0)


def test_result_is_read_back_with_its_report_and_its_levels(tmp_path: Path) -> None:
    (run,) = small_runs(1)
    found = LoggedMetric(name="loss", value=2.0, at_s=50.0)
    report = report_of(f1=0.5)

    def before(run: PlannedRun) -> RunResult:
        folder = tmp_path / "runs" / run.run_id
        (folder / "report.json").write_text(json_text(report))
        metrics = (found, *report.run.metrics)
        return result_of(run, report=report, metrics=metrics, phases={"compute": 3.0}, levels={})

    results = conduct([run], PretendExecutor(before=before), tmp_path)
    assert results == read_results([run], tmp_path)
    assert results[0].report == report
    assert results[0].levels == run.levels
    assert [value.name for value in results[0].metrics] == ["loss", "f1"]
    assert "f1" not in (tmp_path / "runs.jsonl").read_text()  # the report has it


def test_second_study_in_the_same_folder_is_rejected(tmp_path: Path) -> None:
    def before(run: PlannedRun) -> None:
        with pytest.raises(ConfigError, match="another study writes to"):
            conduct(small_runs(1), PretendExecutor(), tmp_path)

    conduct(small_runs(1), PretendExecutor(before=before), tmp_path)


def test_folder_that_cannot_be_written_to_is_an_error_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").symlink_to(tmp_path / "none" / "runs.jsonl")
    with pytest.raises(ConfigError, match="cannot write to .*runs.jsonl: No such file(.|\n)*another --output-dir"):
        conduct(small_runs(1), PretendExecutor(), tmp_path)
    (tmp_path / "runs.jsonl").unlink()
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match="cannot write to .*: Not a directory"):
        conduct(small_runs(1), PretendExecutor(), tmp_path)


def test_ledger_keeps_the_last_value_of_a_long_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.decide.studies.ledger.MAX_METRICS", 10)
    metrics = tuple(LoggedMetric(name="loss", value=float(at), at_s=at) for at in range(100))
    executor = PretendExecutor(before=lambda run: result_of(run, metrics=metrics))
    (result,) = conduct(small_runs(1), executor, tmp_path)
    assert (result.metrics[0].value, result.metrics[-1].value) == (0, 99)


def test_fresh_forgets_earlier_runs_unless_a_study_executes_them(tmp_path: Path) -> None:
    runs = small_runs(2)

    def before(run: PlannedRun) -> None:
        (tmp_path / "runs" / run.run_id / "job.json").write_text("{}")
        content = (tmp_path / "runs.jsonl").read_bytes()
        with pytest.raises(ConfigError, match="another study writes to"):
            conduct(runs, PretendExecutor(), tmp_path, fresh=True)
        assert (tmp_path / "runs.jsonl").read_bytes() == content

    conduct(runs, PretendExecutor(before=before), tmp_path, identity={"seed": 1})
    again = PretendExecutor()
    assert len(conduct(runs, again, tmp_path, identity={"seed": 2}, fresh=True)) == len(again.executed) == 2
    assert not list(tmp_path.glob("runs/*/job.json"))


@pytest.mark.parametrize("line", ["[]", "nothing", '{"kind": "ended"}', '{"kind": "other"}', "\\x00"])
def test_malformed_line_is_skipped(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    runs = small_runs(2)
    conduct(runs, PretendExecutor(), tmp_path)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    again = PretendExecutor()
    assert len(conduct(runs, again, tmp_path)) == 2
    assert again.executed == []
    assert "runs.jsonl, line 3 is malformed and is skipped" in caplog.text


def test_run_with_a_malformed_report_is_kept_without_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run,) = small_runs(1)
    conduct([run], PretendExecutor(), tmp_path)
    (tmp_path / "runs" / run.run_id / "report.json").write_text("{")
    (result,) = conduct([run], PretendExecutor(), tmp_path)
    assert (result.state, result.report) == ("finished", None)
    assert "is kept without its report" in caplog.text


@pytest.mark.parametrize("line", ["[]", "nothing", '{"kind": "ended"}', '{"kind": "other"}', '{"kind": "study"}'])
def test_malformed_ledger_is_rejected_with_its_line(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match="runs.jsonl, line 1: "):
        conduct(small_runs(1), PretendExecutor(), tmp_path)


def test_runs_with_the_same_name_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two runs have the same run_id"):
        conduct([*small_runs(1), *small_runs(1)], PretendExecutor(), tmp_path)


def test_results_of_a_study_that_has_not_run_are_an_error_and_block_nothing(tmp_path: Path) -> None:
    runs, folder = small_runs(1), tmp_path / "out"
    with pytest.raises(ConfigError, match="cannot read the ledger(.|\n)*run the study first"):
        read_results(runs, folder)
    assert not folder.exists()
    conduct(runs, PretendExecutor(), folder)  # without an identity
    assert len(conduct(runs, PretendExecutor(), folder, identity={"seed": 1})) == 1


def test_results_are_read_while_the_study_runs_without_a_change(tmp_path: Path) -> None:
    runs = small_runs(2)
    found: list[list[str]] = []

    def before(run: PlannedRun) -> None:
        ledger = tmp_path / "runs.jsonl"
        content = ledger.read_bytes() + b'{"kind": "en'  # a line that is being written
        ledger.write_bytes(content)
        found.append([result.run_id for result in read_results(runs, tmp_path)])
        assert ledger.read_bytes() == content
        ledger.write_bytes(content[:-12])

    conduct(runs, PretendExecutor(before=before), tmp_path)
    assert found == [[], [runs[0].run_id]]


def test_budget_that_is_spent_is_the_one_that_is_named(tmp_path: Path) -> None:
    budget = Budget(hours=100, usd=0.01)  # the first run costs USD 0.01
    with pytest.raises(BudgetError, match="the budget of USD 0.01 does not allow run 001"):
        conduct(small_runs(2), PretendExecutor(), tmp_path, budget=budget)


def test_run_that_takes_longer_than_expected_counts_with_its_elapsed_time(tmp_path: Path) -> None:
    runs = small_runs(2)

    class Two(PretendExecutor):
        def billed_s(self, run: PlannedRun) -> float:
            return 100.0

    executor = Two(max_parallel=2, wall_s=1.0)
    executor._before = lambda run: None if executor.stopped.wait(300.0) else pytest.fail("it was not stopped")
    budget = Budget(hours=100 / 3600)
    with pytest.raises(BudgetError, match="the budget of 0.0277778 h"):
        conduct(runs, executor, tmp_path, budget=budget, expected_s={run.run_id: 1.0 for run in runs})
    assert executor.executed == [runs[0].run_id]


def test_price_of_a_run_is_asked_for_once(tmp_path: Path) -> None:
    asked: list[str] = []

    class Priced(PretendExecutor):
        def hourly_usd(self, run: PlannedRun) -> float | None:
            asked.append(run.run_id)
            return 1.0

    runs = small_runs(3)
    conduct(runs, Priced(), tmp_path, on_progress=lambda progress: None, budget=Budget(usd=100))
    assert asked == [run.run_id for run in runs]
