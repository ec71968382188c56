from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from hetero.launch.auto_endpoints.controller import Controller, Phase
from hetero.launch.auto_endpoints.decisions import Action, Conditions, Decision
from hetero.launch.auto_endpoints.windows import StepTime

WAITS = StepTime(compute_s=0.1, wait_s=0.1)
BUSY = StepTime(compute_s=0.1, wait_s=0.0)
SLOWER = StepTime(compute_s=0.3, wait_s=0.0)


def conditions(endpoints: int) -> Conditions:
    return Conditions(num_used=endpoints, num_running=endpoints, num_slots=4)


def feed(controller: Controller, step: StepTime, *, at_most: int = 400, used: int | None = None) -> Decision:
    """Repeat a step until the controller decides."""
    for _ in range(at_most):
        now = conditions(controller.endpoints)
        if used is not None:
            now = dataclasses.replace(now, num_used=used)
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
    assert decision.text == f"step {decision.step}: stays at 0, because a step of 100 ms waits 0 ms for data"
    assert controller.phase is Phase.SETTLED


def test_controller_adds_what_the_wait_calls_for_and_more_while_steps_become_shorter() -> None:
    controller = Controller(max_endpoints=8)
    found = [feed(controller, StepTime(compute_s=0.1, wait_s=wait_s)) for wait_s in (0.04, 0.02)]
    # Four slots make a batch in 140 ms, so 1.6 more would suffice. The factor is 3.
    assert numbers(found) == [(Action.ADD, 5), (Action.ADD, 8)]
    assert found[0].reason == "a step of 140 ms waits 40 ms for data"
    assert found[1].reason == "a step takes 120 ms with 5 endpoints and 140 ms with 0, and waits 20 ms for data"
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.01))
    assert (last.action, last.before, last.endpoints) == (Action.SETTLE, 8, 8)
    assert last.reason == "a step takes 110 ms with 8 endpoints and 120 ms with 5, and waits 10 ms for data"


def test_controller_is_content_when_steps_wait_no_more() -> None:
    controller = Controller(max_endpoints=64)
    assert feed(controller, WAITS).endpoints == 12
    assert numbers([feed(controller, BUSY)]) == [(Action.SETTLE, 12)]


def test_controller_counts_slots_and_hosts() -> None:
    assert feed(Controller(max_endpoints=64, num_hosts=2), WAITS).endpoints == 6
    assert feed(Controller(max_endpoints=64, slots_per_endpoint=4), WAITS).endpoints == 3


def test_controller_tries_half_of_what_did_harm() -> None:
    controller = Controller(max_endpoints=8)
    found = [feed(controller, WAITS), feed(controller, SLOWER)]
    assert numbers(found) == [(Action.ADD, 8), (Action.REMOVE, 4)]
    assert "a step takes 300 ms with 8 endpoints and 200 ms with 0" in found[1].text
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.05))
    assert (last.action, last.endpoints) == (Action.SETTLE, 4)


def test_controller_does_not_try_again_what_did_harm() -> None:
    controller = Controller(max_endpoints=1)
    assert feed(controller, WAITS).endpoints == 1
    assert numbers([feed(controller, SLOWER)]) == [(Action.SETTLE, 0)]
    with pytest.raises(AssertionError, match="no decision"):
        feed(controller, WAITS, at_most=3000)


def test_controller_removes_endpoints_that_shorten_nothing() -> None:
    controller = Controller(max_endpoints=8)
    found = [feed(controller, WAITS), feed(controller, WAITS)]
    assert numbers(found) == [(Action.ADD, 8), (Action.SETTLE, 0)]
    assert found[1].text.endswith(
        "from 8 to 0, and stays there, because a step takes 200 ms with 8 endpoints and 200 ms with 0, "
        "and waits 100 ms for data"
    )


def test_controller_tries_at_most_two_numbers() -> None:
    controller = Controller(max_endpoints=1024)
    found = [feed(controller, WAITS)]
    while found[-1].action is not Action.SETTLE:
        found.append(feed(controller, SLOWER))
    assert (len(found), found[-1].endpoints) == (3, 0)
    assert found[-1].step < 200


def test_measurement_skips_and_takes_the_batches_in_flight() -> None:
    controller = Controller(max_endpoints=8)
    now = Conditions(num_used=0, num_running=0, num_slots=36)
    controller.observe([BUSY], now)
    # 36 slots of one rank: 72 batches in flight, which were ready when the job began.
    assert controller.observe([BUSY] * 72, now) is None
    decision = controller.observe([WAITS] * 72, now)
    assert decision is not None
    assert decision.reason == "a step of 200 ms waits 100 ms for data"


def test_measurement_awaits_the_end_of_removed_endpoints() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, WAITS)
    assert feed(controller, SLOWER).endpoints == 4
    controller.observe([WAITS] * 100, Conditions(num_used=4, num_running=5, num_slots=8))
    assert controller.phase is Phase.STARTING
    controller.observe([WAITS], Conditions(num_used=4, num_running=4, num_slots=8))
    assert controller.phase is Phase.MEASURING


def test_controller_gives_up_endpoints_that_no_rank_uses() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, WAITS)
    last = feed(controller, WAITS, used=0, at_most=1100)
    assert (last.action, last.endpoints) == (Action.SETTLE, 0)
    assert "the ranks use only 0 of 8 endpoints" in last.text


def test_controller_measures_with_the_endpoints_that_ranks_use() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, WAITS)
    last = feed(controller, BUSY, used=7, at_most=1100)
    assert (last.action, last.endpoints) == (Action.SETTLE, 8)


def test_limited_controller_stays_without_endpoints_and_says_why() -> None:
    controller = Controller(max_endpoints=8)
    decision = controller.limit(feed(controller, WAITS), 0, "No more are added: no memory")
    assert (decision.action, decision.before, decision.endpoints) == (Action.SETTLE, 0, 0)
    assert decision.text.endswith(
        ": stays at 0, because a step of 200 ms waits 100 ms for data. No more are added: no memory"
    )
    assert (controller.phase, controller.endpoints) == (Phase.SETTLED, 0)


def test_limited_controller_stays_at_what_it_has() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, StepTime(compute_s=0.1, wait_s=0.02))
    decision = feed(controller, StepTime(compute_s=0.1, wait_s=0.015))
    assert (decision.action, decision.before, decision.endpoints) == (Action.ADD, 3, 5)
    decision = controller.limit(decision, 3, "no memory")
    assert (decision.action, decision.before, decision.endpoints) == (Action.SETTLE, 3, 3)
    assert (controller.phase, controller.endpoints) == (Phase.SETTLED, 3)


def test_limited_controller_adds_as_many_as_possible_and_asks_again() -> None:
    controller = Controller(max_endpoints=8)
    decision = controller.limit(feed(controller, WAITS), 1, "no memory")
    assert (decision.action, decision.before, decision.endpoints) == (Action.ADD, 0, 1)
    assert decision.text.endswith(". no memory")
    last = feed(controller, StepTime(compute_s=0.1, wait_s=0.05))
    assert (last.action, last.before, last.endpoints) == (Action.ADD, 1, 7)


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
    assert feed(controller, WAITS).endpoints == 8
    decision = controller.restart_search("another loader")
    assert decision is not None
    assert (decision.action, decision.before, decision.endpoints) == (Action.REMOVE, 8, 0)
    assert (controller.phase, controller.endpoints) == (Phase.STARTING, 0)
    assert feed(controller, BUSY).text.endswith("stays at 0, because a step of 100 ms waits 0 ms for data")


def test_steps_of_restarted_ranks_count_after_their_warmup() -> None:
    controller = Controller(max_endpoints=8)
    assert feed(controller, WAITS).endpoints == 8
    controller.observe([WAITS] * 30, conditions(8))
    assert controller.phase is Phase.MEASURING
    controller.restart_window()
    compiling = StepTime(compute_s=9.0, wait_s=0.0)
    assert controller.observe([compiling] * 20, conditions(8)) is None
    last = feed(controller, BUSY)
    assert (last.action, last.endpoints) == (Action.SETTLE, 8)


def test_controller_searches_again_when_a_job_begins_to_wait() -> None:
    controller = Controller(max_endpoints=8)
    feed(controller, BUSY)
    decision = feed(controller, WAITS)
    assert (decision.action, decision.endpoints) == (Action.ADD, 8)


def test_controller_starts_over_when_conditions_change_much() -> None:
    controller = Controller(max_endpoints=1)
    feed(controller, WAITS)
    settled = StepTime(compute_s=0.1, wait_s=0.02)
    assert feed(controller, settled).action is Action.SETTLE
    controller.observe([settled] * 120, conditions(1))
    changed = StepTime(compute_s=0.3, wait_s=0.0)
    decision = feed(controller, changed, at_most=1200)
    assert (decision.action, decision.endpoints) == (Action.REMOVE, 0)
    assert decision.step >= 1000, "searches rest"
    assert "conditions changed: a step takes 300 ms and waits 0 ms for data, and 120 ms and 20 ms" in decision.text


def test_controller_ignores_one_odd_window_after_the_search() -> None:
    controller = Controller(max_endpoints=1)
    feed(controller, WAITS)
    feed(controller, BUSY)
    controller.observe([BUSY] * 1120, conditions(1))
    controller.observe([SLOWER] * 100, conditions(1))
    with pytest.raises(AssertionError, match="no decision"):
        feed(controller, BUSY, at_most=3000)


def test_controller_counts_the_steps_after_a_decision() -> None:
    controller = Controller(max_endpoints=8)
    controller.observe([WAITS] * 45, conditions(0))
    assert controller.num_steps == 45
