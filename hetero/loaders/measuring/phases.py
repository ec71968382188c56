"""The phases of a profile run in one loader. Pure: no clock, no threads.

    WARMUP      steps that are not measured, because caches fill and the framework tunes itself
    RUNNING     the job as it runs
    HEADSPACE   the loader repeats batches that it has delivered before, so the step never waits for data
    DONE        everything is measured. The loader goes on as in HEADSPACE until the job is stopped

    WARMUP -> RUNNING -> HEADSPACE -> DONE

A phase ends when it has enough steps and time. It also ends when its time limit has passed, but a measured phase then
goes on until it has `MIN_STEPS` steps. The time limits of all phases together are less than a minute.
"""

from __future__ import annotations

import enum
import math

from hetero.metrics.profile.parts import MIN_STEPS, PHASES

__all__ = ["ENOUGH_S", "ENOUGH_STEPS", "EXCLUDED_STEPS", "Phase", "Phases"]

ENOUGH_STEPS = 50
"""Steps that a measured phase needs before it may end."""
ENOUGH_S = 5.0
"""Seconds of steps that a measured phase needs before it may end."""
_MIN_WARMUP_STEPS = 3
"""Smallest number of warm-up steps. The first steps of a job start its endpoints, and compile and allocate on its
accelerator."""
EXCLUDED_STEPS = 5
"""Number of first steps of the headspace phase that are not measured. The first step still computes on a fetched batch,
and ranks may enter the phase one step apart."""
_MIN_WINDOWS = 3


class Phase(enum.Enum):
    """A phase of a profile run. The value is its name for users."""

    WARMUP = PHASES[0]
    RUNNING = PHASES[1]
    HEADSPACE = PHASES[2]
    DONE = PHASES[3]


_END_S = {Phase.WARMUP: 15.0, Phase.RUNNING: 36.0, Phase.HEADSPACE: 57.0}
"""Latest end of each phase, in seconds after the first delivery."""


class Phases:
    """The phase that a loader is in, and the steps that were measured.

    Args:
        warmup_steps: Steps of the warm-up, at least 0.
    """

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self.phase = Phase.WARMUP if warmup_steps else Phase.RUNNING
        """The phase of the next delivery."""
        self.window = 1
        """Number of steps whose batches the loader fetches ahead. Batches may arrive in bursts of this length. Then
        many come at once, and none for some time. See `num_planned`."""
        self.num_steps = 0
        """Steps of this phase so far."""
        self.num_steps_total = 0
        """Steps so far, in all phases."""
        self.total_s = 0.0
        """Seconds of all steps so far."""
        self.step_s: list[float] = []
        """Seconds of each measured step of the RUNNING phase."""
        self.data_wait_s: list[float] = []
        """Data wait of each of these steps, in seconds."""
        self.headspace_s: list[float] = []
        """Seconds of each measured step of the HEADSPACE phase. It repeats batches, so these steps do not wait."""
        self._phase_s = 0.0
        """Seconds of the steps of this phase that are measured."""

    @property
    def num_planned(self) -> int:
        """Number of steps that this phase needs before it may end. 0 if all phases are over."""
        # Measure several whole windows, because batches may arrive in bursts of one window. The steps of a part of a
        # burst would show a wrong mean wait.
        num_windows = max(_MIN_WINDOWS, math.ceil(ENOUGH_STEPS / self.window))
        counts = {
            # The first burst must not be measured, because its batches were fetched before the first step.
            Phase.WARMUP: max(self._warmup_steps, self.window),
            Phase.RUNNING: num_windows * self.window,
            Phase.HEADSPACE: EXCLUDED_STEPS + ENOUGH_STEPS,
        }
        return counts.get(self.phase, 0)

    @property
    def repeats(self) -> bool:
        """Whether the loader repeats batches."""
        return self.phase in (Phase.HEADSPACE, Phase.DONE)

    @property
    def measures_headspace(self) -> bool:
        """Whether the next step counts as a step of the headspace phase."""
        return self.phase is Phase.HEADSPACE and self.num_steps >= EXCLUDED_STEPS

    def step(self, step_s: float, data_wait_s: float, *, elapsed_s: float, is_typical: bool = True) -> None:
        """Record a complete step, and enter the next phase if this one is over.

        Args:
            step_s: Time of the step, including the wait.
            data_wait_s: Seconds of waiting for the batch that ended the step.
            elapsed_s: Seconds since the first delivery.
            is_typical: Whether the step may be measured. If not, the step does not count as a step of the phase either.
        """
        self.num_steps_total += 1
        self.total_s += step_s
        if not is_typical:
            return
        if self.phase is Phase.RUNNING:
            self.step_s.append(step_s)
            self.data_wait_s.append(data_wait_s)
        elif self.measures_headspace:
            self.headspace_s.append(step_s)
        # The first steps of the HEADSPACE phase are not measured (`EXCLUDED_STEPS`). So they count as steps of the
        # phase, but not towards the seconds of measured steps that it needs.
        if self.phase is not Phase.HEADSPACE or self.measures_headspace:
            self._phase_s += step_s
        self.num_steps += 1
        if self.phase is not Phase.DONE and self._is_phase_over(elapsed_s):
            self.phase = Phase(PHASES[PHASES.index(self.phase.value) + 1])
            self.num_steps = 0
            self._phase_s = 0.0

    def _is_phase_over(self, elapsed_s: float) -> bool:
        """Return whether the phase has enough steps and time, or whether its time limit has passed.

        ``elapsed_s`` are the seconds since the first delivery. The time limit counts from there. The warm-up may end
        without `ENOUGH_S` seconds of steps, because its steps are not measured.
        """
        if self.num_steps >= self.num_planned and (self.phase is Phase.WARMUP or self._phase_s >= ENOUGH_S):
            return True
        # A phase needs some steps even after its time limit, because it must be measured.
        min_steps = {
            Phase.WARMUP: _MIN_WARMUP_STEPS,
            Phase.RUNNING: MIN_STEPS,
            Phase.HEADSPACE: EXCLUDED_STEPS + MIN_STEPS,
        }[self.phase]
        return elapsed_s >= _END_S[self.phase] and self.num_steps >= min_steps
