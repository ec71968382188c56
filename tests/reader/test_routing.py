"""Which endpoints a rank uses, and which one gets a request. No fleet, no threads, nothing is connected."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.routing import subset
from tests.support.batch_path.routed import Routed


@pytest.mark.parametrize(
    ("num_hosts", "per_host", "world_size", "size"),
    [
        (1, 1, 8, 1),
        (2, 4, 8, 8),
        (2, 36, 8, 18),
        (2, 36, 1, 72),
        (3, 3, 1, 9),
        (2, 36, 100, 8),  # never fewer than 8: one lost host must leave choice
    ],
)
def test_subset_has_twice_the_ranks_share(num_hosts: int, per_host: int, world_size: int, size: int) -> None:
    used = set()
    for rank in range(world_size):
        hosts = [f"algo-{number}" for number in range(1, num_hosts + 1) for _ in range(per_host)]
        found = Routed(hosts, rank=rank, world_size=world_size).router.endpoints
        assert len(found) == size
        assert len({connection.record.host for connection in found}) == min(num_hosts, size)
        used |= {connection.record.endpoint_id for connection in found}
    assert len(used) == num_hosts * per_host


def test_subset_replaces_endpoints_that_are_down() -> None:
    routed = Routed(["algo-1"] * 36 + ["algo-2"] * 36, world_size=8)
    for connection in routed.router.endpoints:
        connection.mark_down("gone", 0.0)
    used = subset(routed.table, 0, 8)
    assert sum(connection.state is not ConnectionState.DOWN for connection in used) == 18


def test_planned_batches_are_the_ranks_share_of_the_slots() -> None:
    router = Routed(["algo-1", "algo-1", "algo-2", "algo-2"], world_size=2).router
    assert router.planned_batches(2) == 4
    assert router.planned_batches(0.1) == 2


def test_router_chooses_least_outstanding_then_load_then_turns(tools: Any) -> None:
    spec = tools.spec()
    router = Routed(["a", "b", "c"], spec=spec).router
    one, two, three = router.endpoints
    assert [router.choose(spec) for _ in range(4)] == [one, two, three, one]
    two.load, two.delivered_at_s = 5, float("inf")
    assert router.choose(spec) is three
    router.release(one)
    router.release(one)
    assert router.choose(spec) is one


def test_batches_of_a_lane_go_to_one_endpoint_unless_it_falls_behind(tools: Any) -> None:
    spec = tools.spec()
    routers = [Routed(["a", "b", "c"], spec=spec, rank=rank, world_size=2).router for rank in range(2)]

    def chosen(router: Any, lane: int) -> Any:
        connection = router.choose(spec, lane=lane)
        return connection.record.endpoint_id

    # Each rank has the endpoints in another order, and both send a lane to the same one.
    of_lanes = [chosen(routers[0], lane) for lane in (0, 1, 2, 3)]
    assert [chosen(routers[1], lane) for lane in (0, 1, 2, 3)] == of_lanes
    assert len(set(of_lanes)) == 3
    assert of_lanes[3] == of_lanes[0]
    # Its endpoint gets two requests more than the others, but they would have to read the files of its lanes too.
    assert [chosen(routers[0], 3) for _ in range(4)] == [of_lanes[0]] * 4


def test_batches_of_a_lane_leave_its_endpoint_for_its_host_and_for_hosts_without_lanes(tools: Any) -> None:
    spec = tools.spec()
    router = Routed(["a", "a", "b", "c"], spec=spec).router

    def chosen(lane: int) -> Any:
        return router.choose(spec, lane=lane).record.host

    # Lanes that follow each other are on different hosts.
    assert [chosen(lane) for lane in (0, 1)] == ["a", "b"]
    found = [chosen(0) for _ in range(9)]
    assert set(found) == {"a", "c"}
    assert found.count("c") == 3
    # A host that is busy keeps no lanes meanwhile.
    for connection in router.endpoints:
        connection.busy_until_s = float(connection.record.host == "a")
    assert {chosen(0) for _ in range(9)} == {"b", "c"}
    for connection in router.endpoints:
        connection.busy_until_s = 0.0
    # A straggler, or a host that has gone, keeps no lanes.
    for connection in router.endpoints:
        if connection.record.host == "a":
            connection.avoid(1.0, 0.0)
    assert {chosen(0) for _ in range(4)} == {"b", "c"}


def test_few_lanes_are_divided_by_the_endpoints_of_hosts(tools: Any) -> None:
    spec = tools.spec()
    router = Routed(["a"] * 2 + ["b"] * 8, spec=spec).router
    hosts = [router.choose(spec, lane=lane).record.host for lane in range(10)]
    assert hosts[:5].count("a") == 1
    assert hosts.count("a") == 2


def test_lanes_return_to_an_endpoint_that_could_not_be_reached_when_they_began(tools: Any) -> None:
    spec = tools.spec()
    routed = Routed(["a", "b"], spec=spec)
    late = next(each for each in routed.table if each.record.host == "b")
    late.mark_down("refused", 0.0)
    routed.router.update()

    def hosts() -> list[str]:
        found = [routed.router.choose(spec, lane=lane, may_leave_lane=False) for lane in range(4)]
        return [each.record.host for each in found if each is not None]

    assert hosts() == ["a"] * 4
    late.mark_ready()
    late.prepared.add(spec)
    routed.router.update()
    assert hosts() == ["a", "b"] * 2


def test_lanes_move_once_to_an_endpoint_that_has_come(tools: Any) -> None:
    spec = tools.spec()
    routed = Routed(["a", "b"], spec=spec)
    routed.router.update()

    def hosts() -> list[str]:
        found = [routed.router.choose(spec, lane=lane, may_leave_lane=False) for lane in range(6)]
        return [each.record.host for each in found if each is not None]

    assert hosts() == ["a", "b"] * 3
    routed.table.follow([*(each.record for each in routed.table), routed.record("c")], {"a", "b", "c"})
    routed.router.update()
    assert hosts() == ["a", "b"] * 3
    came = next(each for each in routed.table if each.record.host == "c")
    came.mark_ready()
    came.prepared.add(spec)
    assert hosts() == ["a", "b", "c", "b", "a", "c"]
    # What it loses later does not come back to it.
    came.mark_down("gone", 0.0)
    routed.router.update()
    without = hosts()
    assert "c" not in without
    came.mark_ready()
    assert hosts() == without


def test_router_keeps_an_endpoint_free_for_a_suspect(tools: Any) -> None:
    spec, suspect = tools.spec(), object()
    routed = Routed(["a", "b"], spec=spec)
    router = routed.router
    one, two = router.endpoints
    assert router.choose(spec) is one
    assert router.choose(spec) is two
    assert router.choose(spec, alone_for=suspect) is None
    reserved = next(connection for connection in (one, two) if connection.reserved_by is suspect)
    other = two if reserved is one else one
    assert router.choose(spec) is other
    assert not routed.num_free
    router.release(reserved)
    assert routed.num_free == 1
    assert router.choose(spec, alone_for=suspect) is reserved
    assert router.choose(spec) is other
    router.release(reserved, alone_for=suspect)
    assert routed.num_free == 2
    assert router.choose(spec) is reserved


def test_endpoint_kept_free_for_a_suspect_is_let_go_when_another_one_has_it(tools: Any) -> None:
    spec, suspect = tools.spec(), object()
    router = Routed(["a", "b"], spec=spec).router
    one, two = router.endpoints
    assert [router.choose(spec), router.choose(spec)] == [one, two]
    assert router.choose(spec, alone_for=suspect) is None
    reserved, other = (one, two) if one.reserved_by is suspect else (two, one)
    reserved.mark_busy("many requests", 0.0)
    router.release(other)
    assert router.choose(spec, alone_for=suspect) is other
    router.release(other, alone_for=suspect)
    assert [connection.reserved_by for connection in (one, two)] == [None, None]


def test_straggler_is_avoided_longer_each_time_until_it_answers() -> None:
    (connection,) = Routed(["a"]).table
    assert not connection.is_avoided(0.0)
    for now_s, avoided_s in [(0.0, 1.0), (100.0, 2.0), (200.0, 4.0), (300.0, 8.0), (400.0, 10.0)]:
        connection.avoid(1.0, now_s)
        assert connection.is_avoided(now_s + avoided_s - 0.1)
        assert not connection.is_avoided(now_s + avoided_s)
    connection.num_outstanding = 1
    assert connection.is_avoided(1000.0)  # one at a time
    connection.delivered(num_queued=0, now_s=0.0)
    assert not connection.is_avoided(1000.0)


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
    routed = Routed(list(hosts), spec=spec)
    router, connections = routed.router, list(routed.table)
    for connection, count in zip(connections, outstanding, strict=True):
        connection.num_outstanding = count

    def other() -> EndpointConnection | None:
        found = router.choose_other(spec, connections[0])
        if found is not None:
            router.release(found)
        return found

    assert other() is (None if expected is None else connections[expected])
    if expected is not None:
        for spoil in ("busy_until_s", "reserved_by"):
            before = getattr(connections[expected], spoil)
            setattr(connections[expected], spoil, 5.0)
            assert other() is not connections[expected]
            setattr(connections[expected], spoil, before)
        connections[expected].avoid(1.0, router._clock())
        assert other() is not connections[expected]
