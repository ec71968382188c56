"""Whom a batch is lost with, and whether it is to blame: endpoints and a directory that do what the test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero.control.members.directory import Directory, EndpointRecord
from hetero.errors import DatasetError, EndpointUnavailableError, ExitCode
from hetero.reader.attempts import PoisonDetector
from hetero.reader.connection import EndpointConnection
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.wire.faults import CallFailedError, Fault
from tests.support.batch_path.staging import Stage

RECORD = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:9", incarnation="a")


@pytest.fixture(autouse=True)
def _no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was lost is not asked again within a test."""
    monkeypatch.setattr("hetero.reader.connection._random.uniform", lambda *_: 1e6)


def lose(stage: Stage, fault: Fault = Fault.UNREACHABLE) -> EndpointConnection:
    """Lose the endpoint that has the first batch, once one has it. Return it."""
    (call,) = stage.pending(0)
    call.end(CallFailedError(fault, "reset"))
    return call.connection


def leave(reader: Reader, lost: list[EndpointConnection], *, hosts: set[str]) -> None:
    """Take endpoints out of the directory, and some of their hosts too."""
    directory = reader._fleet._directory
    records, known = directory.contents()
    gone = {connection.record for connection in lost}
    directory.replace([record for record in records if record not in gone], hosts=known - hosts)


def test_endpoint_that_was_lost_again_has_died_once() -> None:
    with Fleet(Directory([RECORD]), None, job_id="x") as fleet:
        fleet._table.follow(*fleet._directory.contents())
        (connection,) = fleet._table
        poison = PoisonDetector()
        for _ in range(3):  # reset, reset after it served again, and dead
            poison.add(connection, Fault.UNREACHABLE, 1.0, was_first=False)
        assert poison.is_suspect
        connection.has_died = True
        assert not poison.is_proven
        assert (poison.endpoints, poison.num_calls) == ([connection], 3)


@pytest.mark.parametrize(
    ("seen", "has_died"),
    [
        ([(["b"], ["algo-1"])], True),  # the next one is there already
        ([([], ["algo-1"]), (["b"], ["algo-1"])], True),
        ([([], ["algo-1"]), ([], [])], True),  # no restarts were left, and later the host was lost too
        ([([], []), (["b"], ["algo-1"])], False),  # the host was lost, and is back
        ([([], []), (["a"], ["algo-1"])], False),  # it was cut off for longer than a lease
        ([(["second-b"], ["algo-1"])], False),  # the host was replaced, before a reader saw it leave
    ],
)
def test_endpoint_has_died_if_its_host_stayed_when_it_left(
    seen: list[tuple[list[str], list[str]]], has_died: bool
) -> None:
    with Fleet(Directory([RECORD]), None, job_id="x") as fleet:
        table = fleet._table
        table.follow(*fleet._directory.contents())
        (connection,) = table
        for incarnations, hosts in seen:
            table.follow([replace(RECORD, incarnation=name) for name in incarnations], hosts)
        assert connection.is_retired
        assert connection.has_died is has_died


@pytest.mark.fault("F3")
@pytest.mark.parametrize("num_hosts", [1, 3])
def test_batch_that_was_lost_with_its_hosts_is_asked_for_again(stage: Stage, tools: Any, num_hosts: int) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_endpoints=4)
    lost = [lose(stage) for _ in range(3)]
    tools.wait_for(lambda: reader._fleet.stats.retries == 3)
    leave(reader, lost, hosts={connection.record.host for connection in lost[:num_hosts]})
    (call,) = stage.pending(0)  # of the two others at most we know that they have died
    assert call.connection not in lost
    call.answer()
    assert next(reader)["from"] == call.connection.record.endpoint_id


@pytest.mark.fault("F2")
def test_batch_that_three_endpoints_died_with_fails_by_its_indices(stage: Stage, tools: Any) -> None:
    wanted = tools.requests(tools.spec(), num_batches=1)
    reader = stage.read(wanted, num_endpoints=4)
    lost = [lose(stage) for _ in range(3)]
    leave(reader, lost, hosts=set())
    with pytest.raises(DatasetError) as caught:
        next(reader)
    names = ", ".join(connection.record.endpoint_id for connection in lost)
    indices = ", ".join(map(str, wanted[0].work.indices))
    assert f"died 3 times ({names}) while it computed the batch with the indices {indices}. " in str(caught.value)


@pytest.mark.fault("F3")
def test_batch_that_three_endpoints_died_with_while_they_sent_it_is_not_blamed(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_endpoints=4)
    lost = [lose(stage, Fault.CUT_OFF) for _ in range(3)]
    leave(reader, lost, hosts=set())
    (call,) = stage.pending(0)
    call.answer()
    assert next(reader)["from"] == call.connection.record.endpoint_id


def test_batch_that_was_lost_is_not_shared_again(stage: Stage, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples may kill endpoints. If another endpoint computes a part of it, two can die at once."""
    named: list[int] = []
    monkeypatch.setattr(
        "hetero.reader.routing.Router.choose_owners",
        lambda _, request, lead: named.append(request.position) or ((), None),
    )
    reader = stage.read(tools.requests(tools.spec(), num_batches=2), num_endpoints=4)
    (call,) = stage.pending(1)
    assert 1 in named
    del named[:]
    call.end(CallFailedError(Fault.UNREACHABLE, "lost"))
    tools.wait_for(lambda: len([each for each in stage.calls if each.request.position == 1]) == 2)
    assert 1 not in named
    assert reader.is_open  # without a reference to it, its fetches would be given up


@pytest.mark.fault("F3")
def test_batch_that_is_lost_with_host_after_host_fails_in_time_by_its_first_indices(stage: Stage, tools: Any) -> None:
    wanted = tools.requests(tools.spec(), num_batches=1, batch_size=70)
    reader = stage.read(wanted, num_endpoints=5)
    for _ in range(3):
        host = lose(stage)
        leave(reader, [host], hosts={host.record.host})
    tools.wait_for(lambda: len(reader._fleet.router.endpoints) == 2)
    stage.pending(0)
    stage.now_s += 301.0
    lose(stage)
    with pytest.raises(EndpointUnavailableError) as caught:
        next(reader)
    assert caught.value.exit_code is ExitCode.DATA_PLANE_LOST
    head, note, *endpoints = str(caught.value).splitlines()
    assert head == "no endpoint served batch 0 of data set 'numbers' for 301 s."
    indices = ", ".join(map(str, wanted[0].work.indices[:64]))
    assert note == f"    lost calls for batch 0: 4. Its indices: {indices} and 6 more"
    assert len(endpoints) == 5


@pytest.mark.fault("F3")
def test_batch_that_the_last_hosts_were_lost_with_is_named(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_endpoints=2)
    lost = [lose(stage) for _ in range(2)]
    leave(reader, lost, hosts={connection.record.host for connection in lost})
    tools.wait_for(lambda: reader._fleet.stats.retries == 2 and not reader._fleet.router.endpoints)
    reader._fetchers._outcome_arrived.wait = lambda _: advance(stage)  # type: ignore[method-assign]
    words = r"no endpoint served data set 'numbers' for(?s:.)*lost calls for batch 0: 2\."
    with pytest.raises(EndpointUnavailableError, match=words):
        next(reader)


def advance(stage: Stage) -> bool:
    """Let time pass instead of a wait."""
    stage.now_s += 200.0
    return False
