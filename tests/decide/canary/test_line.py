"""The fitted line: its draws contain the truth as often as stated, and its tests find curves."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.decide.canary.forecast import _MEMORY
from hetero.decide.canary.line import NUM_DRAWS, Form, Noise, constant_draws, fit_line, fit_ratio, interval

NOISE = Noise(relative=0.02, absolute=0.02)
X = [fraction for fraction in (0.01, 0.02, 0.03) for _ in range(3)]


def observed(random: np.random.Generator, fixed: float, growing: float, power: float, noise: float) -> list[float]:
    return [(fixed + growing * x**power) * (1 + noise * random.normal()) for x in X]


@pytest.mark.parametrize(
    ("fixed", "noise"),
    [(0.5, 0.03), *(pytest.param(*case, marks=pytest.mark.long) for case in ((0.5, 0.01), (5.0, 0.01)))],
)
def test_interval_contains_the_whole_about_nine_times_of_ten(fixed: float, noise: float) -> None:
    random = np.random.default_rng(3)
    hits = 0
    for _ in range(120):
        power = 1 + 0.015 * random.normal()
        y = observed(random, fixed, 100.0, power, noise)
        whole = (fixed + 100.0) * (1 + noise * random.normal())
        line = fit_line(X, y, random, noise=NOISE, curvature=0.015)
        _, low, high = interval(line.run_draws)
        hits += low <= whole <= high
    assert 0.8 <= hits / 120 <= 0.99


def test_parts_of_exact_data_are_found() -> None:
    y = [2.0 + 300.0 * x for x in X]
    line = fit_line(X, y, np.random.default_rng(0), noise=NOISE, curvature=0.0)
    assert np.median(line.mean_draws) == pytest.approx(302.0, rel=0.02)
    assert np.median(line.fixed_draws) == pytest.approx(2.0, rel=0.1)
    assert line.growth > 10


@pytest.mark.parametrize("power", [0.4, 2.0])
def test_curve_has_an_exponent_that_excludes_one(power: float) -> None:
    y = observed(np.random.default_rng(1), 0.0, 100.0, power, 0.01)
    line = fit_line(X, y, np.random.default_rng(0), noise=NOISE, curvature=0.015)
    assert line.exponent is not None
    assert line.exponent.low <= power <= line.exponent.high
    assert not line.exponent.low <= 1 <= line.exponent.high


def test_curve_fails_the_test_of_linearity_and_a_line_passes() -> None:
    random = np.random.default_rng(2)
    curve = fit_line(X, observed(random, 0.2, 300.0, 2.0, 0.01), random, noise=NOISE, curvature=0.0)
    straight = fit_line(X, observed(random, 0.2, 100.0, 1.0, 0.01), random, noise=NOISE, curvature=0.0)
    assert curve.lack_of_fit is not None
    assert straight.lack_of_fit is not None
    assert curve.lack_of_fit < 0.003 < straight.lack_of_fit


def test_line_through_the_origin_is_more_certain_than_one_with_a_fixed_part() -> None:
    y = observed(np.random.default_rng(4), 0.0, 100.0, 1.0, 0.02)
    widths = {}
    for form in (Form.BOTH, Form.THROUGH_ORIGIN):
        line = fit_line(X, y, np.random.default_rng(0), noise=NOISE, curvature=0.0, form=form)
        middle, low, high = interval(line.mean_draws)
        widths[form] = (high - low) / middle
    assert widths[Form.THROUGH_ORIGIN] < 0.7 * widths[Form.BOTH]


def test_constant_figure_stays_constant() -> None:
    random = np.random.default_rng(5)
    y = [7e8 * (1 + 0.001 * random.normal()) for _ in X]
    noise = Noise(relative=0.01, absolute=1e6)
    line = fit_line(X, y, random, noise=noise, curvature=0.015, form=Form.MAYBE_CONSTANT)
    assert np.median(line.run_draws) == pytest.approx(7e8, rel=0.02)


def test_one_run_that_was_disturbed_hardly_changes_the_line() -> None:
    y = observed(np.random.default_rng(8), 0.5, 100.0, 1.0, 0.01)
    disturbed = [*y[:-1], 1.6 * y[-1]]
    lines = [fit_line(X, each, np.random.default_rng(0), noise=NOISE, curvature=0.015) for each in (y, disturbed)]
    assert np.median(lines[1].run_draws) == pytest.approx(np.median(lines[0].run_draws), rel=0.15)


def test_no_part_is_negative() -> None:
    y = [3.0 - 20 * x for x in X]
    line = fit_line(X, y, np.random.default_rng(0), noise=NOISE, curvature=0.015)
    assert line.fixed_draws.min() >= 0
    assert (line.mean_draws - line.fixed_draws).min() >= 0
    assert line.growth < 0


def test_ratio_forgets_the_fixed_part_in_a_long_run() -> None:
    seconds = [1.0, 1.5, 2.0, 1.1, 1.4, 2.1]
    used = [0.5 + 2.0 * value for value in seconds]
    draws = fit_ratio(seconds, used, np.full(NUM_DRAWS, 100.0), np.random.default_rng(0), noise=NOISE)
    assert np.median(draws) / 100 == pytest.approx(2.0, rel=0.03)


def test_constant_draws_have_the_mean_and_the_spread_of_the_values() -> None:
    draws = constant_draws([4.0, 4.2, 3.9, 4.1], np.random.default_rng(0), noise=NOISE)
    assert np.mean(draws) == pytest.approx(4.05, abs=0.02)
    assert 0.05 < np.std(draws) < 0.25


def test_draws_of_the_same_runs_are_the_same() -> None:
    y = observed(np.random.default_rng(6), 1.0, 100.0, 1.0, 0.02)
    lines = [fit_line(X, y, np.random.default_rng(0), noise=NOISE, curvature=0.015) for _ in range(2)]
    assert (lines[0].run_draws == lines[1].run_draws).all()


@pytest.mark.parametrize("last", [3.05, 3.3, 3.6])
def test_line_whose_fixed_part_would_be_negative_goes_through_the_origin(last: float) -> None:
    x, y = [0.01, 0.02, 0.03] * 3, [1.0, 2.0, last] * 3
    y = [value * (1 + 0.01 * (i % 3 - 1)) for i, value in enumerate(y)]
    line = fit_line(x, y, np.random.default_rng(0), noise=Noise(relative=0.02, absolute=0.001), curvature=0.0)
    _, low, high = interval(line.mean_draws)
    slopes = [value / fraction for fraction, value in zip(x, y, strict=True)]
    assert min(slopes) < low < high < max(slopes)  # and not above all runs
    assert high > 1.001 * low


def test_interval_is_hardly_narrower_than_the_classical_one_if_the_noise_exceeds_its_prior() -> None:
    x = np.array([0.01, 0.02, 0.03] * 3)
    columns = np.stack([np.ones(len(x)), x], axis=1)
    at_whole = np.ones(2)
    leverage = at_whole @ np.linalg.inv(columns.T @ columns) @ at_whole
    ratios = []
    for seed in range(30):
        y = 3e8 + 1e9 * x + 5e6 * np.random.default_rng(seed).standard_normal(len(x))
        _, (rest,), _, _ = np.linalg.lstsq(columns, y, rcond=None)
        classical = 1.895 * np.sqrt(rest / 7 * (1 + leverage))  # Student's t with 7 degrees of freedom, 90 %
        line = fit_line(list(x), list(y), np.random.default_rng(0), noise=_MEMORY, curvature=0.0)
        _, low, high = interval(line.run_draws)
        ratios.append((high - low) / 2 / classical)
    assert np.mean(ratios) > 0.9
    assert min(ratios) > 0.8
