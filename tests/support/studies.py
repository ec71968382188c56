"""Studies, runs and reports for tests, and an executor that runs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetero.decide.studies.plan import StudyPlan, plan_study
from hetero.decide.studies.runs import PlannedRun, RunResult
from hetero.decide.studies.study_file import Study, parse_study
from hetero.documents.records import encode
from hetero.metrics.logged import LoggedMetric
from hetero.pricing import Catalogue
from hetero.report import GroupFacts, Report, RunFacts, build_report

PRICED = Catalogue.load(profile="seed-2022")
CLUSTERS = {
    "1 GPU": {"groups": ["trainer=ml.p3.2xlarge:1"]},
    "4 GPUs": {"groups": ["trainer=ml.p3.8xlarge:1"]},
    "8 GPUs": {"groups": ["trainer=ml.p3.16xlarge:1"]},
    "16 GPUs": {"groups": ["trainer=ml.p3.16xlarge:2"]},
    "32 GPUs": {"groups": ["trainer=ml.p3.16xlarge:4"]},
}
"""The clusters of the source's Table 1."""
SOURCE = {
    "name": "text scaling",
    "script": "train.py",
    "args": ["--epochs", "{epochs}", "--learning-rate", "{learning_rate}", "--samples", "{samples}"],
    "factors": {"cluster": CLUSTERS, "samples": [100_000, 600_000, 1_000_000]},
    "constraints": {
        "fix": "steps",
        "train_share": 0.9,
        "steps": 84_375,
        "batch_per_device": 32,
        "learning_rate": "5e-5",
    },
    "order": "given",
}
"""The source's study as a file."""


def study_of(changes: Mapping[str, Any] | None = None, *, path: str = "STUDY.yaml") -> Study:
    """Return the source's study with changes."""
    return parse_study({**SOURCE, **(changes or {})}, Path(path))


def plan_of(changes: Mapping[str, Any] | None = None) -> StudyPlan:
    """Return the plan of the source's study with changes."""
    return plan_study(study_of(changes), PRICED)


def small_runs(number: int) -> list[PlannedRun]:
    """Return runs that differ by one level."""
    return [
        PlannedRun(
            run_id=f"{at:03d}-samples={at}-r1",
            levels={"samples": at, "ranks": 1},
            script="train.py",
            groups=("trainer=ml.p3.2xlarge:1",),
        )
        for at in range(number)
    ]


def report_of(*, wall_s: float = 100.0, **metrics: float) -> Report:
    """Return the report of a run that logged one value of each metric at its end."""
    logged = tuple(LoggedMetric(name=name, value=value, at_s=wall_s, unix_s=1e9) for name, value in metrics.items())
    facts = RunFacts(
        run_id="run",
        command="train.py",
        started_at="2026-03-01T12:00:00+00:00",
        wall_s=wall_s,
        exit_code=0,
        placement="homogeneous",
        groups=(GroupFacts(name="trainer", role="trainer", instance_type="ml.p3.2xlarge", count=1),),
        metrics=logged,
    )
    return build_report(facts, PRICED)


def report_document(**metrics: float) -> dict[str, object]:
    """Return such a report as JSON values."""
    return encode(report_of(**metrics))


def result_of(run: PlannedRun, *, wall_s: float = 10.0, **changes: Any) -> RunResult:
    """Return the result of a run that finished."""
    values: dict[str, Any] = {
        "run_id": run.run_id,
        "state": "finished",
        "exit_code": 0,
        "started_at": "2026-03-01T12:00:00+00:00",
        "wall_s": wall_s,
        "usd": wall_s * 3.6 / 3600,
        "levels": run.levels,
    }
    return RunResult(**values | changes)


class PretendExecutor:
    """Runs nothing: each run takes ``wall_s`` at once. ``before`` may raise, or return another result."""

    def __init__(
        self,
        *,
        wall_s: float = 10.0,
        hourly_usd: float | None = 3.6,
        max_parallel: int = 1,
        before: Callable[[PlannedRun], RunResult | None] = lambda run: None,
    ) -> None:
        self.max_parallel = max_parallel
        self.executed: list[str] = []
        self.stopped = threading.Event()
        self._wall_s = wall_s
        self._hourly_usd = hourly_usd
        self._before = before

    def hourly_usd(self, run: PlannedRun) -> float | None:
        return self._hourly_usd

    def execute(self, run: PlannedRun, folder: Path) -> RunResult:
        assert folder.is_dir()
        self.executed.append(run.run_id)
        usd = None if self._hourly_usd is None else self._wall_s * self._hourly_usd / 3600
        return self._before(run) or result_of(run, wall_s=self._wall_s, usd=usd)

    def stop(self) -> None:
        self.stopped.set()
