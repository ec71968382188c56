"""When the reader's end of a connection opens a link, and when it must not. Links are fakes. Nothing is connected."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.control.members.directory import Directory, EndpointRecord
from hetero.reader.connection import EndpointConnection
from hetero.reader.consistency import ServedDataset
from hetero.reader.fleet import Fleet
from hetero.wire.faults import Fault
from hetero.wire.limits import Limits
from hetero.wire.proto import data_pb2 as pb
from tests.support.batch_path.calls import fault_of

RECORD = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:9", incarnation="a")


class FakeLink:
    """Answers every call with nothing, or the failure that is set, and is counted."""

    opened: list[FakeLink]
    failure: pb.Failure | None = None

    def __init__(self, *_: Any) -> None:
        self.calls: list[str] = []
        self.is_closed = False
        self.opened.append(self)

    def attend(self) -> None:
        self.calls.append("Attend")

    def call(self, method: str, _request: Any, reply: Any, _timeout_s: float) -> Any:
        self.calls.append(method)
        return reply(failure=self.failure)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[FakeLink]:
    """The links that are opened."""
    monkeypatch.setattr(FakeLink, "opened", [], raising=False)
    monkeypatch.setattr("hetero.reader.connection.EndpointLink", FakeLink)
    return FakeLink.opened


@pytest.fixture
def connection() -> EndpointConnection:
    return EndpointConnection(RECORD, None, job_id="x", limits=Limits())


def fetch(connection: EndpointConnection, tools: Any) -> object:
    request = tools.requests(tools.spec(), num_batches=1)[0]
    return connection.fetch(request, timeout_s=1.0, allocate=None, on_call=lambda call: None)


def test_preparing_uses_the_one_link_that_attends(
    connection: EndpointConnection, links: list[FakeLink], tools: Any
) -> None:
    connection.prepare(tools.spec(), timeout_s=1.0)
    connection.prepare(tools.spec(), timeout_s=1.0)
    assert [link.calls for link in links] == [["Attend", "Prepare", "Attend", "Prepare"]]


def test_without_a_link_only_preparing_opens_one(
    connection: EndpointConnection, links: list[FakeLink], tools: Any
) -> None:
    assert fault_of(lambda: fetch(connection, tools))[0] is Fault.UNSENT
    connection.prepare(tools.spec(), timeout_s=1.0)
    connection.mark_down("reset", 0.0)
    assert fault_of(lambda: fetch(connection, tools))[0] is Fault.UNSENT
    assert len(links) == 1


def test_disconnected_for_good_opens_no_link(connection: EndpointConnection, links: list[FakeLink], tools: Any) -> None:
    connection.prepare(tools.spec(), timeout_s=1.0)
    connection.disconnect()
    connection.disconnect()
    for _ in range(2):
        fault = fault_of(lambda: connection.prepare(tools.spec(), timeout_s=1.0))
        assert fault == (Fault.UNREACHABLE, "the connection was closed")
    assert [link.is_closed for link in links] == [True]


def test_failure_that_no_endpoint_would_send_is_this_endpoints(
    connection: EndpointConnection, links: list[FakeLink], tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.prepare(tools.spec(), timeout_s=1.0)
    monkeypatch.setattr(links[0], "failure", pb.Failure(stage="nonsense"))
    fault, details = fault_of(lambda: connection.prepare(tools.spec(), timeout_s=1.0))
    assert fault is Fault.BROKEN
    assert "nonsense" in details


def test_preparation_that_begins_after_its_fleet_was_closed_opens_no_link(links: list[FakeLink], tools: Any) -> None:
    fleet = Fleet(Directory([RECORD]), None, job_id="x")
    fleet._table.follow(*fleet._directory.contents())
    (connection,) = fleet._table
    fleet._datasets[tools.spec()] = ServedDataset(tools.spec())
    fleet.close()
    fleet._prepare(connection, tools.spec())
    assert links == []
