"""One reader's connections to one endpoint: reuse, cancelling, closing, and endpoints that go away."""

from __future__ import annotations

import contextlib
import gc
import random
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import LARGE, fault_of, in_thread
from services import make_service

from hetero.control.directory import EndpointRecord
from hetero.dataplane import link as link_module
from hetero.dataplane.compute import Compute
from hetero.dataplane.failures import CallFailedError, Fault
from hetero.dataplane.link import Call, Link
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire import channels
from hetero.wire.framing import BatchDecoder, EncodedBatch, Refusal, encode_failure, encode_refusal
from hetero.wire.limits import Limits
from hetero.wire.streams import Stream

import grpc  # isort: skip

HasLeft = Callable[[], bool]
FAILURE = SampleFailure(dataset="d", host="h", stage="sample", sample_index="1", exception="KeyError", traceback="")


def echo(request: bytes, _has_left: HasLeft) -> EncodedBatch | bytes | None:
    return EncodedBatch({"request": request}, request=request)


class Endpoint:
    """The real service in this process, but for what it answers to requests for batches."""

    def __init__(self, answer: Any, *, address: str) -> None:
        self.compute = Compute()
        self.service = make_service(self.compute, address=address)
        self.delivery = self.service.delivery
        self.delivery._answer = answer
        self.num_admitted = 0
        admit = self.delivery._admit_stream

        def counting(stranger: socket.socket, hello: Any) -> bool:
            self.num_admitted += 1
            return admit(stranger, hello)

        self.delivery._admit_stream = counting  # type: ignore[method-assign]
        self._threads = ThreadPoolExecutor(16)
        self.server = grpc.server(self._threads, [self.service.handler()], options=channels.server_options())
        port = channels.bind(self.server, address)
        host = f"[{address}]" if ":" in address else address
        self.record = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address=f"{host}:{port}", incarnation="a")
        self.delivery.start()
        self.server.start()

    def stop(self) -> None:
        self.delivery.stop(0.0)
        self.server.stop(0.0).wait()
        self._threads.shutdown()
        self.compute.close()


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def serve(tools: Any) -> Iterator[Callable[..., Endpoint]]:
    """Start endpoints; afterwards threads and descriptors have to be what they were."""
    gc.collect()
    threads, descriptors = threading.active_count(), num_descriptors()
    endpoints: list[Endpoint] = []

    def serve(answer: Any = echo, *, address: str = "127.0.0.1") -> Endpoint:
        endpoints.append(Endpoint(answer, address=address))
        return endpoints[-1]

    yield serve
    for endpoint in endpoints:
        endpoint.stop()
    endpoints.clear()
    tools.wait_for(lambda: threading.active_count() <= threads, 10.0)
    gc.collect()
    tools.wait_for(lambda: num_descriptors() <= descriptors + 8, 10.0)  # gRPC keeps pollers of its own


@pytest.fixture
def opened() -> Iterator[Callable[[EndpointRecord], Link]]:
    with contextlib.ExitStack() as stack:

        def opened(record: EndpointRecord) -> Link:
            return stack.enter_context(contextlib.closing(Link(record, (), Limits())))

        yield opened


def fetch(
    link: Link, request: bytes = b"request", *, timeout_s: float = 60.0, on_call: Callable[[Call], None] | None = None
) -> Any:
    if not link._end:
        link.attend()
    decoder = BatchDecoder(request=request)
    link.fetch(request, decoder, timeout_s=timeout_s, on_call=on_call or (lambda call: None))
    return decoder.result()


def test_fetches_one_after_the_other_use_one_connection(serve: Any, opened: Any) -> None:
    endpoint = serve()
    link = opened(endpoint.record)
    for number in range(50):
        assert fetch(link, b"%d" % number) == {"request": b"%d" % number}
    assert endpoint.num_admitted == 1


def test_fetches_at_the_same_time_use_a_connection_each_again_and_again(serve: Any, opened: Any) -> None:
    together = threading.Barrier(4)

    def answer(request: bytes, has_left: HasLeft) -> Any:
        together.wait(30)
        return echo(request, has_left)

    endpoint = serve(answer)
    link = opened(endpoint.record)
    for _ in range(5):
        joins = [in_thread(lambda number=number: fetch(link, b"%d" % number)) for number in range(4)]
        assert [join() for join in joins] == [{"request": b"%d" % number} for number in range(4)]
    assert endpoint.num_admitted == 4


def test_fetch_cancelled_before_it_has_a_connection_ends_at_once(serve: Any, opened: Any) -> None:
    endpoint = serve()
    link = opened(endpoint.record)
    for _ in range(3):
        fault, _ = fault_of(lambda: fetch(link, on_call=lambda call: call.cancel()))
        assert fault is Fault.CANCELLED
        assert fetch(link) == {"request": b"request"}


def test_fetch_cancelled_while_the_endpoint_computes_frees_both_sides(serve: Any, opened: Any, tools: Any) -> None:
    begun, has_noticed = threading.Event(), threading.Event()

    def answer(request: bytes, has_left: HasLeft) -> Any:
        if request != b"slow":
            return echo(request, has_left)
        begun.set()
        tools.wait_for(has_left)
        has_noticed.set()
        return None

    link = opened(serve(answer).record)
    calls: list[Call] = []
    join = in_thread(lambda: fetch(link, b"slow", on_call=calls.append))
    assert begun.wait(30)
    calls[0].cancel()
    calls[0].cancel()  # idempotent
    assert fault_of(join)[0] is Fault.CANCELLED
    assert has_noticed.wait(30)
    assert fetch(link) == {"request": b"request"}


def test_fetch_cancelled_in_the_middle_of_its_payload_leaves_the_next_one_alone(serve: Any, opened: Any) -> None:
    endpoint = serve(
        lambda request, _has_left: EncodedBatch({"large": np.full(LARGE, request[0], np.uint8)}, request=request)
    )
    link = opened(endpoint.record)
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


def test_cancel_after_the_end_leaves_the_next_fetch_on_the_connection_alone(serve: Any, opened: Any) -> None:
    endpoint = serve()
    link = opened(endpoint.record)
    calls: list[Call] = []
    for number in range(20):
        assert fetch(link, b"%d" % number, on_call=calls.append) == {"request": b"%d" % number}
        for call in calls:
            call.cancel()
    assert endpoint.num_admitted == 1


def test_cancel_at_any_time_ends_that_fetch_or_none(serve: Any, opened: Any) -> None:
    link = opened(serve().record)
    fetch(link)
    rng = random.Random(7)
    faults: list[Fault] = []
    for number in range(300):
        calls: list[Call] = []
        begun, spins = threading.Event(), rng.randrange(20_000)

        def cancel(begun: threading.Event = begun, calls: list[Call] = calls, spins: int = spins) -> None:
            begun.wait(30)
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
def test_late_answer_is_not_taken_for_that_of_the_next_request(serve: Any, opened: Any) -> None:
    proceed = threading.Event()

    def answer(request: bytes, has_left: HasLeft) -> Any:
        if request == b"late":
            assert proceed.wait(30)
        return echo(request, has_left)

    link = opened(serve(answer).record)
    fetch(link)
    fault, details = fault_of(lambda: fetch(link, b"late", timeout_s=0.0))
    assert (fault, details) == (Fault.LATE, "none within 0 s")
    proceed.set()
    for _ in range(3):
        assert fetch(link, b"next") == {"request": b"next"}


@pytest.mark.parametrize(
    ("answer", "raised", "is_kept"),
    [
        (encode_failure(FAILURE, request=b"fail"), DatasetError, True),
        (encode_refusal(Refusal.UNPREPARED, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Refusal.BUSY, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Refusal.MALFORMED, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Refusal.BROKEN, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Refusal.BUSY, "x", request=b"another"), ProtocolError, False),
        (b"nonsense", ProtocolError, False),
    ],
)
def test_connection_is_used_again_only_while_both_sides_are_in_step(
    serve: Any, opened: Any, answer: bytes, raised: type[Exception], is_kept: bool
) -> None:
    endpoint = serve(lambda request, has_left: answer if request == b"fail" else echo(request, has_left))
    link = opened(endpoint.record)
    for number in range(1, 4):
        with pytest.raises(raised):
            fetch(link, b"fail")
        assert fetch(link) == {"request": b"request"}
        assert endpoint.num_admitted == (1 if is_kept else number + 1)


def test_connection_that_is_turned_away_for_good_is_replaced(
    serve: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.dataplane.delivery._MAX_CONNECTIONS", 0)
    endpoint = serve()
    link = opened(endpoint.record)
    for _ in range(3):
        assert fault_of(lambda: fetch(link)) == (Fault.BUSY, "0 connections are open already")
    monkeypatch.setattr("hetero.dataplane.delivery._MAX_CONNECTIONS", 1024)
    assert fetch(link) == {"request": b"request"}


def test_close_while_fetching_fails_the_fetches_and_ends_every_thread(serve: Any, opened: Any, tools: Any) -> None:
    endpoint = serve(lambda _request, has_left: tools.wait_for(has_left))
    link = opened(endpoint.record)
    joins = [in_thread(lambda: fetch(link)) for _ in range(3)]
    tools.wait_for(lambda: endpoint.delivery._num_busy == 3)
    link.close()
    for join in joins:
        assert fault_of(join) == (Fault.UNREACHABLE, "the connection was closed")
    link.close()  # idempotent
    assert fault_of(lambda: fetch(link)) == (Fault.UNSENT, "the connection was closed")
    assert fault_of(link.attend) == (Fault.UNREACHABLE, "the connection was closed")
    tools.wait_for(lambda: not endpoint.delivery._tickets)
    tools.wait_for(lambda: endpoint.delivery._num_connections == 0)
    assert not link._streams


def test_close_of_an_idle_link_ends_its_connections(serve: Any, opened: Any, tools: Any) -> None:
    endpoint = serve()
    link = opened(endpoint.record)
    fetch(link)
    assert len(link._streams) == len(link._idle) == 1
    link.close()
    assert not link._streams
    assert not link._idle
    tools.wait_for(lambda: endpoint.delivery._num_connections == 0)


def test_links_that_come_and_go_leave_nothing(serve: Any, tools: Any) -> None:
    endpoint = serve()
    for _ in range(20):
        with contextlib.closing(Link(endpoint.record, (), Limits())) as link:
            fetch(link)
    tools.wait_for(lambda: not endpoint.delivery._tickets)
    assert endpoint.num_admitted == 20


@pytest.mark.parametrize("state", ["idle", "computing"])
def test_endpoint_that_stops_ends_the_link(serve: Any, opened: Any, tools: Any, state: str) -> None:
    endpoint = serve(
        lambda request, has_left: None if request == b"slow" and tools.wait_for(has_left) else echo(request, has_left)
    )
    link = opened(endpoint.record)
    fetch(link)
    if state == "computing":
        join = in_thread(lambda: fetch(link, b"slow"))
        tools.wait_for(lambda: endpoint.delivery._num_busy == 1)
    endpoint.stop()
    if state == "computing":
        assert fault_of(join)[0] is Fault.UNREACHABLE
    tools.wait_for(lambda: link._end)
    fault, details = fault_of(lambda: fetch(link))
    assert fault is Fault.UNSENT
    assert "the endpoint ended" in details


def test_endpoint_on_ipv6_is_reached(serve: Any, opened: Any) -> None:
    try:
        endpoint = serve(address="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert fetch(opened(endpoint.record)) == {"request": b"request"}


def test_attendance_that_is_never_confirmed_is_given_up(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_ATTEND_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        link = opened(EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address=address, incarnation="a"))
        assert fault_of(link.attend) == (Fault.LATE, "no answer to Attend within 0.3 s")


def port_of_nobody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Where connections stay pending: nobody accepts, and there is no room to wait."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        is_full = False
        while not is_full:
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
            is_full = not select.select([], [waiting], [], 0.2)[1]
        yield listener.getsockname()[1]


def ends_of(endpoint: Endpoint) -> list[Stream]:
    """Return the endpoint's ends of the connections."""
    return [stream for streams in endpoint.delivery._tickets.values() for stream in streams]


def test_endpoint_without_a_way_for_batches_cannot_be_attended(serve: Any, opened: Any, tools: Any) -> None:
    endpoint = serve()
    endpoint.delivery.port = port_of_nobody()
    link = opened(endpoint.record)
    for _ in range(2):
        fault, details = fault_of(link.attend)
        assert fault is Fault.UNREACHABLE
        assert "no connection for batches: " in details
        assert "refused" in details
    assert fault_of(lambda: fetch(link))[0] is Fault.UNSENT
    tools.wait_for(lambda: not endpoint.delivery._tickets)


def test_request_that_was_never_sent_is_no_loss(serve: Any, opened: Any, tools: Any) -> None:
    has_answered = threading.Event()

    def answer(request: bytes, has_left: HasLeft) -> Any:
        assert has_answered.wait(30)
        return echo(request, has_left)

    endpoint = serve(answer)
    link = opened(endpoint.record)
    assert fault_of(lambda: link.fetch(b"", BatchDecoder(), timeout_s=60.0, on_call=lambda call: None)) == (
        Fault.UNSENT,
        "there is no connection yet",
    )
    join = in_thread(lambda: fetch(link))
    tools.wait_for(lambda: endpoint.delivery._num_busy == 1)
    link._port = port_of_nobody()
    fault, details = fault_of(lambda: fetch(link))
    assert fault is Fault.UNSENT
    assert "refused" in details
    has_answered.set()
    assert join() == {"request": b"request"}


@pytest.mark.parametrize("end", ["cancel", "close", "deadline"])
def test_fetch_that_waits_for_a_connection_can_be_ended(
    serve: Any, opened: Any, silent_port: int, tools: Any, end: str
) -> None:
    link = opened(serve().record)
    link.attend()
    link._port = silent_port
    with link._lock:
        (_, idle) = link._idle.pop()
        link._streams.discard(idle)
    idle.close()
    calls: list[Any] = []
    join = in_thread(lambda: fetch(link, timeout_s=0.1 if end == "deadline" else 60.0, on_call=calls.append))
    if end != "deadline":
        tools.wait_for(lambda: calls and calls[0]._stream is not None)
        calls[0].cancel() if end == "cancel" else link.close()
    expected = {"cancel": Fault.CANCELLED, "close": Fault.UNSENT, "deadline": Fault.LATE}
    assert fault_of(join)[0] is expected[end]
    assert not link._streams


@pytest.mark.parametrize("what", ["end", "data"])
def test_idle_connection_on_which_something_came_is_not_used(serve: Any, opened: Any, tools: Any, what: str) -> None:
    endpoint = serve()
    link = opened(endpoint.record)
    fetch(link, b"first")
    (theirs,) = ends_of(endpoint)
    theirs.shut_down() if what == "end" else theirs.send_raw(b"more than was asked for")
    ((_, ours),) = link._idle
    tools.wait_for(lambda: not ours.is_quiet())
    for number in range(3):
        assert fetch(link, b"%d" % number) == {"request": b"%d" % number}
    assert endpoint.num_admitted == 2
    assert len(link._streams) == 1


@pytest.mark.parametrize("is_for_good", [False, True])
@pytest.mark.fault("F21")
def test_request_on_a_reused_connection_that_ends_is_sent_once_more(serve: Any, opened: Any, is_for_good: bool) -> None:
    requests: list[bytes] = []

    def answer(request: bytes, has_left: HasLeft) -> Any:
        requests.append(request)
        return None if is_for_good or len(requests) == 1 else echo(request, has_left)

    link = opened(serve(answer).record)
    if is_for_good:
        assert fault_of(lambda: fetch(link)) == (Fault.UNREACHABLE, "the endpoint closed the connection")
    else:
        assert fetch(link) == {"request": b"request"}
    assert requests == [b"request"] * 2
    assert len(link._streams) == (not is_for_good)


def test_request_that_ended_the_endpoint_counts_as_sent(serve: Any, opened: Any) -> None:
    link: Link

    def answer(_request: bytes, _has_left: HasLeft) -> None:
        link._port = port_of_nobody()  # as if the process had died of it

    link = opened(serve(answer).record)
    fault, details = fault_of(lambda: fetch(link))
    assert fault is Fault.UNREACHABLE
    assert "refused" in details


def test_draining_endpoint_finishes_answers_and_turns_new_requests_away(serve: Any, opened: Any, tools: Any) -> None:
    proceed = threading.Event()

    def answer(request: bytes, has_left: HasLeft) -> Any:
        assert request != b"slow" or proceed.wait(30)
        return echo(request, has_left)

    endpoint = serve(answer)
    link = opened(endpoint.record)
    slow = [in_thread(lambda: fetch(link, b"slow")) for _ in range(2)]
    tools.wait_for(lambda: endpoint.delivery._num_busy == 2)
    fetch(link)  # leaves an idle connection
    stopped = in_thread(lambda: endpoint.delivery.stop(60.0))
    tools.wait_for(lambda: endpoint.delivery._is_draining)
    for _ in range(3):  # on the idle one, and on new ones
        assert fault_of(lambda: fetch(link)) == (Fault.BUSY, "the endpoint is about to end")
    proceed.set()
    assert [join() for join in slow] == [{"request": b"slow"}] * 2
    stopped()


def test_connections_that_were_idle_for_long_are_closed(
    serve: Any, opened: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)

    def answer(request: bytes, has_left: HasLeft) -> Any:
        if request == b"together":
            together.wait(30)
        return echo(request, has_left)

    endpoint = serve(answer)
    link = opened(endpoint.record)
    for join in [in_thread(lambda: fetch(link, b"together")) for _ in range(4)]:
        join()
    assert len(link._idle) == len(link._streams) == 4
    monkeypatch.setattr(link_module, "_KEEP_IDLE_S", 0.0)
    fetch(link)
    assert len(link._idle) == len(link._streams) == 1
    tools.wait_for(lambda: endpoint.delivery._num_connections == 1)
