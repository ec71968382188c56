from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetero.launch.auto_endpoints.controller import Controller, Phase
from hetero.launch.auto_endpoints.decisions import Action, Conditions, Decision
from hetero.launch.auto_endpoints.windows import StepTime

WAITS = StepTime(compute_s=0.1, wait_s=0.1)
BUSY = StepTime(compute_s=0.1, wait_s=0.0)
SLOWER = StepTime(compute_s=0.3, wait_s=0.0)


def conditions(endpoints: int, *, num_slots: int = 4, pressure: float | None = None) -> Conditions:
    return Conditions(num_used=endpoints, num_running=endpoints, num_slots=num_slots, pressure=pressure)


def feed(
    controller: Controller,
    step: StepTime,
    *,
    at_most: int = 400,
    pressure: float | None = None,
    used: int | None = None,
) -> Decision:
    """Repeat a step until the controller decides."""
    for _ in range(at_most):
        now = conditions(controller.endpoints, pressure=pressure)
        if used is not None:
            now = Conditions(num_used=used, num_running=controller.endpoints, num_slots=4, pressure=pressure)
        decision = controller.observe([step], now)
        if decision is not None:
            return decision
    raise AssertionError(f"no decision within {at_most} steps in {controller.phase}")


def numbers(decisions: Sequence[Decision]) -> list[tuple[Action, int]]:
    return [(decision.action, decision.endpoints) for decision in decisions]


def test_controller_adds_nothing_to_a_job_that_does_not_wait() -> None:
    controller = Controller(max_endpoints=8)
    decision = feed(controller, BUSY)
    assert (decision.action, decision.endpoints) == (Action.SETTLE, 0)
    assert decision.text == f"step {decision.step}: stays at 0, because a step of 100 ms waits only 0 ms for data"
    assert controller.phase is Phase.SETTLED


def test_controller_doubles_while_steps_wait_up_to_the_limit_and_checks() -> None:
    controller = Controller(max_endpoints=6)
    found = [feed(controller, StepTime(compute_s=0.1, wait_s=wait_s)) for wait_s in (0.1, 0.09, 0.08, 0.06)]
    assert numbers(found) == [(Action.ADD, 1), (Action.ADD, 2), (Action.ADD, 4), (Action.ADD, 6)]
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.05))
    assert (last.action, last.before, last.endpoints) == (Action.SETTLE, 6, 6)
    assert "a step takes 150 ms, and 200 ms without endpoints" in last.text
    assert "the host takes no more endpoints" in last.text


def test_controller_removes_what_does_harm_and_tries_half() -> None:
    controller = Controller(max_endpoints=8)
    found = [feed(controller, WAITS), feed(controller, WAITS), feed(controller, WAITS)]
    assert controller.endpoints == 4
    found.append(feed(controller, SLOWER))
    assert controller.phase is Phase.RECHECK
    found.append(feed(controller, WAITS))
    assert numbers(found[2:]) == [(Action.ADD, 4), (Action.REMOVE, 2), (Action.ADD, 3)]
    assert "a step takes 300 ms, and 200 ms before" in found[3].text
    assert "4 endpoints did harm" in found[4].text


def test_controller_does_not_try_again_what_did_harm() -> None:
    controller = Controller(max_endpoints=8)
    assert feed(controller, WAITS).endpoints == 1
    assert numbers([feed(controller, SLOWER), feed(controller, WAITS)]) == [(Action.REMOVE, 0), (Action.SETTLE, 0)]
    with pytest.raises(AssertionError, match="no decision"):
        feed(controller, WAITS, at_most=3000)


def test_controller_repeats_a_trial_if_steps_stay_long_without_the_endpoints() -> None:
    controller = Controller(max_endpoints=8)
    longer = StepTime(compute_s=0.1, wait_s=0.3)
    found = [feed(controller, WAITS), feed(controller, longer), feed(controller, longer)]
    assert numbers(found) == [(Action.ADD, 1), (Action.REMOVE, 0), (Action.ADD, 1)]
    assert "steps are not shorter without them" in found[2].text


def test_controller_removes_endpoints_that_shorten_nothing_when_it_is_sure() -> None:
    controller = Controller(max_endpoints=2)
    found = [feed(controller, WAITS) for _ in range(4)]
    assert numbers(found) == [(Action.ADD, 1), (Action.ADD, 2), (Action.SETTLE, 2), (Action.SETTLE, 0)]
    assert found[3].step - found[2].step == 200
    assert "a step takes 200 ms, and 200 ms without endpoints" in found[3].text


def test_controller_keeps_endpoints_that_prove_to_shorten_steps_later() -> None:
    controller = Controller(max_endpoints=2)
    found = [feed(controller, WAITS) for _ in range(3)]
    assert found[-1].action is Action.SETTLE
    with pytest.raises(AssertionError, match="no decision"):
        feed(controller, StepTime(compute_s=0.1, wait_s=0.08), at_most=500)
    assert controller.endpoints == 2


def test_controller_removes_endpoints_that_only_slow_the_compute() -> None:
    controller = Controller(max_endpoints=1)
    slower = StepTime(compute_s=0.2, wait_s=0.0)
    found = [feed(controller, WAITS), feed(controller, slower), feed(controller, BUSY)]
    assert numbers(found) == [(Action.ADD, 1), (Action.REMOVE, 0), (Action.SETTLE, 0)]
    assert "a step takes 100 ms, and 200 ms with 1 endpoint" in found[2].text


def test_controller_adds_again_what_it_removed_if_steps_become_longer() -> None:
    controller = Controller(max_endpoints=1)
    slower = StepTime(compute_s=0.2, wait_s=0.0)
    found = [feed(controller, WAITS), feed(controller, slower), feed(controller, StepTime(compute_s=0.1, wait_s=0.2))]
    assert numbers(found) == [(Action.ADD, 1), (Action.REMOVE, 0), (Action.SETTLE, 1)]


def test_controller_adds_no_more_while_cpus_are_short_and_steps_no_shorter() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, WAITS)
    last = feed(controller, WAITS, pressure=0.9)
    assert (last.action, last.endpoints) == (Action.SETTLE, 1)


def test_controller_gives_up_endpoints_that_no_rank_uses() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, WAITS)
    last = feed(controller, WAITS, used=0, at_most=1100)
    assert (last.action, last.endpoints) == (Action.SETTLE, 0)
    assert "the ranks did not use 1 of 1 endpoint" in last.text


def test_controller_adds_only_what_the_wait_calls_for() -> None:
    controller = Controller(max_endpoints=64)
    little = StepTime(compute_s=0.1, wait_s=0.01)
    assert [feed(controller, little).endpoints for _ in range(1)] == [1]
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.0))
    assert (last.endpoints, controller.phase) == (2, Phase.STARTING), "a spare one"


def test_limited_controller_stays_without_endpoints_and_says_why() -> None:
    controller = Controller(max_endpoints=8)
    decision = controller.limit(feed(controller, WAITS), 0, "No more are added: no memory")
    assert (decision.action, decision.before, decision.endpoints) == (Action.SETTLE, 0, 0)
    assert decision.text.endswith(
        ": stays at 0, because a step of 200 ms waits 100 ms for data. No more are added: no memory"
    )
    assert (controller.phase, controller.endpoints) == (Phase.SETTLED, 0)
    with pytest.raises(AssertionError, match="no decision"):
        feed(controller, WAITS, at_most=3000)


def test_limited_controller_checks_what_it_has() -> None:
    controller = Controller(max_endpoints=8)
    for _ in range(2):
        last = feed(controller, WAITS)
    assert last.endpoints == 2
    decision = controller.limit(feed(controller, StepTime(compute_s=0.1, wait_s=0.06)), 2, "no memory")
    assert (decision.action, decision.before, decision.endpoints) == (Action.SETTLE, 2, 2)
    assert (controller.phase, controller.endpoints) == (Phase.CHECK, 2)
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.05))
    assert (last.action, last.endpoints) == (Action.SETTLE, 2)
    assert "the host takes no more endpoints" in last.text


def test_limited_controller_adds_as_many_as_possible() -> None:
    controller = Controller(max_endpoints=8)
    for _ in range(2):
        feed(controller, WAITS)
    decision = controller.limit(feed(controller, WAITS), 3, "no memory")
    assert (decision.action, decision.before, decision.endpoints) == (Action.ADD, 2, 3)
    assert decision.text.endswith(". no memory")
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.05))
    assert (last.action, last.endpoints) == (Action.SETTLE, 3)


def test_next_search_is_not_limited() -> None:
    controller = Controller(max_endpoints=8)
    controller.limit(feed(controller, WAITS), 0, "no memory")
    decision = feed(controller, StepTime(compute_s=0.1, wait_s=0.4), at_most=3000)
    assert (decision.action, decision.endpoints) == (Action.ADD, 1)


def test_controller_is_silent_while_a_job_without_waits_changes_its_steps() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, BUSY)
    for compute_s in (0.3, 0.05, 1.0, 0.2):
        with pytest.raises(AssertionError, match="no decision"):
            feed(controller, StepTime(compute_s=compute_s, wait_s=0.0), at_most=500)
    assert feed(controller, WAITS).action is Action.ADD


def test_new_search_begins_without_endpoints() -> None:
    controller = Controller(max_endpoints=8)
    assert controller.restart_search("another loader") is None
    assert feed(controller, WAITS).endpoints == 1
    decision = controller.restart_search("another loader")
    assert decision is not None
    assert (decision.action, decision.before, decision.endpoints) == (Action.REMOVE, 1, 0)
    assert (controller.phase, controller.endpoints) == (Phase.WARMUP, 0)
    assert feed(controller, BUSY).text.endswith("stays at 0, because a step of 100 ms waits only 0 ms for data")


def test_steps_of_restarted_ranks_count_after_their_warmup() -> None:
    controller = Controller(max_endpoints=8)
    assert feed(controller, WAITS).endpoints == 1
    controller.observe([], conditions(1))
    controller.observe([WAITS], conditions(1))
    assert controller.phase is Phase.TRIAL
    controller.restart_window()
    compiling = StepTime(compute_s=9.0, wait_s=0.0)
    assert controller.observe([compiling] * 10, conditions(1)) is None
    assert feed(controller, StepTime(compute_s=0.1, wait_s=0.08)).endpoints == 2


def test_controller_searches_again_when_a_job_begins_to_wait() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, BUSY)
    decision = feed(controller, WAITS)
    assert (decision.action, decision.endpoints) == (Action.ADD, 1)


def test_controller_starts_over_when_conditions_change_much() -> None:
    controller = Controller(max_endpoints=1)
    feed(controller, WAITS)
    assert feed(controller, StepTime(compute_s=0.1, wait_s=0.02)).action is Action.SETTLE
    changed = StepTime(compute_s=0.3, wait_s=0.0)
    decision = feed(controller, changed, at_most=1200)
    assert (decision.action, decision.endpoints) == (Action.REMOVE, 0)
    assert "conditions changed: a step takes 300 ms and waits 0 ms for data" in decision.text


def test_controller_counts_the_steps_after_a_decision() -> None:
    controller = Controller(max_endpoints=8)
    controller.observe([WAITS] * 45, conditions(0))
    assert controller.num_steps == 45
