from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.control.directory import Directory, EndpointRecord
from hetero.dataplane.reader import routing
from hetero.dataplane.reader.fleet import Fleet
from hetero.dataplane.reader.hedging import Budget, Pace, Stragglers


@given(st.lists(st.booleans(), max_size=2000))
def test_budget_holds_at_any_time_and_over_any_stretch(wants: list[bool]) -> None:
    budget = Budget()
    balance = largest = 0.0  # of hedges over what n / 20 allows, and its largest rise
    lowest = 0.0
    for number, wants_hedge in enumerate(wants, start=1):
        budget.earn()
        balance -= 1 / 20
        lowest = min(lowest, balance)
        if wants_hedge and budget.allows:
            budget.spend()
            balance += 1
        assert balance <= Budget.FREE + 1e-9, number
        largest = max(largest, balance - lowest)
    assert largest <= Budget.MAX_SAVED + 1e-9


def test_budget_saves_no_more_than_its_bound() -> None:
    budget = Budget()
    for _ in range(100_000):
        budget.earn()
    num_hedges = 0
    while budget.allows:
        budget.spend()
        num_hedges += 1
    assert num_hedges == Budget.MAX_SAVED


@pytest.mark.parametrize(
    ("times_s", "deadline_s"),
    [
        ([1.0] * 15, float("inf")),  # too few
        ([1.0] * 16, 2.0),
        ([0.001] * 128, 0.5),  # the floor
        ([1.0] * 126 + [30.0] * 2, 2.0),  # a hiccup or two are no rule
        ([1.0] * 125 + [30.0] * 3, 60.0),  # but three of 128 are
        ([30.0] * 128 + [1.0] * 128, 2.0),  # and what is long ago is not
    ],
)
def test_pace_deadline(times_s: list[float], deadline_s: float) -> None:
    pace = Pace()
    for time_s in times_s:
        pace.observe(time_s)
    assert pace.deadline_s == deadline_s


def test_pace_does_not_find_regular_slow_batches_overdue() -> None:
    generator = np.random.default_rng(5)
    pace, num_overdue, num_batches = Pace(), 0, 10_000
    for _ in range(num_batches):
        time_s = 20.0 if generator.random() < 0.05 else 1.0
        num_overdue += time_s > pace.deadline_s
        pace.observe(time_s)
    assert num_overdue < 0.01 * num_batches


def test_straggler_is_avoided_longer_each_time_until_it_answers(tools: Any) -> None:
    record = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:9", incarnation="a")
    with Fleet(Directory([record]), None, job_id="x") as fleet:
        fleet._roster.follow(*fleet._directory.contents())
        (connection,) = fleet._roster
        stragglers = Stragglers()
        assert connection not in stragglers.avoided(0.0)
        for now_s, avoided_s in [(0.0, 1.0), (100.0, 2.0), (200.0, 4.0), (300.0, 8.0), (400.0, 10.0)]:
            stragglers.avoid(connection, kept_s=1.0, now_s=now_s)
            assert connection in stragglers.avoided(now_s + avoided_s - 0.1)
            assert connection not in stragglers.avoided(now_s + avoided_s)
        connection.num_outstanding = 1
        assert connection in stragglers.avoided(1000.0)  # one at a time
        stragglers.answered(connection)
        assert connection not in stragglers.avoided(1000.0)


@pytest.mark.parametrize(
    ("outstanding", "hosts", "expected"),
    [
        ([1, 0, 0], "aab", 2),  # another host first
        ([1, 0, 1], "aab", 1),
        ([1, 1, 1], "abc", None),  # as much to do
        ([2, 1, 0], "abc", 2),  # the least of those with less
        ([1], "a", None),
    ],
)
def test_second_attempt_goes_to_a_ready_endpoint_with_less_to_do(
    tools: Any, outstanding: list[int], hosts: str, expected: int | None
) -> None:
    spec = tools.spec()
    records = [
        EndpointRecord(endpoint_id=f"{host}/{index}", host=host, address="127.0.0.1:9", incarnation="a")
        for index, host in enumerate(hosts)
    ]
    with Fleet(Directory(records), None, job_id="x") as fleet:
        fleet._roster.follow(*fleet._directory.contents())
        connections = list(fleet._roster)
        for connection, count in zip(connections, outstanding, strict=True):
            connection.mark_ready()
            connection.prepared.add(spec)
            connection.num_outstanding = count
        found = routing.less_loaded(connections, spec, connections[0], now_s=0.0)
        assert found is (None if expected is None else connections[expected])
        if expected is not None:
            for spoil in ("busy_until_s", "reserved_by"):
                before = getattr(connections[expected], spoil)
                setattr(connections[expected], spoil, 5.0)
                assert routing.less_loaded(connections, spec, connections[0], now_s=0.0) is not connections[expected]
                setattr(connections[expected], spoil, before)
            avoided = {connections[expected]}
            assert routing.less_loaded(connections, spec, connections[0], now_s=0.0, avoided=avoided) is not found
