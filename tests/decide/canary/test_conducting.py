"""The runs of a study: links, failures, budgets, prices, and starts at the same time. The jobs are functions."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero.decide.canary import conducting
from hetero.decide.canary.conducting import execute_canaries, run_canaries
from hetero.decide.canary.design import CanaryRequest, Cluster
from hetero.decide.canary.forecast import ForecastOptions
from hetero.decide.canary.identity import digest_of_modules
from hetero.decide.canary.model import load_canary
from hetero.decide.studies.conduct import Progress
from hetero.decide.studies.ledger import Ledger
from hetero.decide.studies.runs import FAILED, FINISHED, Billing, PlannedRun, RunResult
from hetero.decide.studies.study_file import Budget
from hetero.errors import BudgetError, ConfigError
from hetero.pricing import Catalogue

SMALL, LARGE = (Cluster(groups=(f"trainer=ml.m5.{size}:1",)) for size in ("large", "24xlarge"))


class Jobs:
    """Executes runs at once. A run takes 100 s for each file, and may fail."""

    max_parallel = 1

    def __init__(self, fails: Callable[[PlannedRun], bool] = lambda run: False) -> None:
        self.runs: list[PlannedRun] = []
        self.is_stopped = False
        self._fails = fails

    def hourly_usd(self, run: PlannedRun) -> float | None:
        return 1.0

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        self.runs.append(run)
        num_files = len(list(Path(run.channels["training"]).iterdir()))
        is_bad = self._fails(run)
        return RunResult(
            run_id=run.run_id,
            state=FAILED if is_bad else FINISHED,
            exit_code=int(is_bad),
            cause="CUDA out of memory" if is_bad else "",
            started_at="2026-01-01T00:00:00+00:00",
            wall_s=10 + 100.0 * num_files,
            usd=(10 + 100.0 * num_files) / 3600,
        )

    def stop(self) -> None:
        self.is_stopped = True


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.decide.studies.conduct._LOOK_INTERVAL_S", 0.01)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for index in range(200):
        (folder / f"{index:03d}.csv").write_bytes(b"x" * 1000)
    return folder


def run(jobs: Jobs, data: Path, folder: Path, *, request: dict[str, Any] | None = None, **more: Any) -> Any:
    made = CanaryRequest(script="train.py", **{"clusters": (SMALL,), "channels": {"training": data}, **(request or {})})
    return run_canaries(made, folder, executor=jobs, catalogue=Catalogue.load(), is_cold=False, **more)


def test_second_start_runs_nothing_and_does_not_touch_the_links(data: Path, tmp_path: Path) -> None:
    jobs = Jobs()
    first = run(jobs, data, tmp_path / "out")
    assert len(jobs.runs) == 9
    written = Path(jobs.runs[0].channels["training"]) / "cache.bin"
    written.write_text("of the script")
    assert run(jobs, data, tmp_path / "out") == first
    assert len(jobs.runs) == 9
    assert written.read_text() == "of the script"


def test_after_a_run_that_fails_no_more_begin_and_the_cause_is_reported(data: Path, tmp_path: Path) -> None:
    jobs = Jobs(lambda run: len(jobs.runs) == 2)
    (shown,) = run(jobs, data, tmp_path / "out").candidates
    assert len(jobs.runs) == 2
    assert "CUDA out of memory" in next(each.reason for each in shown.refusals if each.rule == "failed")
    assert run(jobs, data, tmp_path / "out").candidates[0].refusals == ()  # it runs again
    assert len(jobs.runs) == 10


def test_failure_ends_only_the_runs_of_its_cluster(data: Path, tmp_path: Path) -> None:
    jobs = Jobs(lambda run: run.groups == SMALL.groups)
    small, large = run(jobs, data, tmp_path / "out", request={"clusters": (SMALL, LARGE)}).candidates
    assert [each.groups for each in jobs.runs].count(SMALL.groups) == 1
    assert (len(small.points), len(large.points)) == (1, 9)
    assert not large.refused("time")


def test_accepted_failures_do_not_end_the_study(data: Path, tmp_path: Path) -> None:
    jobs = Jobs(lambda run: len(jobs.runs) == 2)
    (shown,) = run(jobs, data, tmp_path / "out", options=ForecastOptions(accept=("failed",))).candidates
    assert len(jobs.runs) == 9
    assert not shown.refused("time")


def test_budget_that_ends_the_study_leaves_a_forecast(data: Path, tmp_path: Path) -> None:
    jobs = Jobs()
    with pytest.raises(BudgetError, match=r"--budget-hours and start again") as caught:
        run(jobs, data, tmp_path / "out", budget=Budget(hours=2500 / 3600))
    assert "canary.md has the forecast" in str(caught.value)
    assert int(caught.value.exit_code) == 26
    (shown,) = load_canary(tmp_path / "out").candidates
    assert 4 <= len(shown.points) < 9
    assert shown.figure("time") is not None


def test_interrupted_study_leaves_a_forecast_and_goes_on(data: Path, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.num_done == 5:
            raise KeyboardInterrupt

    jobs = Jobs()
    with pytest.raises(KeyboardInterrupt):
        run(jobs, data, tmp_path / "out", on_progress=interrupt)
    assert jobs.is_stopped
    (shown,) = load_canary(tmp_path / "out").candidates
    assert len([point for point in shown.points if not point.failure]) == 5
    assert shown.figure("time") is not None
    (shown,) = run(Jobs(), data, tmp_path / "out").candidates
    assert len(shown.points) == 9


def test_fresh_start_does_not_destroy_a_study_that_runs(data: Path, tmp_path: Path) -> None:
    run(Jobs(), data, tmp_path / "out")
    content = (tmp_path / "out" / "runs.jsonl").read_bytes()
    with Ledger(tmp_path / "out"), pytest.raises(ConfigError, match="another .* writes to"):
        run(Jobs(), data, tmp_path / "out", fresh=True)
    assert (tmp_path / "out" / "runs.jsonl").read_bytes() == content
    jobs = Jobs()
    run(jobs, data, tmp_path / "out", fresh=True)
    assert len(jobs.runs) == 9


def test_price_that_is_added_later_needs_no_new_runs(data: Path, tmp_path: Path) -> None:
    jobs = Jobs()
    run(jobs, data, tmp_path / "out", request={"options": {"warmup_steps": "3"}})
    priced = {"warmup_steps": "3", "prices": ("ml.m5.large=1",), "region": "us-east-1"}
    run(jobs, data, tmp_path / "out", request={"options": priced})
    assert len(jobs.runs) == 9
    run(jobs, data, tmp_path / "new", request={"options": priced})
    assert jobs.runs[-1].options == priced  # the reports of the runs have costs


def test_memory_of_a_type_without_hosts_is_rejected(data: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--memory ml.m5.huge: no candidate has such hosts; expected one of ml.m5.la"
    ):
        run(Jobs(), data, tmp_path / "out", memory_gib={"ml.m5.huge": 16.0})


def test_speed_of_a_type_without_hosts_is_rejected(data: Path, tmp_path: Path) -> None:
    request = {"as_fast_as": frozenset({"ml.m5.larg"})}
    with pytest.raises(
        ConfigError, match=r"--as-fast-as ml.m5.larg: no candidate has such hosts; expected one of ml.m5"
    ):
        run(Jobs(), data, tmp_path / "out", request=request)


def test_note_names_the_types_whose_speed_is_not_stated() -> None:
    assert "give --as-fast-as TYPE for a and b." in conducting._note("Costs are not known.", "a and b")


def test_share_of_samples_is_the_real_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hetero.decide.canary.design import PlannedCanary
    from tests.support.canary import point, work

    loaders = (
        work(0.01, dataset_samples=50, pass_samples=1),
        work(0.01, dataset_samples=1000, pass_samples=12),
        work(0.01),
    )
    made = PlannedRun(run_id="r", levels={}, script="t", environment={"HETERO_CANARY_DIR": str(tmp_path)})
    planned = PlannedCanary(run=made, cluster=SMALL, fraction=0.01)
    result = Jobs().execute(
        PlannedRun(run_id="r", levels={}, script="t", channels={"training": str(tmp_path)}), tmp_path
    )
    monkeypatch.setattr(conducting, "point_of", lambda *_, **__: point(0.01, 1, 5.0, loaders=loaders))
    assert conducting._point(planned, result, by_samples=True).fraction == 0.012
    assert conducting._point(planned, result, by_samples=False).fraction == 0.01
    monkeypatch.setattr(conducting, "point_of", lambda *_, **__: point(0.01, 1, 5.0))
    assert conducting._point(planned, result, by_samples=True).fraction == 0.01


def test_ledger_has_the_failure(data: Path, tmp_path: Path) -> None:
    run(Jobs(lambda run: True), data, tmp_path / "out")
    lines = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines if line["kind"] == "ended"] == ["failed"]


def test_other_runs_end_normally_if_one_fails(data: Path, tmp_path: Path) -> None:
    both_run, is_recorded = threading.Barrier(2), threading.Event()

    class Two(Jobs):
        max_parallel = 2

        def execute(self, run: PlannedRun, folder: Path) -> RunResult:
            both_run.wait(300)
            if run.groups == LARGE.groups and not is_recorded.wait(300):
                raise AssertionError("the failure was not recorded")
            return super().execute(run, folder)

    def note(progress: Progress) -> None:
        if progress.result is not None and progress.result.state == FAILED:
            is_recorded.set()

    jobs = Two(lambda run: run.groups == SMALL.groups)
    runs = [
        PlannedRun(run_id=name, levels={}, script="t", groups=cluster.groups, channels={"training": str(data)})
        for name, cluster in (("a", SMALL), ("b", LARGE), ("c", SMALL))
    ]
    results, _ = execute_canaries(
        runs, jobs, tmp_path / "out", budget=Budget(), on_progress=note, identity={}, accepts_failures=False
    )
    assert {result.run_id: result.state for result in results} == {"a": FAILED, "b": FINISHED}
    assert not jobs.is_stopped


def planned_runs(data: Path, *clusters: Cluster) -> list[PlannedRun]:
    return [
        PlannedRun(run_id=name, levels={}, script="t", groups=cluster.groups, channels={"training": str(data)})
        for name, cluster in zip("abc", clusters, strict=False)
    ]


def test_wait_for_hosts_does_not_spend_the_budget(data: Path, tmp_path: Path) -> None:
    class Queueing(Jobs):
        is_seen = False

        def billed_s(self, run: PlannedRun) -> float:
            self.is_seen = True
            return 0.0

        def execute(self, run: PlannedRun, folder: Path) -> RunResult:
            threading.Event().wait(0.1)  # the wait, which is longer than the budget
            return super().execute(run, folder)

    jobs = Queueing()
    budget, runs = Budget(hours=0.05 / 3600), planned_runs(data, SMALL)
    _, over = execute_canaries(
        runs, jobs, tmp_path, budget=budget, on_progress=None, identity={}, accepts_failures=False
    )
    assert (over, jobs.is_stopped, jobs.is_seen) == (None, False, True)
    request = CanaryRequest(script="train.py", clusters=(SMALL,), channels={"training": data})
    for inner, is_billing in ((jobs, True), (Jobs(), False)):
        preparing = conducting._PreparingExecutor(inner, [], request, tmp_path, is_cold=False)
        assert isinstance(preparing, Billing) == is_billing


def test_budget_stops_the_other_runs_after_one_failed(data: Path, tmp_path: Path) -> None:
    were_stopped: list[bool] = []

    class Two(Jobs):
        max_parallel = 2
        stopped = threading.Event()

        def execute(self, run: PlannedRun, folder: Path) -> RunResult:
            if run.groups == LARGE.groups:
                were_stopped.append(self.stopped.wait(300))
            return super().execute(run, folder)

        def stop(self) -> None:
            self.stopped.set()

    jobs = Two(lambda run: run.groups == SMALL.groups)
    runs = planned_runs(data, SMALL, LARGE)
    # The run that fails takes 20010 s.
    budget = Budget(hours=(20010 + 0.2) / 3600)
    _, over = execute_canaries(
        runs, jobs, tmp_path, budget=budget, on_progress=None, identity={}, accepts_failures=False
    )
    assert were_stopped == [True]
    assert over is not None


def test_second_run_that_fails_meanwhile_is_recorded_as_failed(data: Path, tmp_path: Path) -> None:
    both_run = threading.Barrier(2)

    class Two(Jobs):
        max_parallel = 2

        def execute(self, run: PlannedRun, folder: Path) -> RunResult:
            both_run.wait(300)
            return super().execute(run, folder)

    runs = planned_runs(data, SMALL, LARGE)
    results, _ = execute_canaries(
        runs, Two(lambda run: True), tmp_path, budget=Budget(), on_progress=None, identity={}, accepts_failures=False
    )
    assert [(result.state, result.cause) for result in results] == [(FAILED, "CUDA out of memory")] * 2


def test_files_of_channels_that_stay_whole_are_dropped_from_the_cache_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[set[str]] = []
    monkeypatch.setattr(conducting, "evict", lambda paths: dropped.append({path.name for path in paths}))
    labels = tmp_path / "labels"
    (labels / "deep").mkdir(parents=True)
    (labels / "deep" / "labels.csv").write_text("1")
    channels = {"training": data, "labels": labels}
    made = CanaryRequest(script="train.py", clusters=(SMALL,), channels=channels, whole_channels=frozenset({"labels"}))
    run_canaries(made, tmp_path / "out", executor=Jobs(), catalogue=Catalogue.load(), is_cold=True)
    assert len(dropped) == 2 * 9
    assert [len(each) for each in dropped].count(1) == 9
    assert {"labels.csv"} in dropped


def test_runs_with_another_cache_are_not_used(data: Path, tmp_path: Path) -> None:
    run(Jobs(), data, tmp_path / "out")
    made = CanaryRequest(script="train.py", clusters=(SMALL,), channels={"training": data})
    with pytest.raises(ConfigError, match="cache"):
        run_canaries(made, tmp_path / "out", executor=Jobs(), catalogue=Catalogue.load(), is_cold=True)


def test_runs_with_other_files_that_every_run_gets_are_not_used(data: Path, tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.mkdir()
    (labels / "1.csv").write_text("1")
    (data / "names.json").write_text("1")
    channels = {"training": data, "labels": labels}
    request = {"channels": channels, "whole_channels": frozenset({"labels"}), "keep": ("*.json",)}
    run(Jobs(), data, tmp_path / "out", request=request)
    run(Jobs(), data, tmp_path / "out", request=request)
    (labels / "2.csv").write_text("1")
    with pytest.raises(ConfigError, match="bytes of files that every run gets"):
        run(Jobs(), data, tmp_path / "out", request=request)
    (labels / "2.csv").unlink()
    (data / "names.json").write_text("12345")
    with pytest.raises(ConfigError, match="bytes of files that every run gets"):
        run(Jobs(), data, tmp_path / "out", request=request)


def test_runs_with_another_module_of_the_script_are_not_used(data: Path, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "parts").mkdir(parents=True)
    script = code / "train.py"
    script.write_text("import json\nimport settings\nfrom parts import model\n")
    (code / "settings.py").write_text("PER = 10\n")
    (code / "parts" / "__init__.py").write_text("")
    (code / "parts" / "model.py").write_text("from .layers import Layer\n")
    (code / "parts" / "layers.py").write_text("Layer = 1\n")
    (code / "other.py").write_text("not imported\n")
    first = digest_of_modules(script)
    (code / "other.py").write_text("import still_not\n")
    assert digest_of_modules(script) == first
    (code / "parts" / "layers.py").write_text("Layer = 2\n")
    second = digest_of_modules(script)
    assert second != first
    request = {"script_path": script}
    run(Jobs(), data, tmp_path / "out", request=request)
    (code / "settings.py").write_text("PER = 100\n")
    with pytest.raises(ConfigError, match="content of its modules"):
        run(Jobs(), data, tmp_path / "out", request=request)
