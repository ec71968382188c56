"""Readers whose consumer fetches small batches itself: when it waits, when it is away, and when something fails."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.endpoint.link import SentFetch
from hetero.errors import DatasetError
from hetero.reader import consistency
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.consistency import ServedDataset
from hetero.reader.inline_fetches import InlineFetches
from hetero.reader.reader import Reader
from hetero.reader.receiver_choice import ReceiverChoice
from hetero.reader.routing import Router
from hetero.reader.window import Window
from hetero.wire.faults import CallFailedError, Fault
from tests.support.batch_path.calls import Asked
from tests.support.batch_path.deliveries import num_descriptors

LARGE_WIDTH = 40_000
"""Doubles in a sample. Four such samples are a batch of more than 1 MB."""


def own(reader: Reader) -> InlineFetches:
    return reader._fetchers._inline


def sent_of(reader: Reader) -> int:
    return len(own(reader))


def outstanding(reader: Reader) -> int:
    return sum(connection.num_outstanding for connection in reader._fleet._table.all())


def has_arrived(reader: Reader, tools: Any, num: int) -> None:
    """Wait until so many of the consumer's answers can be received."""
    poll = select.poll()
    for descriptor in own(reader)._sent:
        poll.register(descriptor, select.POLLIN)
    tools.wait_for(lambda: len(poll.poll(0)) == num)


@pytest.fixture(autouse=True)
def consumer_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the consumer receive all batches that are not large."""
    choice = SimpleNamespace(is_consumer=True, come_back=lambda _: None, leave=lambda _: None)
    monkeypatch.setattr(consistency, "ReceiverChoice", lambda: choice)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that received batches which a consumer had requested itself, one entry for each batch."""
    found: list[threading.Thread] = []
    receive = SentFetch.receive

    def noting(sent: SentFetch[Fetched]) -> Any:
        fetched = receive(sent)
        if fetched is not None:
            found.append(threading.current_thread())
        return fetched

    monkeypatch.setattr(SentFetch, "receive", noting)
    return found


@pytest.mark.parametrize("num_endpoints", [1, 3])
def test_consumer_fetches_small_batches_itself(
    shared_job: Any, tools: Any, counted: list[threading.Thread], num_endpoints: int
) -> None:
    shared_job.pool(num_endpoints=num_endpoints)
    wanted = tools.requests(tools.spec(), num_batches=100)
    reader = Reader(shared_job.fleet(), iter(wanted))
    found = list(reader)
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))
    assert len(counted) >= 80  # the first ones show how large they are
    assert set(counted) == {threading.current_thread()}
    assert reader._fleet.stats.batches == 100
    assert reader._fleet.stats.retries == 0
    assert outstanding(reader) == 0


def test_batches_that_became_large_are_fetched_whole(
    shared_job: Any, tools: Any, counted: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only earlier batches show how large the next one is."""
    monkeypatch.setattr(ServedDataset, "observe_size", lambda *_: None)
    shared_job.pool()
    wanted = tools.requests(tools.spec(width=LARGE_WIDTH), num_batches=20)
    fleet = shared_job.fleet()
    with fleet.lock:
        fleet.prepare(wanted[0].spec).batch_bytes = 1000
    found = list(Reader(fleet, iter(wanted)))
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))
    assert len(counted) > 10


def test_consumer_with_a_step_leaves_batches_to_fetchers(
    shared_job: Any, tools: Any, counted: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fetchers receive them while the consumer computes."""
    monkeypatch.setattr(consistency, "ReceiverChoice", ReceiverChoice)
    shared_job.pool()
    wanted = tools.requests(tools.spec(width=LARGE_WIDTH), num_batches=80)
    found = []
    for batch in Reader(shared_job.fleet(), iter(wanted)):
        found.append(batch)
        time.sleep(0.025)  # the training step
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))
    assert not counted


def test_answers_of_a_consumer_that_is_away_are_received_by_another_thread(
    shared_job: Any, tools: Any, counted: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.reader.inline_fetches.ABSENT_S", 0.05)
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    reader = Reader(shared_job.fleet(), iter(wanted))
    found = [next(reader) for _ in range(20)]
    assert outstanding(reader)
    del counted[:]
    tools.wait_for(lambda: outstanding(reader) == 0)
    assert {thread.name for thread in counted} == {"hetero-fleet"}
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))


@pytest.fixture
def never_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other thread receive for the consumer, which a busy machine may hold up for more than a second."""
    monkeypatch.setattr("hetero.reader.inline_fetches.ABSENT_S", 3600.0)


@pytest.mark.usefixtures("never_absent")
def test_answers_that_have_just_arrived_are_left_to_the_consumer(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    reader = Reader(shared_job.fleet(), iter(wanted))
    found = [next(reader) for _ in range(20)]
    sent = sent_of(reader)
    has_arrived(reader, tools, sent)
    own(reader).receive_for_absent()
    assert sent_of(reader) == sent
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))


def test_consumer_that_is_away_while_an_endpoint_ends_loses_nothing(job: Any, tools: Any, asked: list[Asked]) -> None:
    pool = job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    reader = Reader(job.fleet(), iter(wanted))
    found = [next(reader) for _ in range(20)]
    has_arrived(reader, tools, sent_of(reader))
    os.kill(pool.pids[0], signal.SIGKILL)
    tools.wait_for(lambda: pool.num_restarts == 1)
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    for position in (20, 21):  # they had been answered before it ended
        assert [each.is_answered for each in asked if each.position == position] == [True]


def test_consumer_hedges_its_own_request(job: Any, tools: Any, counted: list[threading.Thread]) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(), num_batches=200)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(100)]
    os.kill(pool.pids[0], signal.SIGSTOP)
    try:
        found += reader
    finally:
        os.kill(pool.pids[0], signal.SIGCONT)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.hedges_won
    tools.wait_for(lambda: outstanding(reader) == 0)


@pytest.mark.usefixtures("never_absent")
def test_time_that_the_consumer_was_away_does_not_count(
    shared_job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise requests would be overdue only after long steps, and a stuck endpoint would hold up the training."""
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet = shared_job.fleet()
    reader = Reader(fleet, iter(wanted))
    for _ in range(20):
        next(reader)
    observed: list[float] = []
    monkeypatch.setattr(fleet.hedging, "observe", lambda _request, time_s: observed.append(time_s))
    sent = sent_of(reader)
    has_arrived(reader, tools, sent)
    clock = fleet.clock
    monkeypatch.setattr(own(reader), "_clock", lambda: clock() + 100.0)  # the step took so long
    fleet.clock = own(reader)._clock
    list(reader)  # on a busy machine, another request for the same batch may have been the faster one
    assert observed
    assert max(observed) < 50.0


@pytest.mark.parametrize("how", ["close", "drop"])
def test_reader_that_ends_gives_its_fetches_up(shared_job: Any, tools: Any, how: str) -> None:
    shared_job.pool()
    fleet = shared_job.fleet()
    with contextlib.closing(Reader(fleet, iter(tools.requests(tools.spec())))) as first:
        list(first)
    descriptors = num_descriptors()
    wanted = tools.requests(tools.spec(sample_s=0.0), num_batches=40)
    reader = Reader(fleet, iter(wanted))
    for _ in range(20):
        next(reader)
    assert sent_of(reader)
    fetchers = reader._fetchers
    if how == "close":
        reader.close()
        reader.close()
    else:
        del reader
    tools.wait_for(lambda: not len(fetchers._inline) and not fetchers.window.attempts)
    assert all(connection.num_outstanding == 0 for connection in fleet._table.all())
    tools.wait_for(lambda: num_descriptors() <= descriptors)
    again = Reader(fleet, iter(wanted))
    assert tools.digest(list(again)) == tools.digest(tools.local(shared_job.script, wanted))


@pytest.mark.parametrize("what", ["raise", "close"])
def test_signal_that_arrives_while_the_consumer_waits(
    job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its handler may raise, as that of Ctrl-C does, or close the reader."""
    job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet = job.fleet()
    reader = Reader(fleet, iter(wanted))
    for _ in range(20):
        next(reader)
    pid = job.pools[0].pids[0]
    os.kill(pid, signal.SIGSTOP)  # from now on it waits

    def handle(*_: Any) -> None:
        if what == "raise":
            raise KeyboardInterrupt
        reader.close()

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with contextlib.suppress(KeyboardInterrupt):
            list(reader)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.kill(pid, signal.SIGCONT)
    assert not reader.is_open
    assert outstanding(reader) == 0
    assert not reader._window.attempts


def test_reader_is_closed_by_another_thread_while_its_consumer_waits(job: Any, tools: Any) -> None:
    job.pool()
    reader = Reader(job.fleet(), iter(tools.requests(tools.spec(), num_batches=40)))
    for _ in range(20):
        next(reader)
    pid = job.pools[0].pids[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        ended = threading.Event()

        def consume() -> None:
            with contextlib.suppress(StopIteration):
                while True:
                    next(reader)
            ended.set()

        threading.Thread(target=consume, daemon=True).start()
        tools.wait_for(lambda: own(reader)._is_waiting)
        reader.close()
        assert ended.wait(100.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert outstanding(reader) == 0


def test_news_for_the_consumer_end_its_waiting(job: Any, tools: Any) -> None:
    """For example, a fetcher has the batch that is next, or an endpoint has joined."""
    job.pool()
    reader = Reader(job.fleet(), iter(tools.requests(tools.spec(), num_batches=40)))
    for _ in range(20):
        next(reader)
    num_waits = 0
    receive = own(reader).receive

    def counting(timeout_s: float) -> None:
        nonlocal num_waits
        num_waits += 1
        receive(60.0)  # the reader itself never waits so long

    own(reader).receive = counting  # type: ignore[method-assign]
    pid = job.pools[0].pids[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        consumer = threading.Thread(target=list, args=(reader,), daemon=True)
        consumer.start()
        for _ in range(10):  # a few waits are ended by answers that had arrived
            before = num_waits
            with reader._fleet.lock:
                reader._fetchers.on_fleet_change()
            tools.wait_for(lambda before=before: num_waits > before and own(reader)._is_waiting)
    finally:
        os.kill(pid, signal.SIGCONT)
    consumer.join(100.0)
    assert not consumer.is_alive()


def test_request_without_an_idle_connection_is_handed_to_a_fetcher(
    shared_job: Any, tools: Any, counted: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=60)
    begin, num_sent = EndpointConnection.begin, 0

    def begin_some(connection: EndpointConnection, *given: Any, **options: Any) -> SentFetch[Fetched] | None:
        nonlocal num_sent
        num_sent += 1
        return begin(connection, *given, **options) if num_sent % 3 else None

    monkeypatch.setattr(EndpointConnection, "begin", begin_some)
    found = list(Reader(shared_job.fleet(), iter(wanted)))
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))
    assert 0 < len(counted) < num_sent


def test_own_fetch_that_fails_is_requested_again(shared_job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet = shared_job.fleet()
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(20)]
    reader._fetchers._threads.clear()  # no fetcher is there, as if none had ever been needed
    receive, num_failed = SentFetch.receive, 0

    def failing(sent: SentFetch[Fetched]) -> Any:
        nonlocal num_failed
        fetched = receive(sent)
        if fetched is not None and num_failed < 3:
            num_failed += 1
            raise CallFailedError(Fault.BUSY, "on purpose")
        return fetched

    monkeypatch.setattr(SentFetch, "receive", failing)
    found += reader
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))
    assert num_failed == fleet.stats.retries == 3


def test_error_of_a_sample_is_raised_in_its_place(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    wanted = tools.requests(tools.spec(raise_at=int(tools.requests(tools.spec())[9].work.indices[0])), num_batches=12)
    reader = Reader(shared_job.fleet(), iter(wanted))
    found, failed = [], []
    for position in range(12):
        try:
            found.append(next(reader))
        except Exception as error:  # noqa: BLE001 - counted
            failed.append((position, type(error).__name__))
    assert failed == [(9, "DatasetError")]
    assert len(found) == 11
    assert np.concatenate([batch["index"] for batch in found]).size == 44


def test_collection_of_a_reader_in_the_middle_of_anything_does_not_block(shared_job: Any, tools: Any) -> None:
    """The garbage collector runs in any thread, whatever locks that thread holds."""
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet = shared_job.fleet()
    dropped = Reader(fleet, iter(wanted))
    for _ in range(20):
        next(dropped)
    fetchers = dropped._fetchers
    (connection,) = fleet.router.endpoints
    link = connection._link
    assert link is not None
    assert len(fetchers._inline)
    with link._lock, fetchers._inline.lock, fleet.lock:
        dropped._finalizer()
    tools.wait_for(lambda: fetchers.is_closed and connection.num_outstanding == 0)
    assert not len(fetchers._inline)
    assert tools.digest(list(Reader(fleet, iter(wanted)))) == tools.digest(tools.local(shared_job.script, wanted))


@pytest.mark.parametrize(("cls", "name"), [(InlineFetches, "add"), (Router, "release"), (Window, "start")])
def test_interrupt_between_two_steps_leaves_nothing(
    shared_job: Any, tools: Any, monkeypatch: pytest.MonkeyPatch, cls: type, name: str
) -> None:
    """Ctrl-C may end the consumer between any two of its steps, for example before it has added a sent request."""
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet = shared_job.fleet()
    reader = Reader(fleet, iter(wanted))
    for _ in range(20):
        next(reader)
    step = getattr(cls, name)
    is_interrupted = False

    def interrupted(*given: Any, **options: Any) -> Any:
        nonlocal is_interrupted
        if not is_interrupted and threading.current_thread() is threading.main_thread():
            is_interrupted = True
            raise KeyboardInterrupt
        return step(*given, **options)

    monkeypatch.setattr(cls, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(reader)
    monkeypatch.undo()
    assert not reader.is_open
    (connection,) = fleet.router.endpoints
    tools.wait_for(lambda: connection.num_outstanding == 0)
    link = connection._link
    assert link is not None
    tools.wait_for(lambda: len(link._connections) == len(link._idle))
    assert tools.digest(list(Reader(fleet, iter(wanted)))) == tools.digest(tools.local(shared_job.script, wanted))


def test_small_batches_need_no_fetchers(shared_job: Any, tools: Any) -> None:
    shared_job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(), num_batches=400)
    fleet = shared_job.fleet()
    for _ in range(3):  # fetchers open the connections that are in use at the same time
        list(Reader(fleet, iter(wanted)))
    reader = Reader(fleet, iter(wanted))
    assert len(list(reader)) == 400
    assert not reader._fetchers._threads


def test_small_batches_keep_within_the_bytes_of_the_window(shared_job: Any, tools: Any) -> None:
    shared_job.pool()
    wanted = tools.requests(tools.spec(), num_batches=40)
    fleet = shared_job.fleet()
    list(Reader(fleet, iter(wanted)))
    batch_bytes = fleet._datasets[wanted[0].spec].batch_bytes
    reader = Reader(fleet, iter(wanted), window_bytes=batch_bytes + 1)
    found = []
    for batch in reader:
        found.append(batch)
        assert reader._window.used_bytes <= batch_bytes + 1
    assert tools.digest(found) == tools.digest(tools.local(shared_job.script, wanted))


def test_own_request_that_is_not_answered_in_time_is_sent_again(job: Any, tools: Any) -> None:
    pool = job.pool(num_endpoints=2)
    wanted = tools.requests(tools.spec(), num_batches=60)
    fleet = job.fleet(data_timeout_s=1.5)
    fleet.hedging.budget._credit = -1000  # no hedge helps out
    reader = Reader(fleet, iter(wanted))
    found = [next(reader) for _ in range(20)]
    os.kill(pool.pids[0], signal.SIGSTOP)
    try:
        found += reader
    finally:
        os.kill(pool.pids[0], signal.SIGCONT)
    assert tools.digest(found) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.retries


def test_batch_that_kills_its_endpoints_is_found_among_own_requests(job: Any, tools: Any) -> None:
    job.pool(endpoint_restarts=10)
    killing = int(tools.requests(tools.spec(), num_batches=25)[20].work.indices[2])  # no index comes twice
    reader = Reader(job.fleet(), iter(tools.requests(tools.spec(kill_at=killing), num_batches=25)))
    for _ in range(20):
        next(reader)
    with pytest.raises(DatasetError, match=r"the endpoint died 3 times(?s:.*)indices"):
        next(reader)
