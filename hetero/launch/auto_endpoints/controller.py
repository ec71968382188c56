"""Decides how many endpoints each trainer host runs. Pure: no threads, no clock, no I/O.

There is one rule: a number of endpoints stays only if it makes steps at least 1 % shorter than the best number so far.

The search begins without endpoints. If steps wait for data, it adds as many endpoints as the data wait calls for. If
steps become shorter and still wait, it adds more. If steps become longer, the search tries half of the number that it
added. A search tries at most two numbers, and ends with the best.

A batch is requested long before the step that uses it. So a change of the number of endpoints shows only after as many
steps as batches are in flight. Each measurement skips this number of steps, and then takes the mean over equally many
steps.

The constants were chosen in a model of jobs, with fifteen seeds on each of 48 clusters
(tests/launch/auto_endpoints/test_controller_grid.py). Where the model shows what the value of a constant gains, the
text of the constant names it. Each of these 720 runs is compared with the better of two fixed placements: all
preprocessing on trainer hosts, or all of it on data hosts. In one of the runs, the steps after step 200 take more than
1 % longer than with the better placement. There, 72 batches are in flight, so the search ends only at step 329.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hetero.documents.text import counted
from hetero.launch.auto_endpoints.decisions import Action, Conditions, Decision, Phase
from hetero.launch.auto_endpoints.windows import StepTime, Window

__all__ = ["Controller", "Phase"]

_MIN_LENGTH = 20
"""Fewest steps that a measurement skips at first, and fewest steps that it then measures. With 16, 2 runs of the model
are more than 1 % behind. With 30, the first 200 steps take 9 % longer, because the first endpoints come 20 steps
later."""
_BATCHES_PER_SLOT = 2
"""Batches in flight per slot: the default of ``prefetch_factor``."""
_MATTERS = 0.01
"""Smallest relative difference of step times that matters. `benchmarks/bench_auto_hybrid.py` allows it in each row."""
_MARGIN = 3
"""Factor for the number of endpoints that the data wait calls for. A vCPU of a trainer host may be 1.6 times slower
than one of a data host, and a supply that just suffices is late at times. With 2, 14 runs of the model are more than
1 % behind."""
_TRIAL_STEPS = 80
"""After this number of measured steps with endpoints, the search tries no other number. With 60, steps of the model are
0.2 % longer, because fewer runs try half of a number that did harm. With 100, 4 runs change the number after step 200,
and 1 with 80."""
_USE_STEPS = 1000
"""Longest wait in steps until the ranks use all added endpoints, because a data set may take a minute to build. Test:
``test_controller_gives_up_endpoints_that_no_rank_uses``."""
_WATCH_STEPS = 100
"""Fewest steps of a window after the search. In the model with three times the noise of batches, 96 jobs of 3,000 steps
remove their endpoints 15 times for a new search, and 54 times with windows of 20 steps."""
_MUCH = 0.25
"""Relative change of the step time that begins a new search, which costs up to 200 steps. Test:
``test_controller_starts_over_when_conditions_change_much``."""
_REST_STEPS = 1000
"""Fewest steps between two searches that tried endpoints. This limits the cost of searches to a fifth of the steps."""


class Controller:
    """Chooses the number of endpoints of each trainer host from measurements of steps.

    Args:
        max_endpoints: Largest number of endpoints per trainer host, >= 1.
        num_hosts: Trainer hosts. All of them run the same number of endpoints.
        world_size: Ranks of the job.
        slots_per_endpoint: Batches that an endpoint computes at the same time. Above 1 only in emulation.
    """

    def __init__(
        self, *, max_endpoints: int, num_hosts: int = 1, world_size: int = 1, slots_per_endpoint: int = 1
    ) -> None:
        self.endpoints = 0
        """Endpoints that each trainer host should run now."""
        self.num_steps = 0
        """Steps so far."""
        self._max_endpoints = max_endpoints
        self._num_hosts = num_hosts
        self._world_size = world_size
        self._slots_per_endpoint = slots_per_endpoint
        # `observe` replaces these conditions before they count. Each endpoint has slots: the batches that it computes
        # at the same time.
        self._now = Conditions(num_used=0, num_running=0, num_slots=1)
        self._begin_search()

    def _begin_search(self) -> None:
        """Forget the last search, and begin to measure without endpoints. The caller has set `endpoints` to 0."""
        # Steps before this search.
        self._first_step = self.num_steps
        # Measured steps with endpoints.
        self._num_trial_steps = 0
        # The number of endpoints with the shortest steps so far, and the measurement of these steps.
        self._best_number = 0
        self._best_window: Window | None = None
        # After the search: the window that later ones are compared with, and whether the last window differed from it.
        self._settled_window: Window | None = None
        self._has_last_window_changed = False
        self._enter(Phase.STARTING)

    def observe(self, steps: Sequence[StepTime], now: Conditions) -> Decision | None:
        """Receive the steps since the last call. Return a decision if one is due.

        Args:
            steps: Complete steps, in order. May be empty.
            now: The conditions after these steps.
        """
        self._now = now
        for index, step in enumerate(steps):
            self.num_steps += 1
            decision = self._process(step)
            if decision is not None:
                # The ranks took the later steps of this call before the decision, so these steps say nothing about its
                # effect. Only count them.
                self.num_steps += len(steps) - index - 1
                return decision
        return None

    def limit(self, decision: Decision, number: int, reason: str) -> Decision:
        """Replace a decision to add endpoints, because the hosts cannot run so many.

        Args:
            decision: The last decision. It adds endpoints.
            number: Endpoints that each host can run.
            reason: Why not more.
        """
        reason = f"{decision.reason}. {reason}"
        # The hosts have no room for even one more endpoint, so the search ends.
        if number <= decision.before:
            self.endpoints = decision.before
            return self._settle(reason)
        self.endpoints = number
        return dataclasses.replace(decision, endpoints=number, reason=reason)

    def restart_window(self) -> None:
        """Measure anew and skip the first steps, because the ranks were restarted and warm up again."""
        self._enter(self.phase)

    def restart_search(self, reason: str) -> Decision | None:
        """Begin a new search without endpoints. Return the decision to remove the present ones, if any."""
        num_before, self.endpoints = self.endpoints, 0
        self._begin_search()
        return self._decision(Action.REMOVE, num_before, reason) if num_before else None

    def _process(self, step: StepTime) -> Decision | None:
        """Process one step. Return a decision if a measurement ends with this step and leads to a decision."""
        self._num_in_phase += 1
        if self.phase is Phase.STARTING:
            return self._await_use()
        is_measuring = self.phase is Phase.MEASURING
        # The first measurement of a search is the one without endpoints. Each later one is the trial of a number.
        is_trial = is_measuring and self._best_window is not None
        if is_trial:
            self._num_trial_steps += 1
        # Skip the first steps. Their batches were requested before the number changed, or before the job began.
        if self._num_in_phase <= self._window_steps:
            return None
        self._steps.append(step)
        # Windows after the search are longer, because a short window with an odd step would begin a new search.
        num_needed = self._window_steps if is_measuring else max(_WATCH_STEPS, self._window_steps)
        if len(self._steps) < num_needed:
            return None
        window = Window.of(self._steps)
        self._steps.clear()
        return self._compare(window) if is_measuring else self._watch(window)

    # Phases

    def _await_use(self) -> Decision | None:
        """Begin to measure when the ranks use all endpoints, or after a time limit.

        If no rank uses the added endpoints by then, end the search and return the decision to remove them.
        """
        num_used = self._now.num_used
        is_time_over = self._num_in_phase >= _USE_STEPS
        # The search has added endpoints to the best number so far, and the ranks use no more than this number.
        are_added_unused = self.endpoints > self._best_number >= num_used
        if is_time_over and are_added_unused:
            return self._settle(f"the ranks use only {num_used} of {counted(self.endpoints, 'endpoint')}")
        # Removed endpoints run until they have answered their requests, and take CPU time until then.
        have_removed_ended = self._now.num_running <= self.endpoints
        if is_time_over or (num_used >= self.endpoints and have_removed_ended):
            self._enter(Phase.MEASURING)
        return None

    def _compare(self, window: Window) -> Decision:
        """Compare a measurement with the best one so far. Try another number of endpoints, or end the search."""
        best = self._best_window
        following: int | None = None
        if best is None:
            reason = f"a step of {_ms(window.step_s)} waits {_ms(window.wait_s)} for data"
        else:
            reason = (
                f"a step takes {_ms(window.step_s)} with {counted(self.endpoints, 'endpoint')} and "
                f"{_ms(best.step_s)} with {self._best_number}, and waits {_ms(window.wait_s)} for data"
            )
        if best is None or window.step_s < best.step_s * (1 - _MATTERS):
            # This number is the best so far. A larger one can only help if steps still wait for data.
            self._best_number, self._best_window = self.endpoints, window
            if window.wait_share >= _MATTERS:
                following = self._larger(window)
        elif window.step_s > best.step_s * (1 + _MATTERS):
            # Steps became longer, probably because endpoints take CPU time from the ranks. Try half of the added ones.
            following = self._if_new((self._best_number + self.endpoints) // 2)
        # Otherwise the step time has not changed. Half of the added endpoints would not change it either, so the search
        # ends.
        return self._settle(reason) if following is None else self._go_to(following, reason)

    def _watch(self, window: Window) -> Decision | None:
        """After the search, compare a window with the first one. If conditions have changed, begin a new search."""
        settled = self._settled_window
        # This window is the first one after a search with trials. Later windows are compared with it.
        if settled is None:
            self._settled_window = window
            return None
        # If the search tried endpoints, steps that become longer or shorter are a reason for another search.
        if self._num_trial_steps:
            has_changed = abs(window.step_s - settled.step_s) > _MUCH * settled.step_s
        else:
            # The search tried no endpoints, because steps did not wait for data. So only a data wait matters.
            has_changed = window.wait_share >= _MATTERS
        # Act only on two changed windows in a row. A single one may be a checkpoint or the beginning of an epoch.
        is_second = has_changed and self._has_last_window_changed
        self._has_last_window_changed = has_changed
        # Trials of endpoints may make steps longer, so a search with trials is repeated only after a while. A search
        # without trials has cost nothing.
        is_too_early = self._num_trial_steps > 0 and self.num_steps - self._first_step < _REST_STEPS
        if not is_second or is_too_early:
            return None
        return self.restart_search(
            f"conditions changed: a step takes {_ms(window.step_s)} and waits {_ms(window.wait_s)} for data, "
            f"and {_ms(settled.step_s)} and {_ms(settled.wait_s)} when the number was chosen"
        )

    # Parts of decisions

    def _larger(self, window: Window) -> int | None:
        """Return the larger number of endpoints to try after the best one. None if the search has tried enough."""
        # If ranks compute for half of the time and wait for data in the other half, they need twice as many slots. The
        # share has a lower bound, because steps that only wait would need infinitely many slots.
        share_without_wait = max(1 - window.wait_share, _MATTERS)
        missing_slots = self._now.num_slots / share_without_wait - self._now.num_slots
        # `_MARGIN` is needed because CPUs of trainer hosts may be slower, and a supply that just suffices is late at
        # times.
        missing_per_host = missing_slots / self._num_hosts / self._slots_per_endpoint
        return self._if_new(min(self._best_number + math.ceil(_MARGIN * missing_per_host), self._max_endpoints))

    def _if_new(self, number: int) -> int | None:
        """Return a number of endpoints to try. None if it is not above the best, or the search has tried enough."""
        return number if number > self._best_number and self._num_trial_steps < _TRIAL_STEPS else None

    def _go_to(self, endpoints: int, reason: str) -> Decision:
        """Change the number of endpoints, and wait until the ranks use them."""
        num_before, self.endpoints = self.endpoints, endpoints
        self._enter(Phase.STARTING)
        return self._decision(Action.ADD if endpoints > num_before else Action.REMOVE, num_before, reason)

    def _settle(self, reason: str) -> Decision:
        """End the search with the best number of endpoints."""
        num_before, self.endpoints = self.endpoints, self._best_number
        # `_watch` compares later windows with this one. After a trial, `_watch` takes the first window that it gets,
        # because the window of a trial is short. Without a trial, the search has only one window.
        self._settled_window = None if self._num_trial_steps else self._best_window
        self._enter(Phase.SETTLED)
        return self._decision(Action.SETTLE, num_before, reason)

    def _decision(self, action: Action, num_before: int, reason: str) -> Decision:
        return Decision(action=action, step=self.num_steps, before=num_before, endpoints=self.endpoints, reason=reason)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._steps: list[StepTime] = []
        self._num_in_phase = 0

    @property
    def _window_steps(self) -> int:
        """Number of steps that a measurement skips. In a search, the measurement then takes equally many steps.

        The number is at least the number of batches in flight per rank.
        """
        # Slots that began together end together, so batches come in bursts. Two whole bursts are in flight.
        burst_steps = math.ceil(self._now.num_slots / self._world_size)
        return max(_MIN_LENGTH, _BATCHES_PER_SLOT * burst_steps)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
