"""A run that carries its plan: the report compares them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hetero.decide.planning.options import PlanOptions
from hetero.decide.planning.plan import make_plan
from hetero.documents.records import decode, json_text
from hetero.metrics.figures import Figure
from hetero.metrics.steps import StepSummary, StepTimer
from hetero.pricing.catalog import Catalogue
from hetero.report import GroupFacts, Report, RunFacts, build_report, render_report
from hetero.report.model import Expectation, RankFacts
from hetero.report.plan import PlannedGroup
from tests.support.planning import make_profile


def summary(step_s: float) -> StepSummary:
    """Return the figures of 30 steps of a timer whose clock and accelerator are stated."""
    now = 0.0

    def clock() -> float:
        return now

    timer = StepTimer("photos", warmup_steps=5, clock=clock)
    for _ in range(30):
        timer.begin_wait()
        timer.end_wait(64)
        now += step_s
    return timer.summary()


def run(step_s: float | None, expectation: Expectation | None, **changes: object) -> RunFacts:
    loaders = () if step_s is None else (dataclasses.replace(summary(step_s), **changes),)  # type: ignore[arg-type]
    return RunFacts(
        run_id="job",
        command="train.py",
        started_at="2026-11-23T10:00:00+00:00",
        wall_s=100.0,
        exit_code=0,
        placement="heterogeneous",
        groups=(GroupFacts(name="trainer", role="trainer", instance_type="ml.p3.2xlarge", count=1),),
        ranks=(RankFacts(rank=0, host="algo-1", loaders=loaders),),
        expectation=expectation,
    )


EXPECTATION = Expectation(step_time_s=0.2, step_time_low_s=0.19, step_time_high_s=0.22, usd_per_1k_steps=0.25)


def test_report_of_a_planned_run_says_how_far_the_plan_was(catalogue: Catalogue) -> None:
    report = build_report(run(0.21, EXPECTATION), catalogue)
    assert report.plan_error == Figure(value=pytest.approx(0.2 / 0.21 - 1), unit="1", basis="measured")
    text = render_report(report)
    assert "4.8 % less than the 210 ms of the run, which is inside the interval" in text
    assert "It expected USD 0.25 per 1,000 steps. The run took USD 0.2231" in text
    assert decode(Report, json.loads(json_text(report))) == report


def test_report_of_a_planned_run_outside_the_interval_says_so(catalogue: Catalogue) -> None:
    assert "which is outside the interval" in render_report(build_report(run(0.3, EXPECTATION), catalogue))


def test_report_of_a_planned_run_with_real_work_that_shows_does_not_say_outside_alone(catalogue: Catalogue) -> None:
    text = render_report(build_report(run(0.3, EXPECTATION, step_wait_s=0.2), catalogue))
    assert "above the interval, and perhaps not without this machine's other work (200 ms or more)" in text
    assert "without it, the mean step time is at least 200 ms" in text


def test_report_of_a_planned_run_says_that_it_is_inside_with_real_work_alone(catalogue: Catalogue) -> None:
    text = render_report(build_report(run(0.21, EXPECTATION, step_wait_s=0.1), catalogue))
    assert "inside the interval, and perhaps not without this machine's other work (100 ms or more)" in text


def test_report_of_a_run_as_planned_is_inside_the_interval(catalogue: Catalogue) -> None:
    text = render_report(build_report(run(0.2, EXPECTATION), catalogue))
    assert "of 200 ms (190 ms to 220 ms), 0.0 % less than the 200 ms of the run, which is inside" in text


def test_report_of_a_planned_run_without_steps_has_no_error(catalogue: Catalogue) -> None:
    report = build_report(run(None, EXPECTATION), catalogue)
    assert report.plan_error is None
    assert "The run measured no step." in render_report(report)


def test_report_without_a_plan_has_no_section(catalogue: Catalogue) -> None:
    assert "## Plan" not in render_report(build_report(run(0.2, None), catalogue))


def test_plan_finds_the_cluster_of_a_job_by_its_types(catalogue: Catalogue, tmp_path: Path) -> None:
    profile = make_profile(headspace_s=0.18, cpu_s=0.15)
    plan = make_plan(profile, catalogue, PlanOptions(menu=("ml.c5.9xlarge",)))
    groups = (
        PlannedGroup(name="gpu", role="trainer", instance_type="ml.p3.2xlarge", count=1),
        PlannedGroup(name="cpu", role="data", instance_type="ml.c5.9xlarge", count=1),
    )
    found = plan.cluster_of(groups, plan.chosen.local_endpoints)
    assert found == plan.chosen
    assert plan.cluster_of(groups, plan.chosen.local_endpoints + 1) is None
    assert plan.cluster_of(groups, None) == found, "a job that chooses the number itself"
    assert plan.cluster_of(groups[:1], 0) == plan.baseline
    other = (groups[0], PlannedGroup(name="cpu", role="data", instance_type="ml.c5.18xlarge", count=1))
    assert plan.cluster_of(other, 0) is None
