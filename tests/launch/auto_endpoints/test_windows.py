from __future__ import annotations

import math
import random

import pytest

from hetero.launch.auto_endpoints.windows import StepTime, Verdict, Window, compare


def steps(mean_s: float, *, count: int, spread: float = 0.1, seed: int = 0, wait_s: float = 0.0) -> Window:
    draw = random.Random(seed)
    return Window.of(
        [StepTime(compute_s=mean_s * draw.gauss(1.0, spread), wait_s=wait_s) for _ in range(count)],
    )


def test_window_has_means_and_errors() -> None:
    window = Window.of([StepTime(compute_s=1.0, wait_s=wait_s) for wait_s in (0.0, 1.0, 0.0, 1.0)])
    assert (window.num_steps, window.compute_s, window.wait_s, window.step_s) == (4, 1.0, 0.5, 1.5)
    assert window.wait_share == pytest.approx(1 / 3)
    assert window.wait_error_s == pytest.approx(math.sqrt(1 / 3) / 2)


def test_window_of_one_step_proves_nothing() -> None:
    one = Window.of([StepTime(compute_s=1.0, wait_s=9.0)])
    assert not one.surely_waits(0.01)
    assert compare(one, steps(5.0, count=50)) is Verdict.SAME


def test_error_of_bursts_is_the_error_of_their_means() -> None:
    burst = [StepTime(compute_s=0.1, wait_s=0.7 if number % 8 == 0 else 0.0) for number in range(64)]
    assert Window.of(burst).step_error_s == pytest.approx(0.0, abs=1e-12)
    assert Window.of(burst).surely_waits(0.4)


def test_window_leaves_out_steps_with_a_pause() -> None:
    usual = [StepTime(compute_s=0.1, wait_s=0.02)] * 19
    window = Window.of([*usual, StepTime(compute_s=5.0, wait_s=0.5)])
    assert (window.num_steps, window.compute_s, window.wait_s) == (20, pytest.approx(0.1), pytest.approx(0.02))
    assert window.step_error_s == pytest.approx(0.0, abs=1e-12)


def test_window_counts_long_steps_that_are_no_pauses() -> None:
    accumulated = [StepTime(compute_s=0.4 if number % 3 == 0 else 0.1, wait_s=0.0) for number in range(24)]
    assert Window.of(accumulated).compute_s == pytest.approx(0.2), "a third of the steps are long"
    waiting = [StepTime(compute_s=0.04 if number == 5 else 0.01, wait_s=0.1) for number in range(24)]
    assert Window.of(waiting).compute_s > 0.011, "the long one is short beside the wait"


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.3, Verdict.LONGER), (0.7, Verdict.SHORTER), (1.0, Verdict.SAME), (1.005, Verdict.SAME)]
)
def test_compare_finds_differences_beyond_the_spread(factor: float, verdict: Verdict) -> None:
    assert compare(steps(1.0, count=40), steps(factor, count=40, seed=1)) is verdict


def test_compare_ignores_less_than_one_percent_without_spread() -> None:
    before = steps(1.0, count=40, spread=0.0)
    assert compare(before, steps(1.009, count=40, spread=0.0)) is Verdict.SAME
    assert compare(before, steps(1.011, count=40, spread=0.0)) is Verdict.LONGER


def test_compare_of_equal_jobs_is_seldom_wrong() -> None:
    pairs = [(steps(1.0, count=20, seed=2 * n), steps(1.0, count=8, seed=2 * n + 1)) for n in range(500)]
    assert sum(compare(before, after) is not Verdict.SAME for before, after in pairs) <= 15
