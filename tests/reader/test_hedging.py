from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero.batches.failures import dataset_error
from hetero.batches.skips import Skip, Skips
from hetero.errors import DatasetError, EndpointUnavailableError, ProtocolError
from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.hedging import Budget
from hetero.reader.reader import Reader
from hetero.wire.faults import CallFailedError, Fault
from tests.support.batch_path.staging import NBYTES, Call, Stage


def counters(reader: Reader) -> dict[str, int]:
    stats = reader._fleet.stats
    return {
        name: getattr(stats, name)
        for name in ("hedges", "hedges_won", "retries", "failovers", "endpoint_losses")
        if getattr(stats, name)
    }


def overdue_pair(stage: Stage, tools: Any, **options: Any) -> tuple[Reader, Call, Call]:
    """Return a reader with one batch, which two endpoints have, and the calls in order."""
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), **options)
    (first,) = stage.pending(0)
    stage.hedge(reader)
    first_again, second = stage.pending(0, 2)
    assert first_again is first
    assert second.connection is not first.connection
    return reader, first, second


def test_overdue_batch_comes_from_the_other_endpoint_and_the_loser_is_cancelled(stage: Stage, tools: Any) -> None:
    reader, first, second = overdue_pair(stage, tools)
    second.answer()
    assert next(reader)["from"] == second.connection.record.endpoint_id
    stage.settled(reader)
    assert first.is_cancelled
    assert not second.is_cancelled
    assert first.connection.state is ConnectionState.READY
    assert counters(reader) == {"hedges": 1, "hedges_won": 1}
    assert next(reader, None) is None


def test_first_attempt_that_answers_after_all_wins(stage: Stage, tools: Any) -> None:
    reader, first, second = overdue_pair(stage, tools)
    first.answer()
    assert next(reader)["from"] == first.connection.record.endpoint_id
    stage.settled(reader)
    assert second.is_cancelled
    assert second.connection.state is ConnectionState.READY
    assert counters(reader) == {"hedges": 1}


@pytest.mark.fault("F23")
def test_late_answer_of_a_loser_is_dropped(stage: Stage, tools: Any) -> None:
    reader, first, second = overdue_pair(stage, tools)
    first.cancel = lambda: None  # type: ignore[method-assign]  # the answer was on its way
    second.answer()
    assert next(reader)["from"] == second.connection.record.endpoint_id
    first.answer()
    stage.settled(reader)
    assert reader._fleet.stats.batches == 1
    assert reader._fleet.stats.received_bytes == 2 * NBYTES
    assert reader._window.outcomes == {}


def test_samples_skipped_in_both_answers_are_reported_once(stage: Stage, tools: Any) -> None:
    skips = Skips(num_skipped=1, listed=(Skip(index="17", exception="ValueError: bad"),), epoch=1, host="algo-1/0")
    reported: list[Skips] = []
    reader, first, second = overdue_pair(stage, tools, on_skips=reported.append)
    first.cancel = lambda: None  # type: ignore[method-assign]  # the answer was on its way
    second.answer(skips)
    first.answer(skips)
    stage.settled(reader)
    assert reported == []
    next(reader)
    assert reported == [skips]
    assert next(reader, None) is None
    assert reported == [skips]


@pytest.mark.parametrize(
    "error",
    [
        CallFailedError(Fault.UNREACHABLE, ""),
        CallFailedError(Fault.LATE, ""),
        CallFailedError(Fault.BUSY, ""),
        CallFailedError(Fault.MALFORMED, ""),
        ProtocolError("damaged"),
    ],
    ids=lambda error: str(error)[:10],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_one_attempt_leaves_it_to_the_other(
    stage: Stage, tools: Any, error: Exception, failing: int
) -> None:
    reader, *calls = overdue_pair(stage, tools)
    calls[failing].end(error)
    tools.wait_for(lambda: len(reader._window.attempts) == 1)
    calls[1 - failing].answer()
    assert next(reader)["from"] == calls[1 - failing].connection.record.endpoint_id
    stage.settled(reader)
    assert reader._fleet.stats.retries == 0
    assert reader._fleet.stats.failovers == 0
    assert reader._fleet.stats.hedges_won == (failing == 0)


def test_batch_is_asked_for_again_once_both_attempts_have_failed(stage: Stage, tools: Any) -> None:
    reader, first, second = overdue_pair(stage, tools)
    first.end(CallFailedError(Fault.UNPREPARED, ""))
    tools.wait_for(lambda: len(reader._window.attempts) == 1)
    second.end(CallFailedError(Fault.UNPREPARED, ""))
    stage.pending(0)[0].answer()
    assert next(reader)["index"] is not None
    stage.settled(reader)
    assert counters(reader) == {"hedges": 1, "retries": 1}


@pytest.mark.parametrize("failing", [0, 1])
def test_users_exception_in_either_attempt_is_final(stage: Stage, tools: Any, failing: int) -> None:
    reader, *calls = overdue_pair(stage, tools)
    calls[failing].end(dataset_error("broken", dataset="numbers", host="algo-1/0", stage="sample"))
    with pytest.raises(DatasetError, match="broken"):
        next(reader)
    assert calls[1 - failing].is_cancelled
    assert counters(reader) == {"hedges": 1}


def test_nothing_is_hedged_before_enough_was_observed(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_observed=15)
    stage.pending(0)
    assert stage.hedge(reader, 1e6) == float("inf")
    assert counters(reader) == {}


def test_consumer_learns_when_the_batch_will_be_overdue(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1))
    stage.pending(0)
    assert stage.hedge(reader, 0.2) == pytest.approx(0.3)
    assert stage.hedge(reader, 0.2) == pytest.approx(0.1)
    assert counters(reader) == {}


def test_time_behind_other_batches_of_the_endpoint_does_not_count(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=4), num_endpoints=2)
    first, second = stage.pending(0)[0], stage.pending(2)[0]
    assert first.connection is second.connection
    stage.now_s += 0.4
    first.answer()
    next(reader)
    stage.pending(1)[0].answer()
    next(reader)
    assert stage.hedge(reader, 0.4) == pytest.approx(0.1)


def test_batch_has_at_most_two_attempts(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_endpoints=3)
    stage.pending(0)
    for _ in range(5):
        stage.hedge(reader, 10.0)
    stage.pending(0, 2)
    assert counters(reader) == {"hedges": 1}


def test_only_the_batch_that_is_waited_for_is_hedged(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=4), num_endpoints=2)
    _, second, _, fourth = [stage.pending(position)[0] for position in range(4)]  # two on either endpoint
    second.answer()
    fourth.answer()  # the endpoint has nothing else to do
    tools.wait_for(lambda: len(reader._window.attempts) == 2)
    stage.hedge(reader, 100.0)
    stage.pending(0, 2)
    stage.hedge(reader, 100.0)
    stage.pending(2, 1)
    assert counters(reader) == {"hedges": 1}


def test_endpoint_with_as_much_to_do_gets_no_hedge_and_its_answer_wakes_the_consumer(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=4), num_endpoints=2)
    for position in range(4):
        stage.pending(position)
    stage.hedge(reader)
    assert counters(reader) == {}
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.append(next(reader)))
    consumer.start()
    stage.pending(1)[0].answer()
    _, hedge = stage.pending(0, 2)
    hedge.answer()
    consumer.join(100)
    assert found[0]["from"] == hedge.connection.record.endpoint_id


def test_suspect_runs_alone_and_is_not_hedged(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1))
    stage.pending(0)[0].end(CallFailedError(Fault.UNREACHABLE, "reset"))
    stage.pending(0)
    stage.hedge(reader, 100.0)
    stage.pending(0, 1)[0].answer()
    next(reader)
    assert counters(reader) == {"retries": 1, "failovers": 1, "endpoint_losses": 1}


def test_batch_that_was_never_sent_is_not_blamed(stage: Stage, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.reader.connection._random.uniform", lambda *_: 1e6)  # none comes back
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_endpoints=4)
    for _ in range(3):
        stage.pending(0)[0].end(CallFailedError(Fault.UNSENT, "it is gone"))
    tools.wait_for(lambda: reader._fleet.stats.retries == 3)
    (call,) = stage.pending(0)
    assert not any(attempt.is_alone for attempt in reader._window.attempts)
    call.answer()
    assert next(reader)["from"] == call.connection.record.endpoint_id
    stage.settled(reader)
    assert counters(reader) == {"retries": 3, "failovers": 3, "endpoint_losses": 3}


def test_batch_whose_endpoints_neither_return_nor_leave_fails_in_time(
    stage: Stage, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.reader.connection._random.uniform", lambda *_: 1e6)
    reader = stage.read(tools.requests(tools.spec(), num_batches=1), num_endpoints=4)
    for _ in range(3):
        stage.pending(0)[0].end(CallFailedError(Fault.UNREACHABLE, "reset"))
    tools.wait_for(lambda: reader._fleet.stats.retries == 3)
    with reader._fleet.lock:
        assert reader._fleet.has_ready(tools.spec())
    stage.now_s += 301.0
    with pytest.raises(EndpointUnavailableError, match=r"for 301 s(?s:.)*the connection failed: reset"):
        next(reader)


def test_purity_check_is_not_hedged(stage: Stage, tools: Any) -> None:
    (request,) = tools.requests(tools.spec(), num_batches=1)
    reader = stage.read([replace(request, verify=True)])
    stage.pending(0)
    assert stage.hedge(reader, 100.0) == float("inf")
    stage.pending(0, 1)[0].answer()
    next(reader)
    assert counters(reader) == {}


@pytest.mark.parametrize(("window_bytes", "hedges"), [(2 * NBYTES, 1), (2 * NBYTES - 1, 0)])
def test_hedge_has_a_place_in_a_full_window_but_not_in_one_that_is_exceeded(
    stage: Stage, tools: Any, window_bytes: int, hedges: int
) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=2))
    window, dataset = reader._window, reader._dataset
    assert dataset is not None
    stage.pending(1)[0].answer()
    tools.wait_for(lambda: window._held_bytes == NBYTES)
    with reader._fleet.lock:
        dataset.batch_bytes, window._max_bytes = NBYTES, window_bytes
    stage.hedge(reader)  # one batch held, one in progress
    assert reader._fleet.stats.hedges == hedges
    reader.close()
    stage.settled(reader)


def test_close_with_a_hedge_in_progress_ends_both(stage: Stage, tools: Any) -> None:
    reader, first, second = overdue_pair(stage, tools)
    reader.close()
    assert first.is_cancelled
    assert second.is_cancelled
    stage.settled(reader)
    assert counters(reader) == {"hedges": 1}


def test_overtaken_endpoint_gets_its_next_request_only_after_a_while(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=40), num_endpoints=2)
    reader._window._growth.is_held_up = lambda **_: False  # type: ignore[method-assign]  # one request for each batch
    slow, fast = (stage.pending(position)[0].connection for position in (0, 1))
    with reader._fleet.lock:
        for _ in range(Budget.REQUESTS_PER_HEDGE):  # for a second hedge
            reader._fleet.hedging.budget.earn()

    def answer(position: int) -> None:
        stage.pending(position)[0].answer()
        tools.wait_for(lambda: position in reader._window.outcomes)

    def overtake(position: int) -> None:
        stage.hedge(reader)
        next(call for call in stage.pending(position, 2) if call.connection is fast).answer()

    def newest() -> EndpointConnection:
        """Take a batch. Return the endpoint of the request that takes its place."""
        next(reader)
        return stage.pending(reader._window._num_added - 1)[0].connection

    answer(3)
    overtake(0)
    assert newest() is fast  # for 0.6 s
    answer(1)
    assert newest() is fast
    answer(4)
    answer(5)
    overtake(2)  # the second of those it kept, 1.2 s
    assert newest() is fast  # for 2.4 s
    assert newest() is fast
    stage.now_s += 2.5
    assert newest() is slow
    assert newest() is fast  # one at a time
    answer(8)
    answer(6)
    assert newest() is slow
    assert counters(reader) == {"hedges": 2, "hedges_won": 2}


@pytest.mark.parametrize("has_answered", [False, True])
def test_overtaken_endpoint_whose_samples_come_from_other_hosts_is_avoided_if_it_is_silent(
    stage: Stage, tools: Any, has_answered: bool
) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=4), num_endpoints=2)
    (slow,) = (call.connection for call in stage.pending(0))
    later = sorted((stage.pending(number)[0] for number in (1, 2, 3)), key=lambda call: call.connection is slow)
    for attempt in reader._window.attempts:
        attempt.owners = np.zeros(4, np.uint8)
    stage.now_s += 0.1
    for call in later if has_answered else later[:2]:  # the last one is of the slow endpoint
        call.answer()
        tools.wait_for(lambda position=call.request.position: position in reader._window.outcomes)
    stage.hedge(reader)
    next(call for call in stage.pending(0, 2) if call.connection is not slow).answer()
    next(reader)
    assert slow.is_avoided(stage.now_s) is not has_answered


def test_many_overdue_batches_stay_within_the_budget(stage: Stage, tools: Any) -> None:
    num_batches = 60
    reader = stage.read(tools.requests(tools.spec(), num_batches=num_batches), num_endpoints=2)
    fleet = reader._fleet
    fleet.hedging.observe = lambda *_: None  # type: ignore[method-assign]  # the deadline would follow
    for position in range(num_batches):
        (call,) = stage.pending(position)
        with fleet.lock:
            for connection in fleet.router.endpoints:  # as if there were always an endpoint with less to do
                connection.num_outstanding -= 10 * (connection is not call.connection)
        stage.hedge(reader, 100.0)
        with fleet.lock:
            for connection in fleet.router.endpoints:
                connection.num_outstanding += 10 * (connection is not call.connection)
        assert fleet.stats.hedges <= 1 + (position + 1 + reader._window.size) / 20
        call.answer()
        next(reader)
    assert fleet.stats.hedges == 1 + num_batches // 20
    assert fleet.stats.hedges_won == 0
    stage.settled(reader)


def test_request_that_is_refused_and_asked_for_again_earns_its_part_of_a_hedge_once(stage: Stage, tools: Any) -> None:
    reader = stage.read(tools.requests(tools.spec(), num_batches=1))
    (call,) = stage.pending(0)
    for _ in range(Budget.REQUESTS_PER_HEDGE):
        call.end(CallFailedError(Fault.UNPREPARED, ""))
        (call,) = stage.pending(0)
    budget = reader._fleet.hedging.budget
    with reader._fleet.lock:
        budget.spend()
        assert not budget.allows
    call.answer()
    next(reader)
    stage.settled(reader)
    assert counters(reader) == {"retries": Budget.REQUESTS_PER_HEDGE}


def test_batch_that_holds_up_the_others_stretches_the_window_and_order_is_kept(stage: Stage, tools: Any) -> None:
    wanted = tools.requests(tools.spec(), num_batches=60)
    reader = stage.read(wanted, num_observed=0)
    size = reader._window.size
    found: list[Any] = []
    consumer = threading.Thread(target=lambda: found.extend(reader))
    consumer.start()
    for position in range(1, 8 * size):
        stage.pending(position)[0].answer()  # each gives its place to another, while the first is waited for
    tools.wait_for(lambda: len(reader._window.outcomes) == 8 * size - 1)
    assert reader._window._num_added == 8 * size
    assert found == []
    stage.pending(0)[0].answer()
    for position in range(8 * size, len(wanted)):
        stage.pending(position)[0].answer()
    consumer.join(100)
    assert [batch["index"].tolist() for batch in found] == [request.work.indices.tolist() for request in wanted]
    stage.settled(reader)
    assert reader._window._held_bytes == 0


@pytest.mark.parametrize(
    ("nbytes", "options", "num_batches"),
    [(1000, {"window_bytes": 6 * 1000}, 6), (8 * 2**20, {}, 4 + 3)],
    ids=["window_bytes", "24 MiB beyond the plan"],
)
def test_stretched_window_keeps_to_its_bytes(
    stage: Stage, tools: Any, nbytes: int, options: dict[str, int], num_batches: int
) -> None:
    stage.nbytes = nbytes
    reader = stage.read(tools.requests(tools.spec(), num_batches=60), num_observed=0, **options)
    assert reader._window.size == 4
    with reader._fleet.lock:
        assert reader._dataset is not None
        reader._dataset.batch_bytes = nbytes
        reader._fetchers.on_fleet_change()
    consumer = threading.Thread(target=lambda: next(reader))
    consumer.start()
    for position in range(1, num_batches):
        stage.pending(position)[0].answer()
    tools.wait_for(lambda: reader._window._held_bytes == (num_batches - 1) * nbytes)
    tools.wait_for(lambda: reader._window._num_added > num_batches)
    assert [call.request.position for call in stage.calls if not call._ended.is_set()] == [0]
    stage.pending(0)[0].answer()
    consumer.join(100)
    stage.pending(num_batches)
