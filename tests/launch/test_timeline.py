"""When hosts came and went, as the first trainer host hears of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hetero.control.members.directory import EndpointRecord
from hetero.control.status import HostStatus
from hetero.launch.reporting.timeline import Timeline
from hetero.report.model import MAX_EVENTS

STATUS = HostStatus(host="algo-1", incarnation="i", version="1", script_digest="d")


def news(*serving: str, is_ending: bool = False, **counters: int) -> Any:
    """Return what a host knows: which hosts serve, and counters of algo-1."""
    records = [EndpointRecord(endpoint_id=f"{host}-0", host=host, address="a:1", incarnation="i") for host in serving]
    return SimpleNamespace(
        is_ending=is_ending,
        endpoints=lambda: tuple(records),
        statuses=lambda: [replace(STATUS, counters={name.replace("_", " "): n for name, n in counters.items()})],
    )


def test_timeline_has_hosts_that_come_and_go_once_each() -> None:
    timeline = Timeline()
    for at_s, known in enumerate([news(), news("b", "a"), news("a", "b"), news("a"), news("a", "b")]):
        timeline.follow(known, float(at_s))
    assert [(event.at_s, event.host, event.what) for event in timeline.events] == [
        (1.0, "a", "endpoints begin to serve"),
        (1.0, "b", "endpoints begin to serve"),
        (3.0, "b", "endpoints no longer serve"),
        (4.0, "b", "endpoints begin to serve"),
    ]


def test_timeline_has_counters_that_grow() -> None:
    timeline = Timeline()
    for count in (0, 1, 1, 3):
        timeline.follow(news(endpoint_restarts=count, failovers=count), float(count))
    assert [(event.at_s, event.what) for event in timeline.events] == [
        (1.0, "an endpoint restarted"),
        (3.0, "an endpoint restarted"),
    ]


def test_timeline_leaves_out_the_end_of_the_job_and_is_bounded() -> None:
    timeline = Timeline()
    timeline.follow(news("a"), 1.0)
    timeline.follow(news(is_ending=True), 2.0)
    assert len(timeline.events) == 1
    for at_s in range(MAX_EVENTS):
        timeline.follow(news(endpoint_restarts=at_s), float(at_s))
    assert len(timeline.events) == MAX_EVENTS
