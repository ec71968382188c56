"""The window and its fetchers: endpoints do what the test says, and nothing is left to the fetchers' own polling."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hetero.batches.fetch import Description
from hetero.batches.request import BatchRequest
from hetero.control.members.directory import Directory, EndpointRecord
from hetero.errors import HeteroError, ProtocolError
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.consistency import ServedDataset
from hetero.reader.fetchers import Fetchers
from hetero.reader.fleet import Fleet
from hetero.reader.outcomes import Outcomes
from hetero.reader.reader import Reader
from hetero.wire.faults import CallFailedError, Fault
from tests.support.batch_path.staging import Stage

Outcome = int | CallFailedError


class Calls:
    """The fetches in progress, by position. Each ends when the test says how."""

    def __init__(self) -> None:
        self.pending: dict[int, Callable[[Outcome], None]] = {}
        self._is_over = False

    def fetch(self, request: BatchRequest) -> Fetched:
        ended = threading.Event()
        found: list[Outcome] = []

        def end(outcome: Outcome) -> None:
            found.append(outcome)
            ended.set()

        self.pending[request.position] = end
        if self._is_over:
            end(0)
        assert ended.wait(100)
        (outcome,) = found
        if isinstance(outcome, CallFailedError):
            raise outcome
        return Fetched(batch=request.position, nbytes=outcome, num_queued=0)

    def end(self, position: int, outcome: Outcome) -> None:
        """Answer with so many bytes, or fail."""
        self.pending.pop(position)(outcome)

    def end_all(self) -> None:
        """Answer those, and whatever else is asked for."""
        self._is_over = True
        for position in list(self.pending):
            self.end(position, 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    calls = Calls()

    class Connection(EndpointConnection):
        def prepare(self, *_: Any, **__: Any) -> Description:
            return Description(num_samples=100, fingerprint="f", environment={})

        def fetch(self, request: BatchRequest, **_: Any) -> Fetched:
            return calls.fetch(request)

    monkeypatch.setattr("hetero.reader.fleet.EndpointConnection", Connection)
    monkeypatch.setattr("hetero.reader.fetchers.POLL_S", 1e6)
    yield calls
    calls.end_all()


@pytest.fixture
def read(calls: Calls, tools: Any) -> Iterator[Callable[..., Reader]]:
    """Return a function that opens a reader of some batches. Four endpoints are ready for it."""
    opened: list[tuple[Fleet, Reader]] = []  # a reader that is dropped would wait for the calls of its fetchers
    records = [
        EndpointRecord(endpoint_id=f"algo-{n}/0", host=f"algo-{n}", address="127.0.0.1:9", incarnation="a")
        for n in range(1, 5)
    ]

    def read(num_batches: int, **options: Any) -> Reader:
        fleet = Fleet(Directory(records), None, job_id="x")

        wanted = tools.requests(tools.spec(), num_batches=num_batches)
        fleet.describe(wanted[0].spec)
        tools.wait_for(
            lambda: (
                len(fleet.router.endpoints) == 4 and all(each.serves(wanted[0].spec) for each in fleet.router.endpoints)
            )
        )
        opened.append((fleet, Reader(fleet, iter(wanted), **options)))
        return opened[-1][1]

    yield read
    for fleet, _ in opened:
        threading.Thread(target=fleet.close, daemon=True).start()  # blocks until the calls have ended
        tools.wait_for(lambda fleet=fleet: fleet._is_closed)


def is_at_rest(reader: Reader) -> bool:
    """Return whether every fetcher fetches, or waits and was not woken. Check that no missing batch has room."""
    window, fetchers = reader._window, reader._fetchers
    with reader._fleet.lock:
        if len(fetchers._work_exists._waiters) + len(window.attempts) < len(fetchers._threads):  # type: ignore[attr-defined]
            return False
        for batch in window.missing:
            if reader._fleet.has_ready(batch.request.spec):
                assert not window.has_room(batch)
        return True


def test_window_whose_fetcher_could_not_be_started_can_be_closed(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name.startswith("hetero-fetcher"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    (request,) = tools.requests(tools.spec(), num_batches=1)
    with Fleet(Directory(), None, job_id="x") as fleet:
        reader = Reader(fleet, iter([]))
        with pytest.raises(RuntimeError, match="new thread"), fleet.lock:
            reader._fetchers.add(request, ServedDataset(request.spec))
        reader.close()
        assert not reader._fetchers._threads


def test_no_request_that_has_room_is_forgotten_while_fetchers_wait(
    read: Callable[..., Reader], calls: Calls, tools: Any
) -> None:
    reader, rng = read(400, prefetch_factor=4, window_bytes=4000), random.Random(3)
    window = reader._window
    delivered = 0
    while delivered < 400:
        tools.wait_for(lambda: calls.pending or window.is_deliverable)
        tools.wait_for(lambda: is_at_rest(reader))
        for position in rng.sample(sorted(calls.pending), rng.randint(0, len(calls.pending))):
            outcome: Outcome = rng.choice((1, 10, 1000))  # one that is small makes room for several
            if rng.random() < 0.1:
                outcome = CallFailedError(Fault.UNPREPARED, "")  # asked for again, when the endpoint is prepared again
            calls.end(position, outcome)
        tools.wait_for(lambda: is_at_rest(reader))
        while window.is_deliverable and rng.random() < 0.8:
            assert next(reader) == delivered
            delivered += 1


def test_a_place_that_is_free_wakes_the_fetchers_that_it_has_work_for(
    read: Callable[..., Reader], calls: Calls, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look = Fetchers._start_first

    def counting(fetchers: Fetchers) -> Any:
        nonlocal looks
        looks += 1
        return look(fetchers)

    reader = read(100, prefetch_factor=8, window_bytes=4000)
    for delivered in range(60):
        if delivered == 20:  # every fetcher is there, and the size is known
            assert len(reader._fetchers._threads) == 32
            monkeypatch.setattr(Fetchers, "_start_first", counting)
        tools.wait_for(lambda delivered=delivered: delivered in calls.pending)
        calls.end(delivered, 1000)
        assert next(reader) == delivered
    tools.wait_for(lambda: is_at_rest(reader))
    # Per batch: the fetcher that had it, the one that is woken for its place and the next one, one for the new request.
    assert looks <= 40 * 5


def test_busy_endpoint_is_asked_again_as_soon_as_it_may(read: Callable[..., Reader], calls: Calls, tools: Any) -> None:
    reader = read(1)
    tools.wait_for(lambda: 0 in calls.pending)
    with reader._fleet.lock:
        for connection in reader._fleet.router.endpoints:
            connection.busy_until_s = reader._fleet.clock() + 0.2
    calls.end(0, CallFailedError(Fault.BUSY, ""))
    tools.wait_for(lambda: 0 in calls.pending)


def test_refused_endpoint_has_no_place_in_the_window(read: Callable[..., Reader]) -> None:
    reader = read(1, prefetch_factor=2)
    fleet = reader._fleet
    assert reader._window.size == 8
    with fleet.lock:
        fleet.call_failed(
            fleet.router.endpoints[0],
            CallFailedError(Fault.FOREIGN, ""),
            fleet.router.endpoints[0].generation,
        )
        assert reader._window.size == 6


def test_fetcher_that_ends_with_an_error_is_no_silent_wait(
    stage: Stage, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=2))
    monkeypatch.setattr(Outcomes, "_answered", lambda *_: 1 / 0)
    stage.pending(0)[0].answer()
    with pytest.raises(HeteroError, match="internal error while fetching batches: ZeroDivisionError"):
        next(reader)


def test_fleet_closed_under_a_reader_is_an_error_and_no_end(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=4))
    stage.pending(0)[0].answer()
    next(reader)
    reader._fleet.close()
    with pytest.raises(HeteroError, match="is closed"):
        next(reader)


def test_reader_closed_by_itself_has_ended(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=4))
    reader.close()
    assert list(reader) == []


@pytest.mark.parametrize("error", [CallFailedError(Fault.LATE, "x"), ProtocolError("damaged")])
def test_request_that_an_endpoint_failed_at_goes_to_another_one(stage: Stage, tools: Any, error: Exception) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1))
    (first,) = stage.pending(0)
    first.end(error)
    (second,) = stage.pending(0)
    assert second.connection is not first.connection
    second.answer()
    assert len(list(reader)) == 1


@pytest.mark.parametrize(("nbytes", "num_asked"), [(24 * 2**20, 3), (24 * 2**20 + 1, 1)])
def test_batch_of_the_loop_has_a_place_of_its_own_if_it_is_small(
    stage: Stage, tools: Any, nbytes: int, num_asked: int
) -> None:
    def check_asked(num: int) -> None:
        for position in range(6, 6 + num):
            stage.pending(position)
        assert {call.request.position for call in stage.calls} == set(range(6 + num))

    stage.nbytes = nbytes
    reader = stage.read(tools.requests(tools.spec(), num_batches=20), num_endpoints=1, num_observed=0)
    for position in range(6):
        stage.pending(position)[0].answer()
        next(reader)
    check_asked(num_asked)
    loop = threading.Thread(target=lambda: next(reader, None))
    loop.start()  # it comes back, so its large batch counts no more
    check_asked(max(num_asked, 2))
    reader.close()
    loop.join()
