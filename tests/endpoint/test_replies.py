"""Answers that another thread than the connection's sends, at any time, to readers that read, wait or leave."""

from __future__ import annotations

import contextlib
import queue
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetero.endpoint.delivery import Delivery
from hetero.endpoint.replies import LATER, Later, Reply
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import EncodedBatch
from tests.support.batch_path.deliveries import NETWORK, REQUEST, admitted, echo, num_threads, receive

LARGE = EncodedBatch({"large": np.arange(3 * 2**20, dtype=np.uint8)}, request=REQUEST)
FULL = EncodedBatch({"full": np.zeros(2**16, np.uint8)}, request=REQUEST)
Serve = Callable[..., Delivery]


class Desk:
    """Collects replies, which the test answers."""

    def __init__(self) -> None:
        self.asked: queue.Queue[tuple[bytes, Reply]] = queue.Queue()
        self.num_cancelled = 0

    def __call__(self, request: bytes, reply: Reply) -> Later:
        reply.if_given_up(self._cancel)
        self.asked.put((request, reply))
        return LATER

    def _cancel(self) -> None:
        self.num_cancelled += 1

    def take(self) -> Reply:
        return self.asked.get(timeout=100.0)[1]


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize("count", [1, 20])
def test_later_answer_arrives_and_the_connection_goes_on(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk, count: int
) -> None:
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    for number in range(count):
        stream.send(b"%d" % number)
        request, reply = desk.asked.get(timeout=100.0)
        reply.send(echo(request, reply))
        assert bytes(receive(stream, b"%d" % number)["request"]) == b"%d" % number
    assert served.num_batches == count
    assert served.num_busy == 0
    assert num_threads() == 2
    assert desk.num_cancelled == 0


def test_later_answer_that_the_kernel_does_not_take_at_once_is_sent_by_a_thread(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk
) -> None:
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    for answer in (LARGE, FULL, LARGE):
        stream.send(REQUEST)
        reply = desk.take()
        reply.send(answer)
        if answer is LARGE:
            assert served.num_busy == 1
        (leaf,) = receive(stream).values()
        assert leaf.tobytes() == bytes(answer.payload[0])
    tools.wait_for(lambda: served.num_batches == 3)


def test_later_answer_too_large_for_one_call_of_the_kernel_arrives_whole(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk
) -> None:
    """The sending thread begins to send it, and another one goes on."""
    answer = EncodedBatch({"large": np.arange(2**21, dtype=np.uint8)}, request=REQUEST)
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    stream.send(REQUEST)
    desk.take().send(answer)  # does not block
    assert served.num_busy == 1
    assert receive(stream)["large"].tobytes() == bytes(answer.payload[0])
    tools.wait_for(lambda: served.num_batches == 1)


@pytest.mark.parametrize("leave", ["close", "dismiss"])
def test_reader_that_leaves_cancels_what_it_asked_for(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk, leave: str
) -> None:
    served = serve(desk, transport=NETWORK)
    session_token = served.admit()
    stream = admitted(served, streams, session_token)
    stream.send(REQUEST)
    reply = desk.take()
    stream.close() if leave == "close" else served.dismiss(session_token)
    tools.wait_for(lambda: num_threads() == 1)
    assert desk.num_cancelled == 1
    assert served.num_busy == 0
    reply.send(LARGE)  # the task had been taken already
    assert served.num_batches == 0


@pytest.mark.parametrize("answer", [LARGE, FULL], ids=["large", "small"])
def test_reader_that_does_not_read_a_later_answer_frees_its_threads_when_it_leaves(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk, answer: EncodedBatch
) -> None:
    served = serve(desk, transport=NETWORK)
    session_token = served.admit()
    for _ in range(3):
        admitted(served, streams, session_token).send(REQUEST)
        desk.take().send(answer)
    assert served.num_busy == (3 if answer is LARGE else 0)
    served.dismiss(session_token)
    tools.wait_for(lambda: num_threads() == 1)
    tools.wait_for(lambda: not [each for each in threading.enumerate() if each.name == "sender"])
    assert served.num_busy == 0


def test_request_before_the_answer_to_the_earlier_one_waits_for_it(
    serve: Serve, streams: contextlib.ExitStack, desk: Desk
) -> None:
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    stream.send(b"first")
    stream.send(b"second")
    first, reply = desk.asked.get(timeout=100.0)
    with pytest.raises(queue.Empty):
        desk.asked.get(timeout=0.2)
    reply.send(echo(first, reply))
    second, reply = desk.asked.get(timeout=100.0)
    reply.send(echo(second, reply))
    assert [bytes(receive(stream, request)["request"]) for request in (b"first", b"second")] == [b"first", b"second"]


def test_refusal_of_a_malformed_request_waits_for_the_earlier_answer(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk
) -> None:
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    stream.send(REQUEST)
    reply = desk.take()
    stream.send_raw(struct.pack("<I", 2**32 - 1))
    reply.send(LARGE)  # in parts: a refusal in the middle would damage it
    assert receive(stream)["large"].tobytes() == bytes(LARGE.payload[0])
    with pytest.raises(CallFailedError) as caught:
        receive(stream, request=b"")
    assert caught.value.fault is Fault.MALFORMED
    assert stream.receive_message(100) is None


def test_reader_that_leaves_after_a_second_request_cancels_the_first(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk
) -> None:
    served = serve(desk, transport=NETWORK)
    session_token = served.admit()
    stream = admitted(served, streams, session_token)
    stream.send(b"first")
    desk.take()
    stream.send(b"second")
    served.dismiss(session_token)
    tools.wait_for(lambda: num_threads() == 1)
    assert desk.num_cancelled == 1
    assert desk.asked.empty()


def test_task_that_was_cancelled_ends_the_connection(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk
) -> None:
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    stream.send(REQUEST)
    desk.take().send(None)
    assert stream.receive_message(100) is None
    tools.wait_for(lambda: num_threads() == 1)
    assert served.num_busy == served.num_batches == 0


def test_stop_waits_for_a_later_answer(serve: Serve, streams: contextlib.ExitStack, tools: Any, desk: Desk) -> None:
    served = serve(desk, transport=NETWORK)
    stream = admitted(served, streams)
    stream.send(REQUEST)
    reply = desk.take()
    stopping = threading.Thread(target=served.stop, args=(60.0,))
    stopping.start()
    tools.wait_for(lambda: served._is_draining)
    assert stopping.is_alive()
    reply.send(FULL)
    assert len(receive(stream)["full"]) == 2**16
    stopping.join(100)
    assert not stopping.is_alive()
    assert served.num_batches == 1


def test_answer_is_not_kept_until_the_next_request(serve: Serve, streams: contextlib.ExitStack, tools: Any) -> None:
    """The connection's thread waits for a request with the reply, which must not keep the task and its batch."""
    replies: list[Reply] = []

    def answer(request: bytes, reply: Reply) -> Later:
        reply.send(echo(request, reply))  # the task was done before the connection's thread went on
        reply.if_given_up(lambda: None)
        replies.append(reply)
        return LATER

    served = serve(answer, transport=NETWORK)
    stream = admitted(served, streams)
    stream.send(REQUEST)
    receive(stream)
    tools.wait_for(lambda: replies)
    assert replies[0]._cancel_task is None
