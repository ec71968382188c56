"""Fetches of a link that end before their answer is there: cancelled, late, or closed together with the link."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero.endpoint.link import Call
from hetero.endpoint.replies import Reply
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.transports.interface import Transport
from tests.support.batch_path.calls import fault_of, in_thread
from tests.support.batch_path.deliveries import NETWORK, TCP
from tests.support.batch_path.services import echo, fetch
from tests.support.listening import full_listener


def test_fetch_cancelled_before_it_has_a_connection_ends_at_once(start_endpoint: Any, link_to: Any) -> None:
    endpoint = start_endpoint(transport=NETWORK)
    link = link_to(endpoint.record, NETWORK)
    for _ in range(3):
        fault, _ = fault_of(lambda: fetch(link, on_call=lambda call: call.cancel()))
        assert fault is Fault.CANCELLED
        assert fetch(link) == {"request": b"request"}


def test_fetch_cancelled_while_the_endpoint_computes_frees_both_sides(
    start_endpoint: Any, link_to: Any, tools: Any
) -> None:
    begun, has_noticed = threading.Event(), threading.Event()

    def answer(request: bytes, reply: Reply) -> Any:
        if request != b"slow":
            return echo(request, reply)
        begun.set()
        tools.wait_for(reply.has_left)
        has_noticed.set()
        return None

    link = link_to(start_endpoint(answer, transport=NETWORK).record, NETWORK)
    calls: list[Call] = []
    join = in_thread(lambda: fetch(link, b"slow", on_call=calls.append))
    assert begun.wait(100)
    calls[0].cancel()
    calls[0].cancel()  # idempotent
    assert fault_of(join)[0] is Fault.CANCELLED
    assert has_noticed.wait(100)
    assert fetch(link) == {"request": b"request"}


def test_fetch_cancelled_in_the_middle_of_its_payload_leaves_the_next_one_alone(
    start_endpoint: Any, link_to: Any
) -> None:
    endpoint = start_endpoint(
        lambda request, _reply: EncodedBatch({"large": np.full(2**20, request[0], np.uint8)}, request=request),
        transport=NETWORK,
    )
    link = link_to(endpoint.record, NETWORK)
    calls: list[Call] = []

    def allocate(nbytes: int) -> memoryview:
        calls[0].cancel()
        return memoryview(bytearray(nbytes))

    decoder = BatchDecoder(allocate=allocate)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetero.wire.framing._allocate", allocate)
        link.attend()
        fault, _ = fault_of(lambda: link.fetch(b"a", decoder, timeout_s=60.0, on_call=calls.append))
    assert fault is Fault.CANCELLED
    assert (fetch(link, b"b")["large"] == ord("b")).all()
    assert endpoint.num_admitted == 2


def test_cancel_after_the_end_leaves_the_next_fetch_on_the_connection_alone(start_endpoint: Any, link_to: Any) -> None:
    endpoint = start_endpoint(transport=NETWORK)
    link = link_to(endpoint.record, NETWORK)
    calls: list[Call] = []
    for number in range(20):
        assert fetch(link, b"%d" % number, on_call=calls.append) == {"request": b"%d" % number}
        for call in calls:
            call.cancel()
    assert endpoint.num_admitted == 1


@pytest.mark.parametrize("transport", [TCP, NETWORK], ids=["tcp", "in_process"])
def test_cancel_at_any_time_ends_that_fetch_or_none(start_endpoint: Any, link_to: Any, transport: Transport) -> None:
    link = link_to(start_endpoint(transport=transport).record, transport)
    fetch(link)
    rng = random.Random(7)
    faults: list[Fault] = []
    for number in range(300):
        calls: list[Call] = []
        begun, spins = threading.Event(), rng.randrange(20_000)

        def cancel(begun: threading.Event = begun, calls: list[Call] = calls, spins: int = spins) -> None:
            begun.wait(100)
            for _ in range(spins):
                pass
            calls[0].cancel()

        def started(call: Call, begun: threading.Event = begun, calls: list[Call] = calls) -> None:
            calls.append(call)
            begun.set()

        join = in_thread(cancel)
        try:
            assert fetch(link, b"%d" % number, on_call=started) == {"request": b"%d" % number}
        except CallFailedError as error:
            faults.append(error.fault)
        assert fetch(link, b"next %d" % number) == {"request": b"next %d" % number}
        join()
    assert set(faults) == {Fault.CANCELLED}


@pytest.mark.fault("F23")
def test_late_answer_is_not_taken_for_that_of_the_next_request(start_endpoint: Any, link_to: Any) -> None:
    proceed = threading.Event()

    def answer(request: bytes, reply: Reply) -> Any:
        if request == b"late":
            assert proceed.wait(100)
        return echo(request, reply)

    link = link_to(start_endpoint(answer, transport=NETWORK).record, NETWORK)
    fetch(link)
    fault, details = fault_of(lambda: fetch(link, b"late", timeout_s=0.0))
    assert (fault, details) == (Fault.LATE, "waited 0 s")
    proceed.set()
    for _ in range(3):
        assert fetch(link, b"next") == {"request": b"next"}


def test_close_while_fetching_fails_the_fetches_and_ends_every_thread(
    start_endpoint: Any, link_to: Any, tools: Any
) -> None:
    endpoint = start_endpoint(lambda _request, reply: tools.wait_for(reply.has_left), transport=NETWORK)
    link = link_to(endpoint.record, NETWORK)
    joins = [in_thread(lambda: fetch(link)) for _ in range(3)]
    tools.wait_for(lambda: endpoint.delivery._num_busy == 3)
    link.close()
    for join in joins:
        assert fault_of(join) == (Fault.UNREACHABLE, "the connection was closed")
    link.close()  # idempotent
    assert fault_of(lambda: fetch(link)) == (Fault.UNSENT, "the connection was closed")
    assert fault_of(link.attend) == (Fault.UNREACHABLE, "the connection was closed")
    tools.wait_for(lambda: not endpoint.delivery._session_tokens)
    tools.wait_for(lambda: endpoint.delivery._num_connections == 0)
    assert not link._connections


@pytest.fixture
def silent_port() -> Iterator[int]:
    with full_listener() as (_, port):
        yield port


@pytest.mark.parametrize("end", ["cancel", "close", "deadline"])
def test_fetch_that_waits_for_a_connection_can_be_ended(
    start_endpoint: Any, link_to: Any, silent_port: int, tools: Any, end: str
) -> None:
    link = link_to(start_endpoint().record)
    link.attend()
    link._port = silent_port
    with link._lock:
        (_, idle) = link._idle.pop()
        link._connections.discard(idle)
    idle.close()
    calls: list[Any] = []
    join = in_thread(lambda: fetch(link, timeout_s=0.1 if end == "deadline" else 60.0, on_call=calls.append))
    if end != "deadline":
        tools.wait_for(lambda: calls and calls[0]._connection is not None)
        calls[0].cancel() if end == "cancel" else link.close()
    expected = {"cancel": Fault.CANCELLED, "close": Fault.UNSENT, "deadline": Fault.LATE}
    assert fault_of(join)[0] is expected[end]
    assert not link._connections
