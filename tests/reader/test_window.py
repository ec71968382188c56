"""The window alone: the order of its batches, its bytes, its places, and how it grows."""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np
import pytest

from hetero.control.members.directory import EndpointRecord
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.consistency import ServedDataset
from hetero.reader.window import Window
from hetero.reader.window_size import WindowGrowth
from hetero.wire.limits import Limits

RECORD = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:9", incarnation="a")


@pytest.fixture
def connection() -> EndpointConnection:
    return EndpointConnection(RECORD, None, job_id="x", limits=Limits())


def fetched(batch: Any, nbytes: int) -> Fetched:
    return Fetched(batch=batch, nbytes=nbytes, num_queued=0)


def filled_window(tools: Any, num_batches: int, *, max_bytes: int, batch_bytes: int) -> Window:
    window = Window(planned=lambda: 4, max_bytes=max_bytes, all_bytes=lambda: window.used_bytes)
    dataset = ServedDataset(tools.spec())
    dataset.batch_bytes = batch_bytes
    for request in tools.requests(dataset.spec, num_batches=num_batches):
        window.add(request, dataset)
    return window


def test_window_delivers_in_order_whatever_arrives_first(tools: Any, connection: EndpointConnection) -> None:
    window = filled_window(tools, 3, max_bytes=1000, batch_bytes=10)
    window.add_failure(LookupError("sampler"))
    attempts = [window.start(batch, connection, 0.0) for batch in tuple(window.missing)]
    assert not window.missing
    found: list[Any] = []
    for attempt in reversed(attempts):
        window.end(attempt)
        window.put(attempt.batch.sequence, fetched(attempt.batch.sequence, 10))
    while (outcome := window.pop()) is not None:
        found.append(outcome.batch if isinstance(outcome, Fetched) else type(outcome))
    assert found == [0, 1, 2, LookupError]
    assert window.is_empty


def test_batch_whose_attempt_failed_is_missing_again_in_its_place(tools: Any, connection: EndpointConnection) -> None:
    window = filled_window(tools, 3, max_bytes=1000, batch_bytes=10)
    first = window.start(window.missing[0], connection, 0.0)
    assert window.attempt_of_next() is first
    window.end(first)
    window.retry(first.batch)
    assert [batch.sequence for batch in window.missing] == [0, 1, 2]
    assert window.attempt_of_next() is None


def test_window_has_room_for_its_bytes_and_always_for_the_next_batch(
    tools: Any, connection: EndpointConnection
) -> None:
    window = filled_window(tools, 4, max_bytes=20, batch_bytes=10)
    first, second, third, _ = tuple(window.missing)
    assert window.has_room(third)
    attempts = [window.start(batch, connection, 0.0) for batch in (second, third)]
    assert not window.has_room(window.missing[1])
    assert window.has_room(first)
    assert not window.is_over_bound(first.dataset)
    for attempt in attempts:  # room is kept for batches that have arrived and are not delivered
        window.end(attempt)
        window.put(attempt.batch.sequence, fetched(None, 10))
    assert not window.has_room(window.missing[1])
    window.start(first, connection, 0.0)
    assert window.is_over_bound(first.dataset)


@pytest.mark.parametrize(("nbytes", "is_counted"), [(40_000_000, True), (10_000_000, False)])
def test_large_batch_counts_until_the_loop_comes_back(
    tools: Any, connection: EndpointConnection, nbytes: int, is_counted: bool
) -> None:
    window = filled_window(tools, 4, max_bytes=2**30, batch_bytes=nbytes)
    window._planned = lambda: 2
    first, second, *_ = tuple(window.missing)
    attempts = [window.start(batch, connection, 0.0) for batch in (first, second)]
    for attempt in attempts:
        window.end(attempt)
        window.put(attempt.batch.sequence, fetched(None, nbytes))
    window.pop()
    window.start(window.missing[0], connection, 0.0)  # the next but one
    window.pop()
    assert window.counts_delivered == is_counted
    assert window.has_room(window.missing[0]) != is_counted
    window.free_delivered()
    assert window.has_room(window.missing[0])


def test_window_has_a_place_until_its_size_is_in_flight(tools: Any) -> None:
    window = filled_window(tools, 3, max_bytes=1000, batch_bytes=10)
    assert window.has_place
    window.add_failure(LookupError("sampler"))
    assert not window.has_place


def test_window_is_its_size_until_half_of_it_waits_for_a_late_batch() -> None:
    growth = WindowGrowth()
    assert not growth.is_held_up(num_waiting=1, size=4)
    assert growth.limit(num_waiting=1, size=4) == 4
    assert growth.is_held_up(num_waiting=2, size=4)
    assert growth.limit(num_waiting=2, size=4) == 6


def test_window_has_at_most_eight_times_its_size() -> None:
    growth = WindowGrowth()
    for num_waiting in range(100):
        growth.is_held_up(num_waiting=num_waiting, size=4)
        assert growth.limit(num_waiting=num_waiting, size=4) <= 8 * 4
    assert growth.limit(num_waiting=28, size=4) == 8 * 4


def test_places_go_back_with_every_sixteenth_delivery() -> None:
    growth = WindowGrowth()
    growth.is_held_up(num_waiting=10, size=4)
    found = []
    for _ in range(11):
        found.append(growth.limit(num_waiting=100, size=4))
        for _ in range(16):
            growth.delivered()
    assert found == [14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4]
    growth.delivered()
    assert growth.limit(num_waiting=100, size=4) == 4


def batches_per_s(times_s: list[float], *, num_endpoints: int, step_s: float, ordered: bool) -> float:
    """Simulate a window with two batches per endpoint and a consumer that takes ``step_s`` for each."""
    size, now_s, num_taken, num_delivered = 2 * num_endpoints, 0.0, 0, 0
    growth, arrived, is_waiting = WindowGrowth(), set[int](), True
    queues: list[list[int]] = [[] for _ in range(num_endpoints)]  # the first is in work
    events: list[tuple[float, int]] = []  # endpoints finish, -1: the consumer comes back
    while num_delivered < len(times_s):
        turn = num_delivered if ordered else min(arrived, default=-1)
        if is_waiting and turn in arrived:
            arrived.remove(turn)
            num_delivered, is_waiting = num_delivered + 1, False
            growth.delivered()
            heapq.heappush(events, (now_s + step_s, -1))
        if ordered and num_delivered not in arrived:
            growth.is_held_up(num_waiting=len(arrived), size=size)
        limit = growth.limit(num_waiting=len(arrived), size=size)
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
