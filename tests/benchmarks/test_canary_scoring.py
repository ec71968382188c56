"""What the benchmark of canary forecasts counts as right, on forecasts of points with known parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetero.decide.canary.forecast import forecast
from hetero.decide.canary.model import Candidate
from hetero.decide.canary.points import CanaryPoint
from tests.support.canary import FRACTIONS, memory, point

Load = Callable[[str], ModuleType]
FACTS = {"date": "2026-01-01", "commit": "abc"}


def points(exponent: float = 1.0) -> tuple[CanaryPoint, ...]:
    """Return three canaries of each fraction, of a job of 100 s that needs 500 MB and 2 GB for its data."""
    return tuple(
        point(
            fraction,
            replicate,
            100 * fraction**exponent * (1 + 0.01 * (replicate - 2)),
            resources=memory(5e8, 2e9, fraction),
        )
        for fraction in FRACTIONS
        for replicate in (1, 2, 3)
    )


def whole(**more: Any) -> CanaryPoint:
    return replace(point(1.0, 1, 100.0, resources=memory(5e8, 2e9, 1.0)), **more)


def outcome_of(load: Load, own: Sequence[CanaryPoint], actual: CanaryPoint, **job: Any) -> Any:
    job_type = load("canary_jobs.jobs").Job
    shown = forecast(Candidate(name="1 x a", groups=("trainer=a:1",), points=tuple(own))).candidate
    return load("canary_jobs.scoring").Outcome(
        job=job_type(name="some", about="", script="train_gbt.py", **job),
        shown=shown,
        actual=actual,
        stamp=FACTS,
    )


def test_refusal_counts_only_by_a_rule_that_knows_why(load: Load) -> None:
    curved = points(exponent=2.0)
    assert not outcome_of(load, curved, whole(), refused_by=("curved",)).is_missed
    crashed = tuple(replace(each, failure="exit code 1") for each in curved)
    by_crash = outcome_of(load, crashed, whole(), refused_by=("curved",))
    assert by_crash.rules == ("failed", "too-few")
    assert by_crash.is_missed
    assert outcome_of(load, points(), whole(), refused_by=("curved",)).is_missed  # not refused at all
    assert not outcome_of(load, crashed, whole()).is_missed  # a job that need not be refused


def test_whole_that_fails_is_unexpected_except_for_memory_with_a_limit(load: Load) -> None:
    lacks = whole(failure="trainer-0: MemoryError")
    limited = {"args": ("--limit-mib", "1700")}
    assert outcome_of(load, points(), lacks, **limited).job.limit_mib == 1700
    assert not outcome_of(load, points(), lacks, **limited).failed_unexpectedly
    assert outcome_of(load, points(), lacks).failed_unexpectedly
    assert outcome_of(load, points(), whole(failure="exit code 1"), **limited).failed_unexpectedly
    text = load("canary_jobs.rendering").render([outcome_of(load, points(), lacks)], [], [])
    assert "wholes that failed unexpectedly (some), of 1: 1.000, at most 0 wanted: **MISSED**" in text
    assert "jobs that ran out of memory unforeseen, of 1: 1.000, at most 0 wanted: **MISSED**" in text


def test_memory_forecast_is_judged_against_limits_around_the_actual_peak(load: Load) -> None:
    scoring = load("canary_jobs.scoring")
    right = scoring.judged_limits(outcome_of(load, points(), whole()))
    assert [each.share for each in right] == [0.7, 0.85, 1.15, 1.3]
    assert [each.is_wrong for each in right] == [False] * 4
    needs_half = whole(resources=memory(5e8, 0.75e9, 1.0))  # 1.25 GB; 2.5 GB were forecast
    too_high = scoring.judged_limits(outcome_of(load, points(), needs_half))
    assert [each.is_wrong for each in too_high] == [False, False, True, True]
    assert scoring.judged_limits(outcome_of(load, points(), whole(failure="exit code 1"))) == []


def test_tables_show_the_error_of_a_refused_job_and_every_figure(load: Load) -> None:
    rendering = load("canary_jobs.rendering")
    outcomes = [
        outcome_of(load, points(), whole()),
        outcome_of(load, points(exponent=2.0), whole(), refused_by=("curved",)),
    ]
    pair = {
        "name": "a or b",
        "clusters": ["a", "b"],
        "forecast_usd": [1.0, None],
        "actual_usd": [0.1, 2.0],
        "decision": "a",
        "probability": 0.95,
        "actual": "",
        "failure": "exit code 1",
    }
    text = rendering.render(outcomes, [pair], [])
    assert "| curved | -" in text
    assert "jobs that must be refused and were not, or by no rule that knows why, of 1: 0.000, at most 0" in text
    assert "jobs that ran out of memory unforeseen, of 0: not measured" in text
    assert "| 0.7 | yes | 0 | 0 | 0 | 2 | 0 of 2 |" in text
    assert "pairs with a whole that failed, of 1: 1.000, at most 0 wanted: **MISSED**" in text
    assert "pairs decided wrongly, of 0 decided: 0.000" in text


def test_known_zero_is_not_taken_for_unknown(load: Load) -> None:
    assert load("canary_jobs.rendering").known(0.0) == 0.0


@pytest.mark.parametrize("broken", [{"time_s": None, "refused": []}, {"time_s": 90.0, "refused": ["noise"]}])
def test_repeated_forecasts_without_a_time_or_refused_are_counted(load: Load, broken: dict[str, Any]) -> None:
    lines = load("canary_jobs.rendering").repeated_lines
    good = [{"job": "some", "time_s": 100.0 + number, "refused": []} for number in range(5)]
    assert "spread of the repeated forecasts, (highest - lowest) / median: 0.039" in lines(good)[-1]
    counted, spread = lines([*good[:4], {"job": "some", **broken}])[-2:]
    assert "repeated forecasts that were refused, of 5: 1.000, at most 0 wanted: **MISSED**" in counted
    assert spread.endswith("not measured")


def test_folders_of_runs_and_data_depend_on_what_was_measured(load: Load, tmp_path: Path) -> None:
    execution, jobs, makers = (load(f"canary_jobs.{name}") for name in ("execution", "jobs", "data"))
    files = partial(makers.float_files, number=2, rows=3, columns=4)
    job = jobs.Job(name="some", about="", script="train_gbt.py", args=("--a", "1"), make=files)
    others = [
        replace(job, args=("--a", "2")),
        replace(job, script="tokenise.py"),
        replace(job, make=partial(makers.float_files, number=2, rows=3, columns=5)),
        replace(job, groups=("trainer=b:2",)),
    ]
    folders = [execution.folder_of("some", each, tmp_path, 1.0) for each in (job, *others)]
    assert len(set(folders)) == 5
    assert folders[0] == execution.folder_of("some", replace(job, about="other words"), tmp_path, 1.0)
    assert execution.data_of(job, tmp_path, 1.0) == execution.data_of(others[0], tmp_path, 1.0)
    assert execution.data_of(job, tmp_path, 1.0) != execution.data_of(others[2], tmp_path, 1.0)
    assert execution.stamp_of(folders[0], FACTS) == FACTS
    assert execution.stamp_of(folders[0], {"date": "2027-01-01", "commit": "def"}) == FACTS  # of the first run


@pytest.mark.parametrize(("limit", "is_kept"), [((), False), (("--limit-mib", "1700"), True)])
def test_failed_whole_is_kept_only_of_a_job_with_a_limit(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: tuple[str, ...], is_kept: bool
) -> None:
    execution, jobs = load("canary_jobs.execution"), load("canary_jobs.jobs")
    found = [whole(failure="exit code 1"), whole()]
    monkeypatch.setattr(execution, "whole", lambda *_, **__: found.pop(0))
    job = jobs.Job(name="some", about="", script="train_gbt.py", args=limit)
    for _ in range(2):
        last = execution.kept_whole(job, tmp_path / "whole", data=None, scale=1.0)
    assert bool(last.failure) is is_kept


def test_rules_that_jobs_name_exist(load: Load) -> None:
    model = load("hetero.decide.canary.model")
    named = {rule for job in load("canary_jobs.jobs").JOBS for rule in job.refused_by}
    assert named <= set(model.RULES)
    assert sum(bool(job.refused_by) for job in load("canary_jobs.jobs").JOBS) == 4


def test_runs_are_in_a_new_folder_that_is_removed_unless_one_is_named(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("bench_canary")
    used: list[Path] = []
    monkeypatch.setattr(bench, "HERE", tmp_path)
    monkeypatch.setattr(bench, "measure", lambda args, work: used.append(work))
    for argv in ([], [], ["--work", str(tmp_path)]):
        assert bench.main(argv) == 0
    assert len(set(used)) == 3
    assert [work.exists() for work in used] == [False, False, True]
