from __future__ import annotations

import heapq

import numpy as np
import pytest

from hetero.dataplane.reader.window_growth import Stretch


def test_window_is_its_size_until_half_of_it_waits_for_a_late_batch() -> None:
    stretch = Stretch()
    assert not stretch.is_held_up(num_waiting=1, size=4)
    assert stretch.limit(num_waiting=1, size=4) == 4
    assert stretch.is_held_up(num_waiting=2, size=4)
    assert stretch.limit(num_waiting=2, size=4) == 6


def test_window_has_at_most_eight_times_its_size() -> None:
    stretch = Stretch()
    for num_waiting in range(100):
        stretch.is_held_up(num_waiting=num_waiting, size=4)
        assert stretch.limit(num_waiting=num_waiting, size=4) <= 8 * 4
    assert stretch.limit(num_waiting=28, size=4) == 8 * 4


def test_places_go_back_with_every_sixteenth_delivery() -> None:
    stretch = Stretch()
    stretch.is_held_up(num_waiting=10, size=4)
    found = []
    for _ in range(11):
        found.append(stretch.limit(num_waiting=100, size=4))
        for _ in range(16):
            stretch.delivered()
    assert found == [14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4]
    stretch.delivered()
    assert stretch.limit(num_waiting=100, size=4) == 4


def batches_per_s(times_s: list[float], *, num_endpoints: int, step_s: float, ordered: bool) -> float:
    """Simulate a window with two batches per endpoint and a consumer that takes ``step_s`` for each."""
    size, now_s, num_taken, num_delivered = 2 * num_endpoints, 0.0, 0, 0
    stretch, arrived, is_waiting = Stretch(), set[int](), True
    queues: list[list[int]] = [[] for _ in range(num_endpoints)]  # the first is in work
    events: list[tuple[float, int]] = []  # endpoints finish; -1: the consumer comes back
    while num_delivered < len(times_s):
        turn = num_delivered if ordered else min(arrived, default=-1)
        if is_waiting and turn in arrived:
            arrived.remove(turn)
            num_delivered, is_waiting = num_delivered + 1, False
            stretch.delivered()
            heapq.heappush(events, (now_s + step_s, -1))
        if ordered and num_delivered not in arrived:
            stretch.is_held_up(num_waiting=len(arrived), size=size)
        limit = stretch.limit(num_waiting=len(arrived), size=size)
        while num_taken < min(len(times_s), num_delivered + limit):
            endpoint = min(range(num_endpoints), key=lambda index: len(queues[index]))
            queues[endpoint].append(num_taken)
            if len(queues[endpoint]) == 1:
                heapq.heappush(events, (now_s + times_s[num_taken], endpoint))
            num_taken += 1
        now_s, endpoint = heapq.heappop(events)
        if endpoint < 0:
            is_waiting = True
            continue
        arrived.add(queues[endpoint].pop(0))
        if queues[endpoint]:
            heapq.heappush(events, (now_s + times_s[queues[endpoint][0]], endpoint))
    return num_delivered / now_s


@pytest.mark.parametrize("num_endpoints", [2, 4, 8, 16])
@pytest.mark.parametrize("step", [0.0, 0.8, 1.0, 1.25])
def test_order_costs_less_than_a_tenth_with_one_slow_batch_in_twenty(num_endpoints: int, step: float) -> None:
    """``step``: the consumer's time per batch, relative to the endpoints'."""
    times_s = np.where(np.random.default_rng(7).random(4000) < 0.05, 20.0, 1.0).tolist()
    step_s = step * np.mean(times_s) / num_endpoints
    in_order, first_come = (
        batches_per_s(times_s, num_endpoints=num_endpoints, step_s=step_s, ordered=ordered) for ordered in (True, False)
    )
    assert in_order > 0.9 * first_come
