"""Decides how many endpoints each trainer host runs. Pure: no threads, no clock, no I/O.

The search begins without endpoints. If steps wait for data, it adds one endpoint, then two in total, four, eight, and
so on. One by one, a host of 96 vCPUs would need thousands of steps. Each addition is a trial of a few steps. If steps
become longer, the added endpoints are removed and the steps are measured again without them. If they are then shorter
again, the addition did harm, and the next trial adds half as many. If they are not, something else made them longer,
and the trial is repeated.

A batch is requested long before its turn, so an addition shortens the steps only after as many steps as batches are in
flight. The search therefore goes on while a trial does no harm, but at most to the number of endpoints that the data
wait calls for. At its end it waits until the effect must be there, and compares with the steps before the first
addition. Endpoints that did not shorten the steps are removed, at once or after another 200 steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hetero.documents.text import counted
from hetero.launch.auto_endpoints.decisions import Action, Conditions, Decision, Phase
from hetero.launch.auto_endpoints.windows import StepTime, Verdict, Window, compare
from hetero.metrics.headspace import needed_for_headspace

__all__ = ["Controller", "Phase"]

_WARMUP_STEPS = 10
_MAX_WARMUP_STEPS = 40
_BASELINE_STEPS = 20
_LONG_BASELINE_STEPS = 40
"""Steps of the baseline if they wait little."""
_TRIAL_STEPS = 8
_LONG_TRIAL_STEPS = 20
"""Steps of a trial that shows that the data wait is gone."""
_RECHECK_STEPS = 24
"""Steps until a trial is repeated if steps are not surely shorter without its endpoints."""
_SKIPPED_STEPS = 2
"""Steps after a change that no window contains, because the change came in the middle of them."""
_CHECK_STEPS = 30
_LONG_CHECK_STEPS = 60
"""Longest check in steps. It ends then even if the two step times are not surely different."""
_PATIENT_STEPS = 50
"""Longest wait in steps until the ranks use all added endpoints. Then the trial begins if they use some of them."""
_USE_STEPS = 1000
"""Longest wait in steps until the ranks use any of the added endpoints. Then the added endpoints are removed."""
_WATCH_STEPS = 50
_SEARCH_STEPS = 180
"""Longest search in steps. After that it adds no endpoints. While endpoints start, at most 20 steps count."""
_MAX_STARTING_STEPS = 20
_PROOF_STEPS = 200
"""Steps after the search that show whether endpoints help, if the search did not show it."""
_REST_STEPS = 1000
"""Fewest steps between two searches."""
_DATA_BOUND = 0.01
"""Smallest share of data wait that endpoints are added for. With less, they could shorten a step by less than 1 %."""
_WAITS_MUCH = 0.1
"""Share of data wait that a short baseline shows for sure."""
_BACK_IN_WAIT = 0.05
"""Share of data wait that begins a new search in a job that did not wait for data."""
_MUCH = 0.25
"""Relative change of the step time that begins a new search."""
_HIGH_PRESSURE = 0.5
"""CPU pressure that shows short CPUs."""
_MARGIN = 1.5
"""Factor for the number of endpoints that the data wait calls for. A vCPU of a trainer host is often slower than one of
a data host: 1.6 times in the published PyTorch example."""
_MAX_REPEATS = 2
_BATCHES_PER_SLOT = 2
"""Batches in flight per slot: the default of ``prefetch_factor``."""


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
        self.phase = Phase.WARMUP
        self.endpoints = 0
        """Endpoints that each trainer host should run now."""
        self.num_steps = 0
        """Steps so far."""
        self._num_ignored = 0  # steps to ignore from now on
        self._max_endpoints = max_endpoints
        self._num_hosts = num_hosts
        self._world_size = world_size
        self._slots_per_endpoint = slots_per_endpoint
        self._now = Conditions(num_used=0, num_running=0, num_slots=1)
        self._steps: list[StepTime] = []  # the current window
        self._num_in_phase = 0
        self._last_search_step = 0
        self._begin_search()

    def _begin_search(self) -> None:
        self._limit = self._max_endpoints
        self._good = 0  # the largest number of endpoints that did no harm
        self._bad: int | None = None  # the smallest number that did harm
        self._wanted = 1  # the number that the data wait calls for
        self._num_repeats = 0
        self._has_spare = False
        self._is_unproven = False
        self._lag_before = 0
        self._baseline: Window | None = None
        self._reference: Window | None = None  # a trial is compared with these steps
        self._trial: Window | None = None
        self._tried = 0
        self._num_searched = 0
        self._num_odd = 0  # successive windows after the search whose steps had changed

    def observe(self, steps: Sequence[StepTime], now: Conditions) -> Decision | None:
        """Receive the steps since the last call. Return a decision if one is due.

        Args:
            steps: Complete steps, in order. May be empty.
            now: The conditions after these steps.
        """
        self._now = now
        for index, step in enumerate(steps):
            self.num_steps += 1
            decision = self._take(step)
            if decision is not None:
                self.num_steps += len(steps) - index - 1
                return decision
        return None

    def limit(self, decision: Decision, number: int, reason: str) -> Decision:
        """Replace a decision to add endpoints, because the hosts cannot run so many. This search adds no more.

        Args:
            decision: The last decision. It adds endpoints.
            number: Endpoints that each host can run.
            reason: Why not more.
        """
        self._limit = max(number, decision.before)
        self.endpoints = self._limit
        if self._limit > decision.before:
            return dataclasses.replace(decision, endpoints=self._limit, reason=f"{decision.reason}. {reason}")
        window = self._reference
        assert window is not None
        if not self.endpoints:
            return self._settle(window, f"{decision.reason}. {reason}")
        self._enter(Phase.CHECK)
        return self._decision(Action.SETTLE, self.endpoints, f"{decision.reason}. {reason}")

    def restart_window(self) -> None:
        """Forget the current window and ignore some steps, because the ranks were restarted and warm up again."""
        self._steps.clear()
        self._num_in_phase = 0
        if self.phase is not Phase.WARMUP:
            self._num_ignored = self._num_warmup

    def restart_search(self, reason: str) -> Decision | None:
        """Begin a new search without endpoints. Return the decision that removes the present ones, None without any."""
        before, self.endpoints = self.endpoints, 0
        self._begin_search()
        self._enter(Phase.WARMUP)
        return self._decision(Action.REMOVE, before, reason) if before else None

    def _take(self, step: StepTime) -> Decision | None:
        if self._num_ignored:
            self._num_ignored -= 1
            return None
        self._num_in_phase += 1
        self._num_searched += self.phase is not Phase.STARTING or self._num_in_phase <= _MAX_STARTING_STEPS
        match self.phase:
            case Phase.WARMUP:
                if self._num_in_phase >= self._num_warmup and self._now.num_running <= self.endpoints:
                    self._enter(Phase.BASELINE)
                return None
            case Phase.BASELINE:
                return self._measure_baseline(step)
            case Phase.STARTING:
                return self._await_use()
            case Phase.TRIAL:
                return self._try(step)
            case Phase.RECHECK:
                return self._recheck(step)
            case Phase.CHECK:
                return self._check(step)
            case Phase.REVIEW:
                return self._review(step)
            case Phase.SETTLED:
                return self._watch(step)

    # Phases

    def _measure_baseline(self, step: StepTime) -> Decision | None:
        window = self._add(step, at_least=_BASELINE_STEPS, skipped=0)
        if window is None:
            return None
        if not window.surely_waits(_WAITS_MUCH):
            if window.num_steps < max(_LONG_BASELINE_STEPS, self._lag):
                return None
            if window.wait_share < _DATA_BOUND:
                return self._settle(window, f"a step of {_ms(window.step_s)} waits only {_ms(window.wait_s)} for data")
        self._baseline = self._reference = window
        self._set_wanted(window)
        return self._go_to(1, f"a step of {_ms(window.step_s)} waits {_ms(window.wait_s)} for data")

    def _await_use(self) -> Decision | None:
        num_used = self._now.num_used
        if num_used >= self.endpoints or (num_used > self._good and self._num_in_phase >= _PATIENT_STEPS):
            self._enter(Phase.TRIAL)
        elif self._num_in_phase >= _USE_STEPS:
            window = self._reference
            assert window is not None
            unused = self.endpoints - max(num_used, self._good)
            return self._settle(
                window, f"the ranks did not use {unused} of {counted(self.endpoints, 'endpoint')}", at=self._good
            )
        return None

    def _try(self, step: StepTime) -> Decision | None:
        window = self._add(step, at_least=_TRIAL_STEPS)
        if window is None:
            return None
        assert self._reference is not None
        verdict = compare(self._reference, window)
        if verdict is Verdict.LONGER:
            self._trial, self._tried = window, self.endpoints
            reason = f"a step takes {_ms(window.step_s)}, and {_ms(self._reference.step_s)} before"
            return self._remove(reason)
        # The wait is gone only if it does not come back with the next burst of batches.
        if window.wait_share < _DATA_BOUND and window.num_steps < max(_LONG_TRIAL_STEPS, self._lag):
            return None
        # Keep the endpoints.
        self._good = self.endpoints
        if verdict is Verdict.SHORTER:
            self._reference = window
        following = self._next() if window.wait_share >= _DATA_BOUND else None
        if following is None or (verdict is Verdict.SAME and self._is_pressed):
            self._enter(Phase.CHECK)
            return None
        return self._go_to(following, self._figures(window))

    def _recheck(self, step: StepTime) -> Decision | None:
        if self._now.num_running > self.endpoints:  # some still finish their batches
            self._num_in_phase = 0
            return None
        window = self._add(step, at_least=_TRIAL_STEPS)
        if window is None:
            return None
        assert self._trial is not None
        is_harm = compare(window, self._trial) is Verdict.LONGER
        if not is_harm and window.num_steps < _RECHECK_STEPS:
            return None
        self._num_repeats += not is_harm
        if is_harm or self._num_repeats > _MAX_REPEATS:
            self._bad = self._tried
            reason = f"{counted(self._tried, 'endpoint')} did harm: {self._figures(window)} now"
        else:
            self._reference = window
            if not self._good:
                self._baseline = window
            reason = f"steps are not shorter without them: {self._figures(window)}"
        following = self._next()
        if following is not None:
            return self._go_to(following, reason)
        if self._good:
            self._enter(Phase.CHECK)
            return None
        return self._settle(window, reason)

    def _check(self, step: StepTime) -> Decision | None:
        window = self._add(step, at_least=max(_CHECK_STEPS, 2 * self._period), skipped=self._long_lag)
        if window is None:
            return None
        assert self._baseline is not None
        verdict = compare(self._baseline, window)
        is_enough = window.num_steps >= max(_LONG_CHECK_STEPS, 2 * self._period)
        figures = f"a step takes {_ms(window.step_s)}, and {_ms(self._baseline.step_s)} without endpoints"
        seems_shorter = window.step_s < self._baseline.step_s * (1 - _DATA_BOUND / 2)
        if verdict is Verdict.SAME and is_enough and seems_shorter:
            verdict = Verdict.SHORTER
        if verdict is Verdict.SHORTER:
            self._reference = window
            self._set_wanted(window)
            following = self._next() if window.wait_share >= _DATA_BOUND else self._spare()
            if following is not None:
                return self._go_to(following, self._figures(window))
            return self._settle(window, f"{figures}. {self._why_not_more(window)}")
        # More endpoints show sooner whether they help.
        if verdict is Verdict.SAME and seems_shorter and window.surely_waits(_DATA_BOUND) and not self._is_pressed:
            self._set_wanted(window)
            following = self._next()
            if following is not None:
                return self._go_to(following, self._figures(window))
        if verdict is Verdict.SAME and not is_enough:
            return None
        # Endpoints do no harm to steps that still wait. Whether they help may show later.
        if verdict is Verdict.SAME and window.wait_share >= _DATA_BOUND:
            self._is_unproven = True
            return self._settle(window, f"{figures}. It waits {_ms(window.wait_s)}")
        self._trial, self._tried, self._good = window, self.endpoints, 0
        return self._remove(figures, Phase.REVIEW)

    def _review(self, step: StepTime) -> Decision | None:
        if self._now.num_running > self.endpoints:
            self._num_in_phase = 0
            return None
        window = self._add(step, at_least=max(_CHECK_STEPS, 2 * self._period), skipped=self._lag_before)
        if window is None:
            return None
        assert self._trial is not None
        verdict = compare(self._trial, window)
        if verdict is Verdict.SAME and window.num_steps < max(_LONG_CHECK_STEPS, 2 * self._period):
            return None
        figures = (
            f"a step takes {_ms(window.step_s)}, and {_ms(self._trial.step_s)} with {counted(self._tried, 'endpoint')}"
        )
        is_longer = window.step_s > self._trial.step_s * (1 + _DATA_BOUND)
        return self._settle(window, figures, at=self._tried if is_longer else self._good)

    def _watch(self, step: StepTime) -> Decision | None:
        if self._now.num_running > self.endpoints:
            self._num_in_phase = 0
            return None
        if self._is_unproven:
            return self._prove(step)
        skipped = _SKIPPED_STEPS if self._reference is not None else self._lag
        window = self._add(step, at_least=_WATCH_STEPS, skipped=skipped)
        if window is None:
            return None
        self._steps.clear()
        settled = self._reference
        if settled is None:
            self._reference = window
            return None
        has_changed = abs(window.step_s - settled.step_s) > _MUCH * settled.step_s
        has_changed = has_changed and compare(settled, window) is not Verdict.SAME
        if not self.endpoints and settled.wait_share < _DATA_BOUND:  # then only a data wait matters
            has_changed = False
        waits_again = settled.wait_share < _DATA_BOUND and window.surely_waits(_BACK_IN_WAIT)
        self._num_odd = self._num_odd + 1 if has_changed or waits_again else 0
        # One odd window may be a checkpoint or the beginning of an epoch.
        if self._num_odd < 2 or (self._baseline is not None and self.num_steps - self._last_search_step < _REST_STEPS):
            return None
        return self.restart_search(
            f"conditions changed: a step takes {_ms(window.step_s)} and waits {_ms(window.wait_s)} for data, "
            f"and {_ms(settled.step_s)} and {_ms(settled.wait_s)} when the number was chosen"
        )

    def _prove(self, step: StepTime) -> Decision | None:
        window = self._add(step, at_least=_PROOF_STEPS, skipped=0)
        if window is None:
            return None
        assert self._baseline is not None
        self._is_unproven = False
        if window.step_s > self._baseline.step_s * (1 - _DATA_BOUND):
            figures = f"a step takes {_ms(window.step_s)}, and {_ms(self._baseline.step_s)} without endpoints"
            return self._settle(window, figures, at=0)
        self._reference = window
        self._enter(Phase.SETTLED)
        return None

    # Parts of decisions

    def _go_to(self, endpoints: int, reason: str) -> Decision:
        before, self.endpoints = self.endpoints, endpoints
        self._enter(Phase.STARTING)
        return self._decision(Action.ADD, before, reason)

    def _remove(self, reason: str, phase: Phase = Phase.RECHECK) -> Decision:
        before, self.endpoints = self.endpoints, self._good
        self._lag_before = self._long_lag  # as many batches are still in flight
        self._enter(phase)
        return self._decision(Action.REMOVE, before, reason)

    def _settle(self, window: Window, reason: str, *, at: int | None = None) -> Decision:
        before = self.endpoints
        self.endpoints = self.endpoints if at is None else at
        self._reference = window if before == self.endpoints else None  # if it changes, `_watch` measures anew
        self._last_search_step = self.num_steps
        self._enter(Phase.SETTLED)
        return self._decision(Action.SETTLE, before, reason)

    def _decision(self, action: Action, before: int, reason: str) -> Decision:
        return Decision(action=action, step=self.num_steps, before=before, endpoints=self.endpoints, reason=reason)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._steps.clear()
        self._num_in_phase = 0

    def _add(self, step: StepTime, *, at_least: int, skipped: int = _SKIPPED_STEPS) -> Window | None:
        """Add a step to the current window, unless it is one of the first ``skipped`` steps of the phase.

        Returns:
            The figures of the window, None if it has fewer than ``at_least`` steps.
        """
        if self._num_in_phase <= skipped:
            return None
        self._steps.append(step)
        return Window.of(self._steps) if len(self._steps) >= at_least else None

    def _next(self) -> int | None:
        """Return the number of endpoints to try next, or None."""
        if self._num_searched >= _SEARCH_STEPS:
            return None
        if self._bad is not None:
            middle = min(self._limit, (self._good + self._bad) // 2)
            return middle if middle > self._good else None
        following = min(self._limit, self._wanted, max(1, 2 * self._good))
        return following if following > self._good else None

    def _spare(self) -> int | None:
        """Return a number a quarter larger, once per search, because a supply that just suffices is late at times."""
        if self._has_spare or self._bad is not None or self._good >= self._limit:
            return None
        if self._num_searched >= _SEARCH_STEPS:
            return None
        self._has_spare = True
        return min(self._limit, self._good + math.ceil(self._good / 4))

    def _set_wanted(self, window: Window) -> None:
        """Set the number of endpoints that ends the data wait, with a margin because slots may be slower here."""
        # In units of what one slot makes. Without the limit, steps of nothing but waits would call for infinite slots.
        busy = max(1 - window.wait_share, 0.01)
        missing = needed_for_headspace(self._now.num_slots / busy, 1.0) - self._now.num_slots
        self._wanted = self._good + max(1, math.ceil(_MARGIN * missing / self._num_hosts / self._slots_per_endpoint))

    @property
    def _num_warmup(self) -> int:
        """Steps of a warm-up, in which ranks use batches that were ready at the start."""
        return min(max(_WARMUP_STEPS, self._lag), _MAX_WARMUP_STEPS)

    @property
    def _is_pressed(self) -> bool:
        """Whether the CPUs of this host are short."""
        return self._now.pressure is not None and self._now.pressure >= _HIGH_PRESSURE

    @property
    def _period(self) -> int:
        """Steps that one burst of batches lasts, because slots that began together end together."""
        return math.ceil(self._now.num_slots / self._world_size)

    @property
    def _lag(self) -> int:
        """Steps until an addition shows, which is the number of batches in flight."""
        return max(3, _BATCHES_PER_SLOT * self._period)

    @property
    def _long_lag(self) -> int:
        """Steps until an addition shows, also if slots are slower here than on data hosts."""
        return math.ceil(_MARGIN * self._lag)

    def _figures(self, window: Window) -> str:
        text = f"a step takes {_ms(window.step_s)} and waits {_ms(window.wait_s)} for data"
        return text if self._now.pressure is None else f"{text}, {self._pressure_text()}"

    def _pressure_text(self) -> str:
        return f"the CPU pressure is {100 * (self._now.pressure or 0.0):.0f} %"

    def _why_not_more(self, window: Window) -> str:
        if window.wait_share < _DATA_BOUND:
            return "It waits for data no more"
        if self._bad is not None:
            return f"It waits {_ms(window.wait_s)}, but {counted(self._bad, 'endpoint')} did harm"
        if self._good < self._limit:
            return f"It waits {_ms(window.wait_s)}, and the search is over"
        return f"It waits {_ms(window.wait_s)}, and the host takes no more endpoints"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
