"""Which candidate is the cheapest, and the source's published figures."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.decide.canary.comparison import decide
from hetero.decide.canary.forecast import Forecast, forecast
from hetero.decide.canary.model import Candidate
from hetero.pricing import cost
from tests.support.canary import job, memory


def made(name: str, whole_s: float, hourly_usd: float | None, *, growth: float = 0.0, seed: int = 0) -> Forecast:
    points = job(lambda f: whole_s * f, seed=seed, more=lambda f: {"resources": memory(7e8, growth, f)})
    return forecast(
        Candidate(name=name, groups=(f"t={name}:1",), points=points, hourly_usd=hourly_usd, memory_limit_bytes=16e9)
    )


def test_clearly_cheaper_candidate_is_the_cheapest() -> None:
    found = decide([made("small", 200, 1.0), made("large", 150, 3.0, seed=1)])
    assert found is not None
    assert found.cheapest == "small"
    assert found.probability > 0.99
    assert found.sentence.startswith("small is the cheapest with a probability of")


def test_candidates_of_equal_cost_are_not_decided() -> None:
    found = decide([made("one", 200, 1.0), made("two", 100, 2.0, seed=1)])
    assert found is not None
    assert found.cheapest == ""
    assert "not decided" in found.sentence
    assert "The intervals of one and two overlap" in found.sentence


def test_undecided_pair_is_the_one_that_competes() -> None:
    a, b = made("A", 200, 1.0), made("B", 212, 1.0, seed=1)
    c, d = made("C", 200, 10.0, seed=2), made("D", 200, 10.0, seed=3)  # closer to each other, and ten times as costly
    found = decide([a, b, c, d])
    assert found is not None
    assert found.cheapest == ""
    assert "The intervals of A and B overlap" in found.sentence


def test_candidates_with_equal_runs_have_independent_draws() -> None:
    one, two = made("one", 200, 1.0), made("two", 200, 1.01)
    assert abs(np.corrcoef(one.usd, two.usd)[0, 1]) < 0.1
    found = decide([one, two])
    assert found is not None
    assert found.cheapest == ""  # 1 % more is less than what the runs tell


def test_candidate_that_runs_out_of_memory_is_left_out() -> None:
    found = decide([made("small", 200, 1.0, growth=60e9), made("large", 200, 6.0, seed=1)])
    assert found is not None
    assert found.cheapest == "large"
    assert "small would most probably run out of memory" in found.sentence


def test_candidate_whose_memory_was_not_forecast_is_named() -> None:
    unknown = forecast(Candidate(name="small", groups=("t=small:1",), points=job(lambda f: 100 * f), hourly_usd=1.0))
    found = decide([unknown, made("large", 200, 6.0)])
    assert found is not None
    assert found.cheapest == "small"
    assert found.sentence.endswith("Whether the memory of small is enough was not forecast.")


def test_refused_or_unknown_cost_decides_nothing() -> None:
    found = decide([made("small", 200, 1.0), made("large", 0.001, 3.0)])
    assert found is not None
    assert found.cheapest == ""
    assert "the cost of large has no forecast" in found.sentence
    assert decide([made("small", 200, 1.0)]) is None


@pytest.mark.parametrize(
    ("count", "hourly_usd", "seconds", "usd"),
    [
        (6, 0.922, 3609, 5.55),
        (6, 0.922, 5176, 7.95),
        (1, 5.53, 38454, 59.07),
        (1, 5.53, 30770, 47.27),  # the source prints 47.25, which no price gives together with its 59.07
    ],
)
def test_costs_of_the_source_follow_from_its_times_and_prices(
    count: int, hourly_usd: float, seconds: float, usd: float
) -> None:
    assert cost.job_cost_usd(count * hourly_usd, seconds) == pytest.approx(usd, abs=0.005)


def test_no_price_gives_both_costs_of_the_large_machine_in_the_source() -> None:
    low, high = 59.065 * 3600 / 38454, 59.075 * 3600 / 38454  # prices that round to 59.07
    other_low, other_high = 47.245 * 3600 / 30770, 47.255 * 3600 / 30770
    assert other_high < low < high
    assert other_low < other_high


def test_candidate_whose_canary_ran_out_of_memory_is_left_out() -> None:
    points = job(lambda f: 200 * f, more=lambda f: {"failure": "exit code 1: MemoryError" if f > 0.01 else ""})
    small = forecast(Candidate(name="small", groups=("t=small:1",), points=points, hourly_usd=1.0))
    assert small.candidate.out_of_memory == 1.0
    found = decide([small, made("large", 200, 6.0), made("larger", 200, 9.0)])
    assert found is not None
    assert found.cheapest == "large"
    assert "small would most probably run out of memory" in found.sentence
