"""Tests of how long a process waits for storage."""

from __future__ import annotations

from hetero.endpoint.endpoint import send_event
from hetero.metrics.reading import MAX_SHARDS, SHARD, shard_waits_s, slowest_shards
from hetero.pool.packets import make_channel, receive_packet

MAX_PATH_BYTES = 4096


def test_the_slowest_shards_are_named() -> None:
    waits_s = {f"{number}.tar": float(number) for number in range(100)}
    assert list(slowest_shards(waits_s)) == [f"{number}.tar" for number in range(99, 99 - MAX_SHARDS, -1)]


def test_a_packet_has_room_for_the_longest_paths() -> None:
    # JSON has six characters for each of these.
    paths = [(f"{number}/" + MAX_PATH_BYTES * "\x01")[:MAX_PATH_BYTES] for number in range(MAX_SHARDS)]
    pool, endpoint = make_channel()
    with pool, endpoint:
        send_event(endpoint, "statistics", **{SHARD + path: 1.0 for path in paths})
        received = receive_packet(pool)
    assert received is not None
    statistics = {name: value for name, value in received[0].items() if name != "event"}
    assert shard_waits_s(statistics) == dict.fromkeys(paths, 1.0)
