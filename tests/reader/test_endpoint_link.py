"""One reader's connections to one endpoint: reuse, closing, and endpoints that go away."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest

from hetero.control.members.directory import EndpointRecord
from hetero.endpoint import link as link_module
from hetero.endpoint.link import EndpointLink
from hetero.endpoint.replies import Reply
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder, encode_failure, encode_refusal
from hetero.wire.limits import Limits
from hetero.wire.transports.interface import Connection
from tests.support.batch_path.calls import fault_of, in_thread
from tests.support.batch_path.services import Endpoint, echo, fetch

FAILURE = SampleFailure(dataset="d", host="h", stage="sample", sample_index="1", exception="KeyError", traceback="")


def test_fetches_one_after_the_other_use_one_connection(start_endpoint: Any, link_to: Any) -> None:
    endpoint = start_endpoint()
    link = link_to(endpoint.record)
    for number in range(50):
        assert fetch(link, b"%d" % number) == {"request": b"%d" % number}
    assert endpoint.num_admitted == 1


def test_fetches_at_the_same_time_use_a_connection_each_again_and_again(start_endpoint: Any, link_to: Any) -> None:
    together = threading.Barrier(4)

    def answer(request: bytes, reply: Reply) -> Any:
        together.wait(100)
        return echo(request, reply)

    endpoint = start_endpoint(answer)
    link = link_to(endpoint.record)
    for _ in range(5):
        joins = [in_thread(lambda number=number: fetch(link, b"%d" % number)) for number in range(4)]
        assert [join() for join in joins] == [{"request": b"%d" % number} for number in range(4)]
    assert endpoint.num_admitted == 4


@pytest.mark.parametrize(
    ("answer", "raised", "is_kept"),
    [
        (encode_failure(FAILURE, request=b"fail"), DatasetError, True),
        (encode_refusal(Fault.UNPREPARED, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Fault.BUSY, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Fault.MALFORMED, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Fault.BROKEN, "x", request=b"fail"), CallFailedError, True),
        (encode_refusal(Fault.BUSY, "x", request=b"another"), ProtocolError, False),
        (b"nonsense", ProtocolError, False),
    ],
)
def test_connection_is_used_again_only_while_both_sides_are_in_step(
    start_endpoint: Any, link_to: Any, answer: bytes, raised: type[Exception], is_kept: bool
) -> None:
    endpoint = start_endpoint(lambda request, reply: answer if request == b"fail" else echo(request, reply))
    link = link_to(endpoint.record)
    for number in range(1, 4):
        with pytest.raises(raised):
            fetch(link, b"fail")
        assert fetch(link) == {"request": b"request"}
        assert endpoint.num_admitted == (1 if is_kept else number + 1)


def test_connection_that_is_turned_away_for_good_is_replaced(
    start_endpoint: Any, link_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.endpoint.delivery._MAX_CONNECTIONS", 0)
    endpoint = start_endpoint()
    link = link_to(endpoint.record)
    for _ in range(3):
        assert fault_of(lambda: fetch(link)) == (Fault.BUSY, "0 connections are open already")
    monkeypatch.setattr("hetero.endpoint.delivery._MAX_CONNECTIONS", 1024)
    assert fetch(link) == {"request": b"request"}


def test_close_of_an_idle_link_ends_its_connections(start_endpoint: Any, link_to: Any, tools: Any) -> None:
    endpoint = start_endpoint()
    link = link_to(endpoint.record)
    fetch(link)
    assert len(link._connections) == len(link._idle) == 1
    link.close()
    assert not link._connections
    assert not link._idle
    tools.wait_for(lambda: endpoint.delivery._num_connections == 0)


def test_links_that_come_and_go_leave_nothing(start_endpoint: Any, tools: Any) -> None:
    endpoint = start_endpoint()
    for _ in range(20):
        with contextlib.closing(EndpointLink(endpoint.record, (), Limits())) as link:
            fetch(link)
    tools.wait_for(lambda: not endpoint.delivery._session_tokens)
    assert endpoint.num_admitted == 20


@pytest.mark.parametrize("state", ["idle", "computing"])
def test_endpoint_that_stops_ends_the_link(start_endpoint: Any, link_to: Any, tools: Any, state: str) -> None:
    is_computing = threading.Event()

    def answer(request: bytes, reply: Any) -> Any:
        if request == b"slow":
            is_computing.set()
            tools.wait_for(reply.has_left)
        return echo(request, reply)

    endpoint = start_endpoint(answer)
    link = link_to(endpoint.record)
    fetch(link)
    if state == "computing":
        join = in_thread(lambda: fetch(link, b"slow"))
        assert is_computing.wait(100.0)
    endpoint.stop()
    if state == "computing":
        assert fault_of(join)[0] is Fault.UNREACHABLE
    tools.wait_for(lambda: link.why_ended)
    fault, details = fault_of(lambda: fetch(link))
    assert fault is Fault.UNSENT
    assert "the endpoint ended" in details


def test_endpoint_on_ipv6_is_reached(start_endpoint: Any, link_to: Any) -> None:
    try:
        endpoint = start_endpoint(address="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    assert fetch(link_to(endpoint.record)) == {"request": b"request"}


def test_attendance_that_is_never_confirmed_is_given_up(link_to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_ATTEND_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        link = link_to(EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address=address, incarnation="a"))
        assert fault_of(link.attend) == (Fault.LATE, "no answer to Attend within 0.3 s")


def port_of_nobody() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ends_of(endpoint: Endpoint) -> list[Connection]:
    """Return the endpoint's ends of the connections."""
    return [stream for streams in endpoint.delivery._session_tokens.values() for stream in streams]


def test_endpoint_without_a_way_for_batches_cannot_be_attended(start_endpoint: Any, link_to: Any, tools: Any) -> None:
    endpoint = start_endpoint()
    endpoint.delivery.port = port_of_nobody()
    link = link_to(endpoint.record)
    for _ in range(2):
        fault, details = fault_of(link.attend)
        assert fault is Fault.UNREACHABLE
        assert "no connection for batches: " in details
        assert "refused" in details
    assert fault_of(lambda: fetch(link))[0] is Fault.UNSENT
    tools.wait_for(lambda: not endpoint.delivery._session_tokens)


def test_request_that_was_never_sent_is_no_loss(start_endpoint: Any, link_to: Any, tools: Any) -> None:
    has_answered = threading.Event()

    def answer(request: bytes, reply: Reply) -> Any:
        assert has_answered.wait(100)
        return echo(request, reply)

    endpoint = start_endpoint(answer)
    link = link_to(endpoint.record)
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


@pytest.mark.parametrize("what", ["end", "data"])
def test_idle_connection_on_which_something_came_is_not_used(
    start_endpoint: Any, link_to: Any, tools: Any, what: str
) -> None:
    endpoint = start_endpoint()
    link = link_to(endpoint.record)
    fetch(link, b"first")
    (theirs,) = ends_of(endpoint)
    theirs.shut_down() if what == "end" else theirs.send_raw(b"more than was asked for")
    ((_, ours),) = link._idle
    tools.wait_for(lambda: not ours.is_quiet())
    for number in range(3):
        assert fetch(link, b"%d" % number) == {"request": b"%d" % number}
    assert endpoint.num_admitted == 2
    assert len(link._connections) == 1


@pytest.mark.parametrize("is_for_good", [False, True])
@pytest.mark.fault("F21")
def test_request_on_a_reused_connection_that_ends_is_sent_once_more(
    start_endpoint: Any, link_to: Any, is_for_good: bool
) -> None:
    requests: list[bytes] = []

    def answer(request: bytes, reply: Reply) -> Any:
        requests.append(request)
        return None if is_for_good or len(requests) == 1 else echo(request, reply)

    link = link_to(start_endpoint(answer).record)
    if is_for_good:
        assert fault_of(lambda: fetch(link)) == (Fault.UNREACHABLE, "the endpoint closed the connection")
    else:
        assert fetch(link) == {"request": b"request"}
    assert requests == [b"request"] * 2
    assert len(link._connections) == (not is_for_good)


def test_request_that_ended_the_endpoint_counts_as_sent(start_endpoint: Any, link_to: Any) -> None:
    link: EndpointLink

    def answer(_request: bytes, _reply: Reply) -> None:
        link._port = port_of_nobody()  # as if the process had died of it

    link = link_to(start_endpoint(answer).record)
    fault, details = fault_of(lambda: fetch(link))
    assert fault is Fault.UNREACHABLE
    assert "refused" in details


def test_draining_endpoint_finishes_answers_and_turns_new_requests_away(
    start_endpoint: Any, link_to: Any, tools: Any
) -> None:
    proceed = threading.Event()

    def answer(request: bytes, reply: Reply) -> Any:
        assert request != b"slow" or proceed.wait(100)
        return echo(request, reply)

    endpoint = start_endpoint(answer)
    link = link_to(endpoint.record)
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
    start_endpoint: Any, link_to: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(4)

    def answer(request: bytes, reply: Reply) -> Any:
        if request == b"together":
            together.wait(100)
        return echo(request, reply)

    endpoint = start_endpoint(answer)
    link = link_to(endpoint.record)
    for join in [in_thread(lambda: fetch(link, b"together")) for _ in range(4)]:
        join()
    assert len(link._idle) == len(link._connections) == 4
    monkeypatch.setattr(link_module, "_KEEP_IDLE_S", 0.0)
    fetch(link)
    assert len(link._idle) == len(link._connections) == 1
    tools.wait_for(lambda: endpoint.delivery._num_connections == 1)
