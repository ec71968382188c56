"""The phases of a profile run, without clocks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from hetero.loaders.measuring.phases import ENOUGH_S, ENOUGH_STEPS, EXCLUDED_STEPS, Phase, Phases
from hetero.metrics.profile.parts import MIN_STEPS


@dataclass
class Run:
    """A loader whose steps take a stated time."""

    phases: Phases
    elapsed_s: float = 0.0

    def until(self, phase: Phase, step_s: float, *, wait_s: float = 0.0, pause_s: float = 0.0) -> int:
        """Take steps until a phase begins, and return how many."""
        count = 0
        while self.phases.phase is not phase:
            self.elapsed_s += step_s + pause_s
            self.phases.step(step_s, wait_s, elapsed_s=self.elapsed_s)
            count += 1
            assert count < 100_000
        return count


def test_phases_of_long_enough_steps_end_after_their_number_of_steps() -> None:
    run = Run(Phases(10))
    assert run.until(Phase.RUNNING, 0.2) == 10
    assert run.until(Phase.HEADSPACE, 0.2, wait_s=0.15) == ENOUGH_STEPS
    assert run.until(Phase.DONE, 0.125) == EXCLUDED_STEPS + ENOUGH_STEPS
    assert run.phases.step_s == [0.2] * ENOUGH_STEPS
    assert run.phases.data_wait_s == [0.15] * ENOUGH_STEPS
    assert run.phases.headspace_s == [0.125] * ENOUGH_STEPS
    assert run.phases.num_steps_total == 10 + 2 * ENOUGH_STEPS + EXCLUDED_STEPS


def test_phase_of_short_steps_lasts_for_its_time() -> None:
    run = Run(Phases(10))
    run.until(Phase.RUNNING, 2**-10)
    assert run.until(Phase.HEADSPACE, 2**-10) == ENOUGH_S * 2**10
    assert run.until(Phase.DONE, 2**-10) == ENOUGH_S * 2**10 + EXCLUDED_STEPS


def test_phases_of_long_steps_end_at_their_time_limits_within_a_minute() -> None:
    run = Run(Phases(10))
    run.until(Phase.DONE, 1.5, wait_s=1.0)
    assert len(run.phases.step_s) >= 10
    assert len(run.phases.headspace_s) >= MIN_STEPS
    assert run.elapsed_s <= 60.0


def test_phases_of_endless_steps_have_the_least_number_of_steps() -> None:
    run = Run(Phases(10))
    run.until(Phase.DONE, 100.0)
    assert (len(run.phases.step_s), len(run.phases.headspace_s)) == (MIN_STEPS, MIN_STEPS)


@pytest.mark.parametrize(("window", "warmup", "running"), [(1, 10, 50), (2, 10, 50), (16, 16, 64), (72, 72, 216)])
def test_phases_have_whole_bursts_of_a_loader_that_fetches_ahead(window: int, warmup: int, running: int) -> None:
    run = Run(Phases(10))
    run.phases.window = window
    assert run.until(Phase.RUNNING, 2**-4) == warmup
    steps = run.until(Phase.HEADSPACE, 2**-4)
    assert steps == max(running, ENOUGH_S * 2**4)


def test_phases_do_not_wait_for_pauses_between_passes() -> None:
    run = Run(Phases(2))
    run.until(Phase.DONE, 0.1, pause_s=20.0)
    assert len(run.phases.step_s) >= MIN_STEPS
    assert run.phases.num_steps_total < 30


def test_loader_repeats_batches_from_the_headspace_phase_on() -> None:
    run = Run(Phases(1))
    repeats = {}
    for phase in (Phase.RUNNING, Phase.HEADSPACE, Phase.DONE):
        repeats[run.phases.phase] = run.phases.repeats
        run.until(phase, 0.2)
    repeats[Phase.DONE] = run.phases.repeats
    assert repeats == {Phase.WARMUP: False, Phase.RUNNING: False, Phase.HEADSPACE: True, Phase.DONE: True}


def test_first_steps_of_the_headspace_phase_do_not_count() -> None:
    run = Run(Phases(1))
    run.until(Phase.HEADSPACE, 0.2)
    for _ in range(EXCLUDED_STEPS):
        assert not run.phases.measures_headspace
        run.phases.step(9.0, 0.0, elapsed_s=20.0)
    assert run.phases.measures_headspace
    assert run.phases.headspace_s == []


def test_loader_without_warmup_is_measured_from_the_first_step() -> None:
    phases = Phases(0)
    phases.step(0.5, 0.25, elapsed_s=0.5)
    assert (phases.phase, phases.step_s, phases.data_wait_s) == (Phase.RUNNING, [0.5], [0.25])


@pytest.mark.parametrize(
    ("phase", "planned"), [(Phase.WARMUP, 10), (Phase.RUNNING, 50), (Phase.HEADSPACE, 55), (Phase.DONE, 0)]
)
def test_planned_steps_of_a_phase_are_known(phase: Phase, planned: int) -> None:
    run = Run(Phases(10))
    run.until(phase, 0.2)
    assert (run.phases.num_steps, run.phases.num_planned) == (0, planned)


def test_steps_after_the_end_are_only_counted() -> None:
    run = Run(Phases(1))
    run.until(Phase.DONE, 0.2)
    measured = len(run.phases.headspace_s)
    run.phases.step(5.0, 0.0, elapsed_s=99.0)
    assert (run.phases.phase, run.phases.num_steps, len(run.phases.headspace_s)) == (Phase.DONE, 1, measured)
