"""Cost arithmetic against the published tables, recomputed (their printed costs are cents per step)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from hetero.errors import ConfigError
from hetero.pricing import Catalogue, cost

CATALOGUE = Catalogue.load("seed-2022")


def hourly(**counts: int) -> float:
    types = {"p4d": "ml.p4d.24xlarge", "c5_18": "ml.c5.18xlarge", "p3": "ml.p3.2xlarge", "c5_9": "ml.c5.9xlarge"}
    total = 0.0
    for name, count in counts.items():
        price = CATALOGUE.get(types[name]).hourly_usd
        assert price is not None
        total += count * price
    return total


@pytest.mark.parametrize(
    ("cluster", "hourly_usd", "step_time_s", "printed", "per_step_usd"),
    [
        ({"p4d": 1}, 37.688, 0.192, 0.201, 0.002010),
        ({"p4d": 1, "c5_18": 2}, 45.032, 0.086, 0.108, 0.001076),
        ({"p3": 1}, 3.825, 1.193, 0.127, 0.001268),
        ({"p3": 1, "c5_9": 1}, 5.661, 0.184, 0.029, 0.000289),
    ],
)
def test_cost_of_published_rows_is_right_and_the_printed_figure_is_cents(
    cluster: dict[str, int], hourly_usd: float, step_time_s: float, printed: float, per_step_usd: float
) -> None:
    assert hourly(**cluster) == pytest.approx(hourly_usd, abs=1e-9)
    per_step = cost.job_cost_usd(hourly_usd, step_time_s)
    assert per_step == pytest.approx(per_step_usd, abs=5e-7)
    assert 100 * per_step == pytest.approx(printed, abs=6e-4)
    assert cost.cost_per_1k_steps_usd(hourly_usd, step_time_s) == pytest.approx(1000 * per_step_usd, abs=5e-4)


@pytest.mark.parametrize(
    ("homogeneous", "heterogeneous", "saved_percent", "break_even"),
    [
        ((37.688, 0.192), (45.032, 0.086), 46.5, 1.195),
        ((3.825, 1.193), (5.661, 0.184), 77.2, 1.48),
    ],
)
def test_published_pairs_give_saving_and_break_even(
    homogeneous: tuple[float, float],
    heterogeneous: tuple[float, float],
    saved_percent: float,
    break_even: float,
) -> None:
    saved = cost.saving(cost.job_cost_usd(*heterogeneous), cost.job_cost_usd(*homogeneous))
    assert 100 * saved == pytest.approx(saved_percent, abs=0.05)
    needed = cost.break_even_speedup(heterogeneous[0], homogeneous[0])
    assert needed == pytest.approx(break_even, abs=5e-4)
    achieved = cost.speedup(heterogeneous[1], homogeneous[1])
    assert (achieved > needed) == (saved > 0)


def test_cheaper_exactly_when_speedup_exceeds_break_even() -> None:
    for factor, is_cheaper in ((0.999, True), (1.001, False)):
        step_s = 0.192 * 37.688 / 45.032 * factor
        saved = cost.saving(cost.job_cost_usd(45.032, step_s), cost.job_cost_usd(37.688, 0.192))
        assert (saved > 0) is is_cheaper
        assert (cost.speedup(step_s, 0.192) > cost.break_even_speedup(45.032, 37.688)) is is_cheaper


def test_distributed_study_times_give_its_cost_difference() -> None:
    one_gpu_s, four_gpus_s = 18 * 3600 + 17 * 60, 5 * 3600 + 20 * 60
    difference = cost.job_cost_usd(14.688, four_gpus_s) - cost.job_cost_usd(3.825, one_gpu_s)
    assert difference == pytest.approx(8.44, abs=0.1)  # printed from unrounded times
    assert cost.speedup(four_gpus_s, one_gpu_s) == pytest.approx(3.43, abs=5e-3)
    eight_gpus_s, thirty_two_gpus_s, saved_s = 3 * 3600 + 41 * 60, 53 * 60, 2 * 3600 + 18 * 60
    sixteen_gpus_s = eight_gpus_s - saved_s  # 1 h 23 m, where the row has 16 h 24 m
    assert thirty_two_gpus_s < sixteen_gpus_s < 1.5 * 3600


@pytest.mark.parametrize(
    ("forecast", "actual", "error_percent"),
    [((38454, 59.07), (30770, 47.25), 25), ((3609, 5.55), (5176, 7.95), -30)],
)
def test_canary_forecasts_give_published_errors_in_time_and_cost(
    forecast: tuple[float, float], actual: tuple[float, float], error_percent: float
) -> None:
    for predicted, measured in zip(forecast, actual, strict=True):
        assert 100 * cost.relative_error(predicted, measured) == pytest.approx(error_percent, abs=0.5)
    hourly_usd = actual[1] / actual[0] * 3600
    assert cost.job_cost_usd(hourly_usd, forecast[0]) == pytest.approx(forecast[1], rel=2e-3)


def test_cost_per_million_samples_follows_from_the_rate() -> None:
    assert cost.cost_per_million_samples_usd(36.0, 1000.0) == pytest.approx(10.0)


@pytest.mark.parametrize("bad", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize(
    "function",
    [
        cost.job_cost_usd,
        cost.cost_per_1k_steps_usd,
        cost.cost_per_million_samples_usd,
        cost.saving,
        cost.speedup,
        cost.break_even_speedup,
        cost.relative_error,
    ],
)
def test_cost_of_value_out_of_range_raises(function: Callable[[float, float], float], bad: float) -> None:
    for arguments in ((bad, 1.0), (1.0, bad)):
        with pytest.raises(ConfigError, match=r"it must be"):
            function(*arguments)
