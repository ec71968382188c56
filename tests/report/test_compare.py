"""Comparing two runs, and refusing to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.metrics import StepSummary
from hetero.pricing import Catalogue
from hetero.report import RankFacts, RunFacts, build_report, compare, render_comparison

PRICED = Catalogue.load("seed-2022")
FactsMaker = Callable[..., RunFacts]
SummaryMaker = Callable[..., StepSummary]


def test_compare_published_pair_gives_saving_and_break_even(make_facts: FactsMaker) -> None:
    comparison = compare(build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True), PRICED))
    assert comparison.per == "step"
    assert comparison.speedup.value == pytest.approx(1193 / 184)
    assert comparison.break_even_speedup is not None
    assert comparison.break_even_speedup.value == pytest.approx(1.48)
    assert comparison.saving is not None
    assert 100 * comparison.saving.value == pytest.approx(77.2, abs=0.05)
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
    assert comparison.speedup.value > 1
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
    assert comparison.speedup.value == pytest.approx(1193 / 184)
    assert comparison.saving is not None
    assert 100 * comparison.saving.value == pytest.approx(77.2, abs=0.05)
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


@pytest.mark.parametrize(
    ("changes", "caveat"),
    [
        ({"simulated": ()}, "The first run was simulated, the second measured."),
        ({"exit_code": 30}, "The second run failed (exit code 30)."),
        ({"command": "other.py"}, "The commands differ."),
        ({"options": {"emulate_sample_s": "0.1"}}, "emulate_sample_s is unset in the first run and 0.1 in the second"),
        ({"options": {"emulate_sample_s": "None"}}, "these times say nothing about those"),
    ],
)
def test_compare_of_unlike_runs_says_so(make_facts: FactsMaker, changes: dict[str, Any], caveat: str) -> None:
    comparison = compare(
        build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True, **changes), PRICED)
    )
    assert any(caveat in line for line in comparison.caveats)
    assert caveat in render_comparison(comparison)


def test_compare_of_few_steps_other_loader_or_overruns_says_so(
    make_facts: FactsMaker, summary_of: SummaryMaker
) -> None:
    odd = summary_of(0.184, name="other", num_steps_measured=3, num_samples_measured=192, num_emulation_overruns=1)
    facts = make_facts(is_heterogeneous=True, ranks=(RankFacts(rank=0, host="h", loaders=(odd,)),))
    caveats = " ".join(compare(build_report(make_facts(), PRICED), build_report(facts, PRICED)).caveats)
    assert "measured only 3 steps" in caveats
    assert "loaders differ" in caveats
    assert "longer than the emulated accelerator" in caveats


def test_comparison_says_in_which_run_something_was_simulated(make_facts: FactsMaker) -> None:
    facts = make_facts(simulated=("Steps were waits.", "One machine."))
    other = make_facts(is_heterogeneous=True, simulated=("One machine.", "a*b"))
    text = render_comparison(compare(build_report(facts, PRICED), build_report(other, PRICED)))
    expected = "- First run: Steps were waits.\n- Both runs: One machine.\n- Second run: `a*b`\n"
    assert text.endswith(f"\n\n## Simulated\n\n{expected}")


def test_compare_at_different_prices_says_so(make_facts: FactsMaker) -> None:
    other = Catalogue.load("seed-2022", overrides=["ml.p3.2xlarge=4"])
    comparison = compare(build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True), other))
    caveats = " ".join(comparison.caveats)
    assert "ml.p3.2xlarge costs 3.825 USD/h in the first run, 4 in the second" in caveats
    assert "not all of one region and date" in caveats


def test_comparison_is_of_the_reports_given(make_facts: FactsMaker) -> None:
    first, second = build_report(make_facts(), PRICED), build_report(make_facts(is_heterogeneous=True), PRICED)
    comparison = compare(first, second)
    assert (comparison.baseline, comparison.candidate) == (first, second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison.per = "sample"  # type: ignore[misc]
