"""Forecasts of jobs whose parts are known."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from hetero.decide.canary.forecast import ForecastOptions, forecast
from hetero.decide.canary.model import Candidate
from hetero.documents.records import decode, encode
from hetero.errors import ConfigError
from tests.support.canary import job, memory, point, work


def candidate(points: tuple, **more: object) -> Candidate:
    return Candidate(name="1 x ml.m5.large", groups=("trainer=ml.m5.large:1",), points=points, **more)


def test_time_is_fixed_parts_plus_what_grows() -> None:
    found = forecast(candidate(job(lambda fraction: 0.5 + 100 * fraction))).candidate
    time = found.figure("time")
    assert time is not None
    assert found.refusals == ()
    assert time.low < 105.5 < time.high
    assert time.value == pytest.approx(105.5, rel=0.1)
    assert time.fixed == pytest.approx(5.5, rel=0.1)
    assert found.canary_s == pytest.approx(9 * 5.5 + 18, rel=0.1)


def test_steps_make_the_forecast_narrower() -> None:
    seconds = lambda fraction: 0.5 + 90 * fraction  # noqa: E731
    plain = forecast(candidate(job(seconds, seed=3))).candidate.figure("time")
    random = np.random.default_rng(3)

    def loaders(fraction: float) -> dict[str, object]:
        return {"loaders": (work(fraction, step_s=0.03 * (1 + 0.02 * random.normal())),)}

    stepped = forecast(candidate(job(seconds, seed=3, more=loaders))).candidate.figure("time")
    assert plain is not None
    assert stepped is not None
    assert stepped.half_width < plain.half_width
    assert stepped.low < 95.5 < stepped.high


def test_fixed_part_has_that_of_the_script_and_of_loaders_that_stay_whole() -> None:
    def loaders(fraction: float) -> dict[str, object]:
        return {"loaders": (work(fraction), work(0.05, name="validation", whole_steps=1000, step_s=0.2))}

    points = job(lambda fraction: 9 + 4 + 90 * fraction, noise=0.002, more=loaders)
    time = forecast(candidate(points)).candidate.figure("time")
    assert time is not None
    assert time.fixed == pytest.approx(5 + 9 + 4, rel=0.1)


def test_imports_that_read_the_data_grow_with_it() -> None:
    points = job(lambda fraction: 50 * fraction)
    points = tuple(
        replace(each, wall_s=each.wall_s + 100 * each.fraction, parts=each.parts)  # the rest is fixed
        for each in points
    )
    time = forecast(candidate(points)).candidate.figure("time")
    assert time is not None
    assert time.low < 155 < time.high
    assert time.fixed == pytest.approx(5, rel=0.2)


@pytest.mark.parametrize("growth_s", [60.0, 0.0])
def test_start_up_that_grows_less_clearly_is_in_the_interval(growth_s: float) -> None:
    points = tuple(  # the growth is four standard errors
        point(f, replicate, 2 + 100 * f, fixed_s=5 + growth_s * f + 0.38 * (replicate - 2))
        for replicate in (1, 2, 3)
        for f in (0.01, 0.02, 0.03)
    )
    found = forecast(candidate(points)).candidate
    time = found.figure("time")
    assert time is not None
    assert time.low < 107 + growth_s < time.high
    if not growth_s:
        assert time.value == pytest.approx(107, rel=0.05)


def test_intervals_cover_at_the_noise_that_is_not_refused() -> None:
    for noise, at_least in ((0.03, 17), (0.1, 16)):
        covered = 0
        for seed in range(20):
            random = np.random.default_rng(seed)
            points = job(lambda fraction: 2 + 1000 * fraction, noise=noise, seed=seed + 100)
            time = forecast(candidate(points)).candidate.figure("time")
            assert time is not None
            covered += time.low < 5 + 1002 * (1 + noise * random.standard_normal()) < time.high
        assert covered >= at_least


def test_work_outside_of_loaders_that_bends_is_refused() -> None:
    def seconds(fraction: float) -> float:
        return (round(3000 * fraction) - 5) * 0.11 + 1100 * fraction**2

    points = job(seconds, noise=0.003, more=lambda fraction: {"loaders": (work(fraction, step_s=0.11),)})
    found = forecast(candidate(points)).candidate
    assert {(each.rule, each.figure) for each in found.refusals} == {("curved", "time")}
    assert any("time of the script outside of its loaders" in each.reason for each in found.refusals)


def test_cost_is_price_times_time() -> None:
    found = forecast(candidate(job(lambda fraction: 100 * fraction), hourly_usd=3.6))
    time = found.candidate.figure("time")
    assert time is not None
    assert np.median(found.usd) == pytest.approx(time.value / 1000)


def test_loader_that_stays_whole_is_a_fixed_part() -> None:
    points = job(
        lambda fraction: 2 + 90 * fraction,
        more=lambda fraction: {
            "loaders": (
                work(fraction),
                work(0.05, name="validation", whole_steps=1000, step_s=0.04),
            )
        },
    )
    time = forecast(candidate(points)).candidate.figure("time")
    assert time is not None
    assert time.value == pytest.approx(97, rel=0.06)


def test_memory_is_what_is_there_before_plus_growth() -> None:
    points = job(lambda fraction: 100 * fraction, more=lambda f: {"resources": memory(7e8, 5e9, f)})
    found = forecast(candidate(points, memory_limit_bytes=4e9)).candidate
    peak, mean = found.figure("memory peak"), found.figure("memory mean")
    assert peak is not None
    assert mean is not None
    assert peak.value == pytest.approx(5.7e9, rel=0.05)
    assert mean.value == pytest.approx(3.2e9, rel=0.1)
    assert found.out_of_memory == 1.0


def test_memory_that_does_not_grow_is_not_forecast_to_grow() -> None:
    points = job(lambda fraction: 100 * fraction, more=lambda f: {"resources": memory(7e8, 0, f)})
    found = forecast(candidate(points, memory_limit_bytes=2e9)).candidate
    peak = found.figure("memory peak")
    assert peak is not None
    assert peak.value == pytest.approx(7e8, rel=0.05)
    assert found.out_of_memory is not None
    assert found.out_of_memory < 0.05


def test_cpu_use_is_that_of_the_growing_part() -> None:
    points = job(lambda fraction: 100 * fraction, more=lambda f: {"resources": memory(7e8, 0, f)})
    figures = forecast(candidate(points)).candidate
    mean, p99 = figures.figure("CPU mean"), figures.figure("CPU p99")
    assert mean is not None
    assert p99 is not None
    assert mean.value == pytest.approx(150, rel=0.05)
    assert p99.value == pytest.approx(160, rel=0.05)


def test_too_few_runs_give_no_forecast() -> None:
    found = forecast(candidate(job(lambda fraction: 100 * fraction)[:3]))
    assert found.candidate.figures == ()
    assert [refusal.rule for refusal in found.candidate.refusals] == ["too-few"]
    assert len(found.usd) == 0


@pytest.mark.parametrize("fractions", [(0.01, 0.03), (0.01, 0.0102, 0.0104, 0.03)])
def test_two_amounts_of_data_give_no_forecast(fractions: tuple[float, ...]) -> None:
    found = forecast(candidate(job(lambda fraction: 100 * fraction**1.5, fractions=fractions))).candidate
    assert [refusal.rule for refusal in found.refusals] == ["too-few"]
    assert "with 2 different amounts of data" in found.refusals[0].reason
    assert found.figures == ()


def test_ten_percent_tell_n_log_n_from_a_line_and_three_percent_do_not() -> None:
    def n_log_n(fraction: float) -> float:
        return 60 * fraction * math.log(260_000 * fraction) / math.log(260_000)

    for seed in range(5):
        small = forecast(candidate(job(n_log_n, noise=0.01, seed=seed))).candidate
        assert not small.refused("time")  # as docs/canary.md states
        large = forecast(candidate(job(n_log_n, noise=0.01, seed=seed, fractions=(0.01, 0.03, 0.1)))).candidate
        assert "curved" in {refusal.rule for refusal in large.refused("time")}


def test_loader_that_ignores_the_fraction_must_grow_otherwise() -> None:
    found = forecast(candidate(job(lambda fraction: 20.0, more=lambda fraction: {"loaders": (work(0.2),)}))).candidate
    assert "no-growth" in {refusal.rule for refusal in found.refused("time")}


@pytest.mark.parametrize(
    ("whole_s", "fractions", "text"),
    [
        (2, (0.1, 0.2, 0.4), "The whole job takes less than another 10 minutes, about 7 s in proportion to the data."),
        (2000, (0.01, 0.02, 0.03), "Another 10 minutes of canaries suffice for 9."),
        (2000, (0.1, 0.3, 0.5), "do not suffice for larger fractions than 50 %. They would only add replicates."),
        (50_000, (0.01, 0.02, 0.03), "do not suffice for larger fractions than 3 %. They would only add replicates."),
    ],
)
def test_suggestion_says_what_ten_minutes_suffice_for(whole_s: float, fractions: tuple[float, ...], text: str) -> None:
    found = forecast(candidate(job(lambda fraction: whole_s * fraction, fractions=fractions))).candidate
    assert text in found.more_canaries


def test_run_without_data_is_rejected() -> None:
    with pytest.raises(ConfigError, match="has a fraction of 0; expected more than 0"):
        forecast(candidate(job(lambda fraction: 1.0, fractions=(0.0, 0.01))))


def test_same_runs_give_the_same_forecast_and_five_studies_similar_ones() -> None:
    values = []
    for seed in range(5):
        made = candidate(job(lambda fraction: 0.5 + 100 * fraction, seed=seed))
        first, second = (forecast(made).candidate.figure("time") for _ in range(2))
        assert first is not None
        assert first == second
        values.append(first.value)
    assert (max(values) - min(values)) / np.median(values) <= 0.15


def test_accepted_rule_does_not_refuse() -> None:
    points = job(lambda fraction: 0.05)  # no growth
    refused = forecast(candidate(points)).candidate
    assert {refusal.rule for refusal in refused.refusals} == {"no-growth"}
    accepted = forecast(candidate(points), ForecastOptions(accept=("no-growth", "noise"))).candidate
    assert accepted.refusals == ()


def test_too_few_runs_cannot_be_accepted() -> None:
    with pytest.raises(ConfigError, match="--accept too-few: fewer runs give no forecast"):
        ForecastOptions(accept=("too-few",))


def test_forecast_survives_json() -> None:
    points = job(lambda fraction: 100 * fraction, more=lambda f: {"resources": memory(7e8, 1e9, f)})
    shown = forecast(candidate(points, hourly_usd=1.0)).candidate
    assert decode(Candidate, json.loads(json.dumps(encode(shown)))) == shown
