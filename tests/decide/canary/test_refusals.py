"""Every reason to refuse, and jobs that look like it and are not refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.decide.canary.conducting import write_report
from hetero.decide.canary.forecast import ForecastOptions, forecast
from hetero.decide.canary.model import RULES, SCHEMA_VERSION, CanaryReport, Candidate, Refusal, load_canary
from hetero.decide.canary.output.text import headline_of
from hetero.decide.canary.points import MAX_FRACTION, CanaryPoint
from hetero.decide.canary.refusals import check_cache
from tests.support.canary import job, memory, point, work


def line(fraction: float) -> float:
    return 0.5 + 100 * fraction


def shown(points: tuple[CanaryPoint, ...], **more: Any) -> Candidate:
    return forecast(Candidate(name="x", groups=("trainer=x:1",), points=points, **more)).candidate


def rules(points: tuple[CanaryPoint, ...]) -> set[str]:
    return {refusal.rule for refusal in shown(points).refused("time")}


def with_loaders(**more: Any) -> Callable[[float], dict[str, Any]]:
    return lambda fraction: {"loaders": (work(fraction, **more),)}


def test_line_is_not_refused() -> None:
    for seed in range(10):
        assert rules(job(line, seed=seed)) == set()


@pytest.mark.parametrize("power", [0.3, 1.6, 2.0])
def test_curve_is_refused_with_its_power(power: float) -> None:
    found = shown(job(lambda fraction: 3000 * fraction**power if power > 1 else 10 * fraction**power, noise=0.01))
    reasons = [refusal for refusal in found.refused("time") if refusal.rule == "curved"]
    assert reasons
    assert "power" in reasons[0].reason or "not on a line" in reasons[0].reason
    assert "whether the growth keeps its power" in found.more_canaries


def test_work_below_the_noise_is_refused() -> None:
    found = shown(job(lambda fraction: 0.2 + 0.01 * fraction, noise=0.05))
    assert [refusal.rule for refusal in found.refused("time")] == ["no-growth"]
    assert "whether the time grows at all" in found.more_canaries


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 200), marks=pytest.mark.long)])
def test_constant_memory_is_forecast_as_a_constant(seeds: range) -> None:
    num_grown = 0  # by chance: a growth counts from a p-value of 0.003, so one of 200 seeds may show one
    for seed in seeds:
        random = np.random.default_rng(seed)

        def near_119_mb(fraction: float, random: np.random.Generator = random) -> dict[str, Any]:
            return {"resources": memory(119.15e6 + 0.25e6 * random.standard_normal(), 0.0, fraction)}

        found = shown(job(line, more=near_119_mb))
        peak = found.figure("memory peak")
        assert peak is not None
        assert not found.refused("memory peak")
        assert peak.low <= 119.15e6 <= peak.high
        num_grown += peak.value != pytest.approx(119.15e6, rel=0.01)
    assert num_grown <= len(seeds) // 100


def test_growth_of_four_standard_errors_is_not_called_too_small_to_measure() -> None:
    noise = 0.04 * np.tile([1.0, 0.0, -1.0], 3)
    points = tuple(
        point(fraction, 1 + number % 3, 1.0 + 6 * fraction + noise[number])
        for number, fraction in enumerate(each for each in (0.01, 0.02, 0.03) for _ in range(3))
    )
    assert "no-growth" not in rules(points)
    time = shown(points).figure("time")
    assert time is not None
    assert time.low < 5 + 1 + 6 < time.high


@pytest.mark.parametrize(("share", "is_refused"), [(0.04, False), (0.2, False), (0.6, True)])
def test_runs_beside_other_work_have_a_wider_interval_then_words_then_no_forecast(
    share: float, is_refused: bool
) -> None:
    alone, beside = (shown(job(line, more=lambda _, each=each: {"excess_share": each})) for each in (0.0, share))
    assert ("busy" in {refusal.rule for refusal in beside.refused("time")}) == is_refused
    assert headline_of(beside).startswith(f"Up to {100 * share:.0f} % of the measured times") == (share > 0.05)
    times = alone.figure("time"), beside.figure("time")
    assert times[0] is not None
    assert times[1] is not None
    assert times[1].low < (1 - 0.9 * share) * times[0].value < 0.97 * times[0].value < times[1].high
    assert not beside.refused("memory peak")
    if is_refused:
        # Noise of a busy machine is not another reason.
        noisy = shown(job(lambda _: 5.0, noise=0.3, more=lambda _: {"excess_share": share}))
        assert [refusal.rule for refusal in noisy.refused("time")] == ["busy"]
        assert beside.more_canaries == ""
        assert "with --fresh" in next(each.reason for each in beside.refusals if each.rule == "busy")


def test_noise_wider_than_the_answer_is_refused() -> None:
    random = np.random.default_rng(0)
    points = job(lambda fraction: line(fraction) * np.exp(0.5 * random.normal()))
    assert rules(points) & {"noise", "no-growth"}


def test_different_numbers_of_passes_are_refused() -> None:
    points = job(line, more=lambda fraction: {"loaders": (work(fraction, passes=7 if fraction < 0.02 else 4),)})
    assert "passes" in rules(points)


def test_fixed_number_of_steps_is_refused() -> None:
    points = job(
        lambda fraction: 20.0,
        more=lambda fraction: {"loaders": (work(0.05, num_passes=3, num_complete_passes=2),)},
    )
    assert "fixed-steps" in rules(points)


@pytest.mark.parametrize(("whole_steps", "passes", "max_in_flight"), [(200, 3, 6), (400, 1, 12), (700, 2, 17)])
def test_passes_with_hardly_more_batches_than_are_in_flight_are_refused(
    whole_steps: int, passes: int, max_in_flight: int
) -> None:
    points = job(line, more=with_loaders(whole_steps=whole_steps, passes=passes, max_in_flight=max_in_flight))
    found = shown(points)
    reasons = {refusal.rule: refusal.reason for refusal in found.refused("time")}
    assert f"at most {0.03 * whole_steps:g} batches" in reasons["short-passes"]
    assert f"fetches {max_in_flight} at the same time" in reasons["short-passes"]
    assert "passes of larger fractions have more batches" in found.more_canaries


@pytest.mark.parametrize(("whole_steps", "max_in_flight"), [(3000, 17), (100, 1), (300, 3), (3000, 0)])
def test_passes_with_many_more_batches_than_are_in_flight_are_not_refused(whole_steps: int, max_in_flight: int) -> None:
    points = job(line, more=with_loaders(whole_steps=whole_steps, max_in_flight=max_in_flight))
    assert "short-passes" not in rules(points)


def test_validation_set_that_stays_whole_is_not_refused() -> None:
    points = job(line, more=lambda fraction: {"loaders": (work(fraction), work(0.05, name="validation"))})
    assert rules(points) == set()


def test_samples_out_of_proportion_are_refused() -> None:
    points = job(line, more=lambda fraction: {"loaders": (work(fraction**2 * 100),)})
    assert "loaders" in rules(points)


def test_loader_of_some_runs_only_is_refused() -> None:
    points = job(
        line, more=lambda fraction: {"loaders": (work(fraction), *((work(0.1, name="x"),) if fraction > 0.02 else ()))}
    )
    assert "loaders" in rules(points)


def test_failed_run_is_refused_with_its_cause() -> None:
    points = job(line, more=lambda fraction: {"failure": "MemoryError" if fraction > 0.02 else ""})
    found = shown(points)
    assert [refusal.rule for refusal in found.refusals] == ["failed", "too-few"]
    assert found.out_of_memory == 1.0  # on less data than the whole
    assert "3 of 9 canary runs failed, the first with: MemoryError" in found.refusals[0].reason


@pytest.mark.parametrize(
    ("limit_gib", "peak", "group", "is_too_large"),
    [
        (16, "", "", False),  # the kernel has counted no kill
        (384, "0.8 GiB", "its control group", False),  # a stray kill -9
        (16, "15.2 GiB of 16.0 GiB allowed", "its control group", True),
        (16, "15.2 GiB", "a control group above its own", True),
        (384, "15.2 GiB", "its control group", False),  # this machine is smaller than the candidate's
        (None, "15.2 GiB", "its control group", False),
    ],
)
def test_kill_is_a_lack_of_memory_only_near_the_limit(
    limit_gib: float | None, peak: str, group: str, is_too_large: bool
) -> None:
    why = f", likely out of memory (peak of {group}: {peak})" if peak else ": the kernel counted no lack of memory here"
    cause = f"HET-30 algo-1: rank 0 killed by SIGKILL{why}"
    points = (
        *job(line, more=lambda f: {"resources": memory(3e8, 0, f)}),
        point(0.03, 4, 1.0, failure=cause),
    )
    limit = None if limit_gib is None else limit_gib * 2**30
    made = Candidate(name="x", groups=("trainer=x:1",), points=points, memory_limit_bytes=limit)
    found = forecast(made, ForecastOptions(accept=("failed",))).candidate
    if is_too_large:
        assert found.out_of_memory == 1.0
    else:
        assert (found.out_of_memory or 0.0) < 0.01
    assert (shown(points, memory_limit_bytes=limit).out_of_memory == 1.0) == is_too_large


@pytest.mark.parametrize(("data_gb", "passes", "is_refused"), [(40, 3, True), (40, 1, False), (8, 3, False)])
def test_cache_that_holds_the_canaries_but_not_the_whole_is_refused(
    data_gb: float, passes: int, is_refused: bool
) -> None:
    points = job(line, more=with_loaders(passes=passes))
    found = check_cache(points, data_bytes=data_gb * 1e9, memory_bytes=16e9)
    assert bool(found) == is_refused


def holding(growth: float, *, cpu_percent: float = 150.0) -> Callable[[float], dict[str, Any]]:
    return lambda f: {"resources": replace(memory(3e8, growth, f), cpu_percent_mean=cpu_percent)}


@pytest.mark.parametrize(
    ("growth_mb", "cache_mb", "is_refused"),
    [
        (65, 4, True),  # a forest whose canaries fit into the cache: 61 % too low
        (718, 4, True),  # logistic regression whose largest canary has 21.5 MB: 40 % too low
        (1850, 4, True),  # trees with 55.5 MB: 33 % too low
        (2503, 4, False),  # joins with 75 MB: 9 % too low
        (3943, 4, False),
        (12, 4, False),  # the whole stays in the cache too
        (718, None, False),
    ],
)
def test_memory_that_becomes_slower_beyond_the_canaries_is_refused(
    growth_mb: float, cache_mb: float | None, is_refused: bool
) -> None:
    points = job(line, more=holding(growth_mb * 1e6))
    found = shown(points, cache_bytes=None if cache_mb is None else cache_mb * 2**20)
    assert [refusal.rule for refusal in found.refusals] == (["cpu-cache"] if is_refused else [])


def test_memory_that_may_be_constant_is_not_refused() -> None:
    waves = iter((0.0, 2e6, 1e6, -1e6, 0.0, 3e6, 1e6, 2e6, 0.0))  # 100 MB in the whole, within its noise
    points = job(line, more=lambda f: {"resources": memory(3.6e8 + next(waves), 1e8, f)})
    found = shown(points, cache_bytes=4e6)
    peak = found.figure("memory peak")
    assert peak is not None
    assert peak.high > 4.2e8
    assert "cpu-cache" not in {refusal.rule for refusal in found.refusals}


def test_job_that_mostly_waits_does_not_depend_on_the_speed_of_memory() -> None:
    points = job(line, more=holding(718e6, cpu_percent=10.0))
    assert shown(points, cache_bytes=4e6).refusals == ()


@pytest.mark.parametrize(("growth", "share"), [(100e6, "50 %"), (640e6, "10 %")])
def test_fraction_that_would_show_slow_memory_is_one_that_canaries_may_have(growth: float, share: str) -> None:
    found = shown(job(line, noise=0.005, more=holding(growth)), cache_bytes=4e6)
    (refusal,) = found.refusals
    stated = float(refusal.reason.partition("Runs on ")[2].partition(" %")[0]) / 100
    assert stated == pytest.approx(float(share[:-2]) / 100, rel=0.1)
    assert stated <= MAX_FRACTION
    larger = job(line, noise=0.005, fractions=(0.01, 0.02, 1.05 * stated), more=holding(growth))
    assert "cpu-cache" not in {each.rule for each in shown(larger, cache_bytes=4e6).refusals}


def test_suggestion_for_slow_memory_is_about_it() -> None:
    found = shown(job(line, more=holding(718e6)), cache_bytes=4e6)
    assert "would show how much slower the memory of a larger job is" in found.more_canaries


def test_every_rule_survives_the_file_and_others_cannot_be_made(tmp_path: Path) -> None:
    found = shown(job(line, more=holding(718e6)), cache_bytes=4e6)
    report = CanaryReport(schema_version=SCHEMA_VERSION, command="t", how="", candidates=(found,))
    write_report(report, tmp_path)
    assert load_canary(tmp_path) == report
    assert len(set(RULES)) == len(RULES)
    with pytest.raises(AssertionError, match="is not in RULES"):
        Refusal(rule="unknown", figure="", reason="")
