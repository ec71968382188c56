"""Fetches whose caller receives the answer when it arrives, from an endpoint in this process."""

from __future__ import annotations

import functools
import queue
import select
import struct
import threading
from typing import Any

import numpy as np
import pytest

from hetero.endpoint.link import EndpointLink, SentFetch
from hetero.endpoint.replies import LATER, Later, Reply
from hetero.errors import DatasetError, ProtocolError, SampleFailure
from hetero.wire.compression import ChecksumError
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder, EncodedBatch, encode_failure, encode_refusal
from tests.support.batch_path.calls import fault_of, in_thread
from tests.support.batch_path.deliveries import NETWORK
from tests.support.batch_path.services import Endpoint, echo, fetch

FAILURE = SampleFailure(dataset="d", host="h", stage="sample", sample_index="1", exception="KeyError", traceback="")


class Desk:
    """Collects replies, which the test answers."""

    def __init__(self) -> None:
        self.replies: queue.Queue[Reply] = queue.Queue()

    def __call__(self, request: bytes, reply: Reply) -> Later | EncodedBatch | bytes | None:
        if request.startswith(b"now"):
            return echo(request, reply)
        self.replies.put(reply)
        return LATER

    def take(self) -> Reply:
        return self.replies.get(timeout=100.0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def endpoint(start_endpoint: Any, desk: Desk) -> Endpoint:
    found: Endpoint = start_endpoint(desk)
    return found


@pytest.fixture
def link(endpoint: Endpoint, link_to: Any) -> EndpointLink:
    """A link with one idle connection."""
    found: EndpointLink = link_to(endpoint.record)
    found.attend()
    return found


def begin(
    link: EndpointLink, request: bytes = b"request", **options: Any
) -> tuple[SentFetch[int] | None, BatchDecoder]:
    decoder = BatchDecoder(request=request)
    options = {"timeout_s": 60.0, "on_call": lambda call: None, "finish": lambda nbytes: nbytes, **options}
    return link.begin(request, decoder, **options), decoder


def sent_to(link: EndpointLink, request: bytes = b"request", **options: Any) -> tuple[SentFetch[int], BatchDecoder]:
    found, decoder = begin(link, request, **options)
    assert found is not None
    return found, decoder


def wait_readable(fetch: SentFetch[int]) -> None:
    assert select.select([fetch], [], [], 30.0)[0]


def receive(fetch: SentFetch[int]) -> int:
    while (nbytes := fetch.receive()) is None:
        wait_readable(fetch)
    return nbytes


@pytest.mark.parametrize("nbytes", [0, 10, 2**16, 2**22 + 1])
def test_answer_is_received_when_it_has_arrived(
    link: EndpointLink, endpoint: Endpoint, desk: Desk, nbytes: int
) -> None:
    for _ in range(3):
        fetch, decoder = sent_to(link)
        reply = desk.take()
        assert fetch.receive() is None
        sent = EncodedBatch({"zeros": np.arange(nbytes, dtype=np.uint8)}, request=b"request")
        reply.send(sent)
        assert receive(fetch) == nbytes + len(sent.message)
        assert decoder.result()["zeros"].tobytes() == np.arange(nbytes, dtype=np.uint8).tobytes()
    assert endpoint.num_admitted == 1  # the connection was idle again


def test_fetch_begins_only_over_an_idle_connection(link: EndpointLink, endpoint: Endpoint, desk: Desk) -> None:
    fetch, _ = sent_to(link)
    assert begin(link)[0] is None
    desk.take().send(EncodedBatch({"x": 1}, request=b"request"))
    receive(fetch)
    again, _ = sent_to(link)
    assert desk.take()
    assert desk.replies.empty()
    again.give_up()
    assert endpoint.num_admitted == 1


@pytest.mark.parametrize(
    ("answer", "raised", "is_kept"),
    [
        (encode_failure(FAILURE, request=b"request"), DatasetError, True),
        (encode_refusal(Fault.UNPREPARED, "x", request=b"request"), CallFailedError, True),
        (encode_refusal(Fault.BUSY, "x", request=b"another"), ChecksumError, False),
        (b"nonsense", ProtocolError, False),
    ],
)
def test_connection_is_used_again_only_while_both_sides_are_in_step(
    link: EndpointLink, desk: Desk, answer: bytes, raised: type[Exception], is_kept: bool
) -> None:
    sent_fetch, _ = sent_to(link)
    desk.take().send(answer)
    wait_readable(sent_fetch)
    with pytest.raises(raised):
        receive(sent_fetch)
    assert len(link._idle) == len(link._connections) == int(is_kept)
    assert fetch(link, b"now") == {"request": b"now"}


def test_more_bytes_than_announced_are_rejected(link: EndpointLink, desk: Desk) -> None:
    sent_fetch, _ = sent_to(link)
    reply = desk.take()
    reply._connection.send_raw(
        struct.pack("<I", len(message := EncodedBatch({"x": 1}, request=b"request").message)) + message + b"more"
    )
    wait_readable(sent_fetch)
    with pytest.raises(ProtocolError, match="more bytes"):
        receive(sent_fetch)
    assert not link._connections


def test_answer_that_does_not_come_in_time_ends_the_fetch(link: EndpointLink, desk: Desk) -> None:
    sent_fetch, _ = sent_to(link, timeout_s=0.0)
    desk.take()
    assert fault_of(sent_fetch.receive) == (Fault.LATE, "waited 0 s")
    assert not link._connections  # the late answer would be taken for that to the next request


def test_answer_that_has_arrived_is_not_late(link: EndpointLink, desk: Desk) -> None:
    """A consumer may come back later than the timeout."""
    sent_fetch, decoder = sent_to(link, timeout_s=0.0)
    desk.take().send(EncodedBatch({"x": 1}, request=b"request"))
    wait_readable(sent_fetch)
    receive(sent_fetch)
    assert decoder.result() == {"x": 1}


def test_cancelled_fetch_fails_and_its_connection_is_closed(link: EndpointLink, desk: Desk) -> None:
    calls: list[Any] = []
    sent_fetch, _ = sent_to(link, on_call=calls.append)
    desk.take()
    calls[0].cancel()
    wait_readable(sent_fetch)
    assert fault_of(sent_fetch.receive)[0] is Fault.CANCELLED
    assert not link._connections


def test_fetch_that_is_given_up_closes_its_connection(link: EndpointLink, desk: Desk, endpoint: Endpoint) -> None:
    sent_fetch, _ = sent_to(link)
    desk.take()
    sent_fetch.give_up()
    sent_fetch.give_up()  # idempotent
    assert not link._connections
    assert fetch(link, b"now") == {"request": b"now"}
    assert endpoint.num_admitted == 2


def test_connection_that_ends_leaves_the_batch_to_another_fetch(link: EndpointLink, desk: Desk) -> None:
    sent_fetch, _ = sent_to(link)
    desk.take().send(None)
    wait_readable(sent_fetch)
    with pytest.raises(ConnectionResetError):
        receive(sent_fetch)
    assert not link._connections
    assert fetch(link, b"now") == {"request": b"now"}


@pytest.mark.parametrize("is_begun", [False, True])
def test_answer_that_is_cut_off_proves_that_the_batch_was_computed(
    link: EndpointLink, desk: Desk, is_begun: bool
) -> None:
    answer = EncodedBatch({"zeros": np.zeros(1000, np.uint8)}, request=b"request")
    if is_begun:
        fetch, _ = sent_to(link)
        join = functools.partial(receive, fetch)
    else:
        decoder = BatchDecoder(request=b"request")
        join = in_thread(lambda: link.fetch(b"request", decoder, timeout_s=60.0, on_call=lambda call: None))
    reply = desk.take()
    reply._connection.send_raw(struct.pack("<I", len(answer.message)) + answer.message + bytes(10))
    reply.send(None)
    assert fault_of(join)[0] is Fault.CUT_OFF


def test_answer_of_an_endpoint_that_has_ended_is_received(
    link: EndpointLink, desk: Desk, endpoint: Endpoint, tools: Any
) -> None:
    sent_fetch, decoder = sent_to(link)
    desk.take().send(EncodedBatch({"x": 1}, request=b"request"))
    wait_readable(sent_fetch)
    endpoint.stop()
    tools.wait_for(lambda: link.why_ended)
    receive(sent_fetch)
    assert decoder.result() == {"x": 1}
    assert not link._connections


def test_answer_in_parts_does_not_block_its_receiver(link: EndpointLink, desk: Desk) -> None:
    """A host may be lost in the middle of an answer."""
    answer = EncodedBatch({"zeros": np.zeros(1000, np.uint8)}, request=b"request")
    said = struct.pack("<I", len(answer.message)) + answer.message + b"".join(answer.payload)
    sent_fetch, decoder = sent_to(link)
    reply = desk.take()
    for end in range(1, len(said), 97):
        reply._connection.send_raw(said[max(0, end - 97) : end])
        wait_readable(sent_fetch)
        assert sent_fetch.receive() is None
    reply._connection.send_raw(said[end:])
    receive(sent_fetch)
    assert len(decoder.result()["zeros"]) == 1000


def test_long_request_is_left_to_another_fetch_and_the_connection_stays(link: EndpointLink) -> None:
    assert begin(link, bytes(2**14 + 1))[0] is None
    assert len(link._idle) == 1


def test_request_that_the_kernel_does_not_take_at_once_is_left_to_another_fetch(
    start_endpoint: Any, link_to: Any, desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.endpoint.link._MAX_BEGUN_BYTES", 2**30)
    endpoint = start_endpoint(desk, transport=NETWORK)
    link = link_to(endpoint.record, transport=NETWORK)
    link.attend()
    busy = threading.Event()
    serve = endpoint.delivery._converse

    def slow(connection: Any) -> None:
        assert busy.wait(100.0)  # no thread reads meanwhile
        serve(connection)

    endpoint.delivery._converse = slow
    link.close()
    link = link_to(endpoint.record, transport=NETWORK)
    link.attend()
    assert begin(link, bytes(2**26))[0] is None
    assert not link._connections
    busy.set()
    assert fetch(link, b"now") == {"request": b"now"}
