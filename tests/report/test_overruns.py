"""Bounds of a step time if real work took longer than emulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetero.metrics.hosts import HostUsage
from hetero.metrics.steps import StepSummary
from hetero.pricing import Catalogue
from hetero.report import RankFacts, RunFacts, build_report
from hetero.report.overruns import excess_share, least_step_time_s, upper_bounds_note

SummaryMaker = Callable[..., StepSummary]
LATE = {"milliseconds later than emulated": 4000}
"""Of 100 steps."""


@pytest.mark.parametrize(
    ("step_time_s", "utilisation", "emulated_s", "events", "least_s"),
    [
        (0.20, 1.0, 0.15, {}, 0.15),  # compute alone: a step takes the emulated time
        (0.20, 0.5, 0.10, {}, 0.20),  # no excess: 0.1 s of compute and 0.1 s of data wait
        (0.20, 0.5, 0.08, {}, 0.18),  # the excess of compute is subtracted, the data wait is not
        (0.20, 0.5, 0.10, LATE, 0.16),  # some vCPU was late for 0.04 s per step
        (0.20, 0.9, 0.18, LATE, 0.18),  # at most the whole data wait of 0.02 s
        (0.20, 0.5, None, LATE, 0.16),  # real compute counts in full
        (0.10, 1.0, 0.15, {}, 0.10),  # a summary that contradicts itself never gives more than was measured
    ],
)
def test_least_step_time_of_one_rank_is_the_time_without_the_excess(
    summary_of: SummaryMaker,
    step_time_s: float,
    utilisation: float,
    emulated_s: float | None,
    events: dict[str, int],
    least_s: float,
) -> None:
    summary = summary_of(step_time_s, utilisation, step_wait_s=emulated_s)
    assert least_step_time_s([summary], events) == pytest.approx(least_s)


def test_least_step_time_of_several_ranks_is_that_of_the_slowest(summary_of: SummaryMaker) -> None:
    ranks = [summary_of(0.2, 1.0, step_wait_s=0.1), summary_of(0.2, 0.5, step_wait_s=0.08)]
    assert least_step_time_s(ranks, {}) == pytest.approx(0.18)


def test_least_step_time_is_not_known_without_emulation_or_steps(summary_of: SummaryMaker) -> None:
    assert least_step_time_s([summary_of(0.2)], {}) is None
    assert least_step_time_s([summary_of(0.2, step_wait_s=0.1), summary_of(None, step_wait_s=0.1)], {}) is None
    assert least_step_time_s([], LATE) is None


def test_note_about_several_runs_names_those_whose_times_are_upper_bounds(
    make_facts: Callable[..., RunFacts], summary_of: SummaryMaker
) -> None:
    late = (RankFacts(rank=0, host="h", loaders=(summary_of(0.2, 1.0, step_wait_s=0.1),)),)
    reports = {
        name: build_report(make_facts(**changes), Catalogue.load())
        for name, changes in {"exact": {}, "late": {"ranks": late}, "none": {"ranks": ()}}.items()
    }
    assert upper_bounds_note(reports) == (
        "Other work of this machine shows in 1 of 3 runs, so their times are upper bounds: late (a step took "
        "200 ms, without it 100 ms or more)."
    )
    assert upper_bounds_note({"exact": reports["exact"]}) == ""
    many = {f"run {number}": reports["late"] for number in range(9)}
    assert upper_bounds_note(many).endswith("100 ms or more) and 1 more.")


@pytest.mark.parametrize(
    ("options", "others", "least_s"),
    [
        ({}, 0.4, 0.12),
        ({"emulate_sample_s": "None", "emulate_step_s": "0.1"}, 0.4, 0.12),
        ({}, 0.04, None),  # too little to matter
        ({"emulate_sample_s": "0.1", "emulate_step_s": "0.1"}, 0.4, None),  # emulated times need few CPUs
    ],
)
def test_step_time_beside_other_programs_is_an_upper_bound(
    make_facts: Callable[..., RunFacts],
    usage_of: Callable[..., HostUsage],
    options: dict[str, str],
    others: float,
    least_s: float | None,
) -> None:
    hosts = (usage_of("algo-1", cpu_others=others, cpu_pressure=0.9, cpu_stolen=0.0),)
    report = build_report(make_facts(step_time_s=0.2, hosts=hosts, options=options), Catalogue.load())
    assert report.headline is not None
    least = report.headline.step_time_least
    assert (None if least is None else least.value) == pytest.approx(least_s)
    assert excess_share(report) == pytest.approx(0.0 if least_s is None else others)
    note = upper_bounds_note({"busy": report})
    assert note.startswith("Other work of this machine shows in 1 of 1 run") == (least_s is not None)


def test_run_without_loaders_beside_other_programs_is_named_with_its_share(
    make_facts: Callable[..., RunFacts], usage_of: Callable[..., HostUsage]
) -> None:
    hosts = (usage_of("algo-1", cpu_others=0.4, cpu_pressure=0.9),)
    report = build_report(make_facts(ranks=(), hosts=hosts), Catalogue.load())
    assert upper_bounds_note({"busy": report}).endswith("upper bounds: busy (up to 40 % of its time).")
