"""Comparing two runs, and refusing to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.metrics.hosts import HostUsage
from hetero.metrics.steps import StepSummary
from hetero.pricing import Catalogue
from hetero.report import Comparison, RankFacts, RunFacts, build_report, compare, render_comparison, render_report

PRICED = Catalogue.load("seed-2022")
FactsMaker = Callable[..., RunFacts]
SummaryMaker = Callable[..., StepSummary]


def test_compare_published_pair_gives_saving_and_break_even(make_facts: FactsMaker) -> None:
    comparison = compare(build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True), PRICED))
    assert comparison.per == "step"
    assert comparison.speedup is not None
    assert comparison.speedup.low == comparison.speedup.high == pytest.approx(1193 / 184)
    assert comparison.break_even_speedup is not None
    assert comparison.break_even_speedup.value == pytest.approx(1.48)
    assert comparison.saving is not None
    assert 100 * comparison.saving.low == 100 * comparison.saving.high == pytest.approx(77.2, abs=0.05)
    assert comparison.is_worth_it is True
    assert comparison.caveats == ()
    text = render_comparison(comparison)
    assert "worth it: 77.2 % cheaper" in text
    assert "above 1.48 times (modelled)" in text
    assert "1 x `ml.p3.2xlarge` + 1 x `ml.c5.9xlarge`" in text
    assert "0.2893" in text
    assert "6.48x" in text


def test_compare_below_break_even_is_not_worth_it(make_facts: FactsMaker) -> None:
    candidate = build_report(make_facts(is_heterogeneous=True, step_time_s=1.0), PRICED)
    comparison = compare(build_report(make_facts(), PRICED), candidate)
    assert comparison.speedup is not None
    assert comparison.speedup.low > 1
    assert comparison.is_worth_it is False
    assert "not worth it: 24.1 % dearer" in render_comparison(comparison)


def test_compare_without_prices_gives_times_only(make_facts: FactsMaker) -> None:
    catalogue = Catalogue.load()
    comparison = compare(
        build_report(make_facts(), catalogue), build_report(make_facts(is_heterogeneous=True), catalogue)
    )
    assert comparison.saving is comparison.break_even_speedup is comparison.is_worth_it is None
    text = render_comparison(comparison)
    assert "6.48x" in text
    assert "no price for ml.c5.9xlarge; pass --price ml.c5.9xlarge=USD" in text
    assert "USD/1,000 steps" not in text


def test_compare_with_another_global_batch_compares_samples_only(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    doubled = summary_of(0.368, batch_samples=128, num_samples_measured=12800)
    facts = make_facts(is_heterogeneous=True, ranks=(RankFacts(rank=0, host="algo-1", loaders=(doubled,)),))
    comparison = compare(build_report(make_facts(), PRICED), build_report(facts, PRICED))
    assert comparison.per == "sample"
    assert comparison.speedup is not None
    assert comparison.speedup.low == comparison.speedup.high == pytest.approx(1193 / 184)
    assert comparison.saving is not None
    assert 100 * comparison.saving.low == 100 * comparison.saving.high == pytest.approx(77.2, abs=0.05)
    text = render_comparison(comparison)
    assert "64 against 128 samples" in text
    assert "USD/1,000 steps" not in text
    assert "USD/million samples" in text


@pytest.mark.parametrize("swapped", [False, True])
def test_compare_with_a_run_without_steps_raises(
    make_facts: FactsMaker, summary_of: SummaryMaker, swapped: bool
) -> None:
    empty = make_facts(ranks=(RankFacts(rank=0, host="h", loaders=(summary_of(None),)),))
    reports = [build_report(empty, PRICED), build_report(make_facts(), PRICED)]
    with pytest.raises(ConfigError, match="second report" if swapped else "first report"):
        compare(*(reversed(reports) if swapped else reports))


def compare_pair(make_facts: FactsMaker, changes: dict[str, Any], *, both: dict[str, Any] | None = None) -> Comparison:
    """Compare the published pair with changes of the second run, or of both."""
    facts = make_facts(**(both or {})), make_facts(is_heterogeneous=True, **(both or {}), **changes)
    return compare(*(build_report(each, PRICED) for each in facts))


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"simulated": ()}, "The first run was simulated, the second measured."),
        ({"options": {"emulate_sample_s": "0.1"}}, "emulate_sample_s is unset in the first run and 0.1 in the second"),
    ],
)
def test_compare_of_runs_that_are_not_alike_gives_neither_pace_nor_verdict(
    make_facts: FactsMaker, changes: dict[str, Any], objection: str
) -> None:
    comparison = compare_pair(make_facts, changes)
    assert objection in " ".join(comparison.objections)
    assert comparison.speedup is comparison.saving is comparison.is_worth_it is None
    text = render_comparison(comparison)
    assert text.splitlines()[2] == "Which run is faster and which is cheaper cannot be said:"
    assert objection in text
    assert "the cheaper one above 1.48 times the pace of the first (modelled)" in text
    assert not any(word in text for word in ("worth it", "6.48", "speed-up", "saving", "USD/1,000", "USD/million"))


def test_compare_of_a_failed_run_gives_no_verdict(make_facts: FactsMaker) -> None:
    comparison = compare_pair(make_facts, {"exit_code": 30})
    text = render_comparison(comparison)
    assert "The second run failed (exit code 30)." in text
    assert "6.48 times the pace per step (simulated). Whether it is cheaper cannot be said:" in text
    assert comparison.saving is comparison.is_worth_it is None
    assert compare_pair(make_facts, {"exit_code": 143}).is_worth_it is True  # stopped on request


EMULATION = {"emulate_sample_s": "0.1", "emulate_step_s": "0.1"}


@pytest.mark.parametrize(
    ("missing", "used"),
    [
        (["emulate_sample_s"], "preprocess with the CPUs of this machine, not with the vCPUs of their types"),
        (["emulate_step_s"], "compute with this machine, not with the accelerators of their types"),
        (list(EMULATION), "work with this machine, not with the vCPUs and accelerators of their types"),
    ],
)
def test_compare_of_simulated_runs_without_emulation_speaks_of_this_machine_alone(
    make_facts: FactsMaker, missing: list[str], used: str
) -> None:
    comparison = compare_pair(make_facts, {}, both={"options": EMULATION | dict.fromkeys(missing, "None")})
    assert comparison.saving is comparison.is_worth_it is None
    text = render_comparison(comparison)
    assert used in text
    assert "Give --emulate-s" in text
    assert "6.48 times the pace per step on this machine (simulated)" in text
    assert not any(word in text for word in ("worth it", "saving", "USD/1,000 steps", "USD/million samples"))
    assert compare_pair(make_facts, {}, both={"options": EMULATION}).is_worth_it is True


def test_compare_of_reports_with_costs_that_do_not_hold_shows_none(make_facts: FactsMaker) -> None:
    options = {"options": dict.fromkeys(EMULATION, "None")}
    reports = [build_report(make_facts(is_heterogeneous=hetero, **options), PRICED) for hetero in (False, True)]
    as_before = [dataclasses.replace(each, cost=build_report(make_facts(), PRICED).cost) for each in reports]
    assert as_before[0].cost.per_1k_steps is not None  # a report of an earlier version
    assert "USD/1,000 steps" not in render_comparison(compare(*as_before))
    assert "Per 1,000 steps" not in render_report(as_before[0])


def test_compare_of_other_commands_says_so(make_facts: FactsMaker) -> None:
    comparison = compare_pair(make_facts, {"command": "other.py"})
    assert comparison.caveats == ("The commands differ.",)
    assert comparison.is_worth_it is True


def test_compare_of_few_steps_or_another_loader_gives_neither_pace_nor_verdict(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    odd = summary_of(0.184, name="other", num_steps_measured=3, num_samples_measured=192)
    comparison = compare_pair(make_facts, {"ranks": (RankFacts(rank=0, host="h", loaders=(odd,)),)})
    objections = " ".join(comparison.objections)
    assert "measured only 3 steps" in objections
    assert "loaders differ" in objections
    assert comparison.speedup is comparison.saving is None


def test_compare_of_loaders_of_one_name_says_which_of_them(make_facts: FactsMaker, summary_of: SummaryMaker) -> None:
    loaders = summary_of(0.001), summary_of(0.184)
    comparison = compare_pair(make_facts, {"ranks": (RankFacts(rank=0, host="h", loaders=loaders),)})
    assert (
        "The times are of photos/train in the first run and of photos/train (2) in the second."
        in (comparison.caveats[0])
    )
    assert comparison.is_worth_it is True


def late_ranks(summary_of: SummaryMaker, *, step_time_s: float, emulated_s: float, **changes: Any) -> dict[str, Any]:
    """Return changes of a run of one rank that never waits for data, and whose steps take longer than emulated."""
    late = summary_of(step_time_s, 1.0, step_wait_s=emulated_s, num_emulation_overruns=30)
    return {"ranks": (RankFacts(rank=0, host="h", loaders=(late,)),), **changes}


def test_compare_with_late_steps_in_the_second_run_gives_a_lower_bound(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    comparison = compare_pair(make_facts, late_ranks(summary_of, step_time_s=0.4, emulated_s=0.184))
    assert comparison.saving is not None
    assert 100 * comparison.saving.low == pytest.approx(50.4, abs=0.05)
    assert 100 * comparison.saving.high == pytest.approx(77.2, abs=0.05)
    assert comparison.is_worth_it is True
    text = render_comparison(comparison)
    assert "The second run is **worth it: at least 50.4 % cheaper** for the same work." in text
    assert "at least 2.98 times the pace" in text
    assert "at least 50.4 %" in text
    assert "77.2" not in text
    assert "are upper bounds: the second run (a step took 400 ms, without it 184 ms or more)" in comparison.caveats[0]


def test_compare_with_late_steps_in_the_first_run_gives_an_upper_bound(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    first = make_facts(**late_ranks(summary_of, step_time_s=1.193, emulated_s=0.6))
    comparison = compare(*(build_report(each, PRICED) for each in (first, make_facts(is_heterogeneous=True))))
    assert comparison.saving is not None
    assert 100 * comparison.saving.low == pytest.approx(54.6, abs=0.05)
    assert 100 * comparison.saving.high == pytest.approx(77.2, abs=0.05)
    assert "worth it: at least 54.6 % cheaper" in render_comparison(comparison)


def test_compare_with_late_steps_that_leave_the_second_run_dearer_says_by_how_much_at_least(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    comparison = compare_pair(make_facts, late_ranks(summary_of, step_time_s=1.5, emulated_s=1.0))
    assert comparison.is_worth_it is False
    text = render_comparison(comparison)
    assert "The second run is **not worth it: at least 24.1 % dearer**" in text
    assert "at most -24.1 %" in text


def test_compare_with_bounds_that_contain_both_answers_says_what_would_decide(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    options = {"emulate_sample_s": "0.1", "emulate_step_s": "0.5"}
    late = late_ranks(summary_of, step_time_s=1.1, emulated_s=0.5)
    comparison = compare_pair(make_facts, late, both={"options": options})
    assert comparison.is_worth_it is None
    answer = render_comparison(comparison).splitlines()[2]
    assert "cannot be said: it is between 36.5 % dearer and 38.0 % cheaper" in answer
    assert "a step of the second run took 1100 ms with the other work of this machine, and would take 500 ms" in answer
    assert answer.count("emulated times: --emulate-sample-seconds and --emulate-step-seconds.") == 1
    assert "worth it" not in answer


def test_compare_of_runs_beside_other_programs_says_what_would_decide(
    make_facts: FactsMaker, usage_of: Callable[..., HostUsage]
) -> None:
    hosts = (usage_of("algo-1", scope="host", cpu_others=0.8, cpu_pressure=1.0),)
    comparison = compare_pair(make_facts, {}, both={"hosts": hosts, "simulated": ()})
    assert comparison.is_worth_it is None
    text = render_comparison(comparison)
    assert "with the other work of this machine, and would take" in text
    assert "To decide, run both again on machines that do nothing else." in text
    assert "Other work of this machine shows in 2 of 2 runs, so their times are upper bounds: the first run" in text


def test_compare_with_late_batches_bounds_the_data_wait(make_facts: FactsMaker) -> None:
    events = {
        "batches computed": 100,
        "emulation overruns": 20,
        "milliseconds later than emulated": 1_840,
    }
    comparison = compare_pair(make_facts, {"events": events})
    assert comparison.speedup is not None
    assert comparison.speedup.low == pytest.approx(1193 / 184)
    assert comparison.speedup.high == pytest.approx(1193 / (0.9 * 184))
    assert "the second run (a step took 184 ms, without it 166 ms or more)" in comparison.caveats[0]
    assert comparison.is_worth_it is True


def test_compare_of_equal_runs_has_no_negative_zero(make_facts: FactsMaker) -> None:
    report = build_report(make_facts(), PRICED)
    assert "not worth it: 0.0 % dearer" in render_comparison(compare(report, report))


def test_comparison_says_in_which_run_something_was_simulated(make_facts: FactsMaker) -> None:
    facts = make_facts(simulated=("Steps were waits.", "One machine."))
    other = make_facts(is_heterogeneous=True, simulated=("One machine.", "a*b"))
    text = render_comparison(compare(build_report(facts, PRICED), build_report(other, PRICED)))
    expected = "- First run: Steps were waits.\n- Both runs: One machine.\n- Second run: `a*b`\n"
    assert text.endswith(f"\n\n## Simulated\n\n{expected}")


def test_compare_at_different_prices_says_so(make_facts: FactsMaker) -> None:
    other = Catalogue.load("seed-2022", overrides=["ml.p3.2xlarge=4"])
    comparison = compare(build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True), other))
    assert "ml.p3.2xlarge costs 3.825 USD/h in the first run, 4 in the second" in comparison.objections[0]
    assert comparison.saving is comparison.break_even_speedup is None
    assert "not all of one region and date" in " ".join(comparison.caveats)


def test_comparison_is_of_the_reports_given(make_facts: FactsMaker) -> None:
    first, second = build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True), PRICED)
    comparison = compare(first, second)
    assert (comparison.baseline, comparison.candidate) == (first, second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.per = "sample"  # type: ignore[misc]
