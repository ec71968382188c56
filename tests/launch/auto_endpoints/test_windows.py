from __future__ import annotations

import pytest

from hetero.launch.auto_endpoints.windows import StepTime, Window


def test_window_has_means() -> None:
    window = Window.of([StepTime(compute_s=1.0, wait_s=wait_s) for wait_s in (0.0, 1.0, 0.0, 1.0)])
    assert (window.step_s, window.wait_s) == (1.5, 0.5)
    assert window.wait_share == pytest.approx(1 / 3)


def test_window_leaves_out_steps_with_a_pause() -> None:
    usual = [StepTime(compute_s=0.1, wait_s=0.02)] * 19
    window = Window.of([*usual, StepTime(compute_s=5.0, wait_s=0.5)])
    assert (window.step_s, window.wait_s) == (pytest.approx(0.12), pytest.approx(0.02))


def test_window_counts_long_steps_that_are_no_pauses() -> None:
    waiting = [StepTime(compute_s=0.04 if number == 5 else 0.01, wait_s=0.1) for number in range(24)]
    assert Window.of(waiting).step_s > 0.111, "the long compute is short beside the wait"
    waits = [StepTime(compute_s=0.1, wait_s=0.7 if number % 8 == 0 else 0.0) for number in range(64)]
    assert Window.of(waits).wait_share > 0.4, "a long wait counts as a pause"


def test_window_of_steps_without_any_time_waits_for_nothing() -> None:
    assert Window.of([StepTime(compute_s=0.0, wait_s=0.0)]).wait_share == 0.0
