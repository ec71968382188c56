"""Connections over which batches go: unauthenticated peers, floods, readers that do not read, the end of it all."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hetero.endpoint import delivery as delivery_module
from hetero.endpoint.delivery import Delivery
from hetero.endpoint.replies import Reply
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import EncodedBatch
from hetero.wire.limits import GREETING, SESSION_TOKEN_BYTES
from hetero.wire.transports import greeter
from tests.support.batch_path.deliveries import (
    NETWORK,
    REQUEST,
    admitted,
    ask,
    connected,
    echo,
    echoed,
    num_descriptors,
    num_threads,
    peer_of,
    receive,
)
from tests.support.wire.ends import connect

LARGE = EncodedBatch({"large": np.zeros(2**20, np.uint8)}, request=REQUEST)  # more than the buffers in a process hold
Serve = Callable[..., Delivery]


def is_served(served: Delivery, streams: contextlib.ExitStack) -> bool:
    return echoed(admitted(served, streams)) == REQUEST


def test_connection_with_a_session_token_is_answered_as_often_as_it_asks(
    serve: Serve, streams: contextlib.ExitStack, tools: Any
) -> None:
    served = serve()
    stream = admitted(served, streams)
    for number in range(5):
        assert echoed(stream, b"%d" % number) == b"%d" % number
    tools.wait_for(lambda: served.num_batches == 5)
    assert num_threads() == 2


@pytest.mark.attack("A1")
@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\nHost: endpoint\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"heterO",
        GREETING + bytes(SESSION_TOKEN_BYTES),
        GREETING + bytes(SESSION_TOKEN_BYTES) + struct.pack("<I", 7) + b"request",
    ],
)
def test_unauthenticated_peer_without_a_session_token_is_closed_unanswered_and_counted(
    serve: Serve, streams: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    served = serve(lambda _request, _reply: pytest.fail("an unauthenticated peer was answered"))
    served.admit()
    for number in range(1, 4):
        peer = peer_of(served, streams, said)
        with contextlib.suppress(ConnectionResetError):  # it had said more than was read
            assert peer.recv(1) == b""
        assert served.greeter.num_rejected == number
    assert num_threads() == 1
    assert [record.message for record in caplog.records] == [
        "rejected a connection without a session token of this job (1 so far)"
    ]


@pytest.mark.fault("F5")
def test_peer_with_a_session_token_of_an_earlier_link_is_closed_and_not_counted(
    serve: Serve, streams: contextlib.ExitStack
) -> None:
    """While a host is frozen, the kernel accepts connections of links that end before it goes on."""
    served = serve(lambda _request, _reply: pytest.fail("a peer without a link was answered"))
    session_token = served.admit()
    served.dismiss(session_token)
    assert peer_of(served, streams, GREETING + session_token).recv(1) == b""
    assert served.greeter.num_rejected == 0


def test_unauthenticated_peer_that_leaves_in_the_middle_of_its_hello_is_forgotten(
    serve: Serve, streams: contextlib.ExitStack, tools: Any
) -> None:
    served = serve()
    left = [peer_of(served, streams, GREETING[:3]) for _ in range(20)]
    tools.wait_for(lambda: len(served.greeter._peers) == 20)
    for peer in left:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
        peer.close()
    tools.wait_for(lambda: not served.greeter._peers)
    assert is_served(served, streams)


@pytest.mark.attack("A9")
def test_unauthenticated_peer_that_trickles_is_closed_when_its_time_is_over(
    serve: Serve, streams: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeter, "CONNECT_TIMEOUT_S", 0.2)
    served = serve()
    trickling = peer_of(served, streams, GREETING)
    trickling.settimeout(0.01)
    for _ in range(10_000):  # until the endpoint has had enough
        with contextlib.suppress(TimeoutError):
            if trickling.recv(1) == b"":
                break
    else:
        pytest.fail("the connection is open still")
    assert num_threads() == 1
    assert is_served(served, streams)


def test_hello_in_many_pieces_is_accepted(serve: Serve, streams: contextlib.ExitStack, tools: Any) -> None:
    served = serve(transport=NETWORK)
    stream = connected(served, streams)
    hello = GREETING + served.admit()
    for end in range(1, len(hello)):
        stream.send_raw(hello[end - 1 : end])
        tools.wait_for(lambda end=end: [len(known.received) for known in served.greeter._peers.values()] == [end])
    stream.send_raw(hello[-1:])
    assert echoed(stream) == b"request"


@pytest.mark.attack("A9")
def test_flood_of_unauthenticated_peers_costs_few_descriptors_and_readers_are_served(
    serve: Serve, streams: contextlib.ExitStack, tools: Any
) -> None:
    served = serve()
    before = num_descriptors()
    flood = [peer_of(served, streams, GREETING[: number % 6]) for number in range(300)]
    assert is_served(served, streams)
    # Ours are open all, and of the endpoint's own those of the youngest unauthenticated peers and the reader's.
    tools.wait_for(lambda: num_descriptors() <= before + len(flood) + 130)
    assert len(served.greeter._peers) <= 128
    assert num_threads() == 2


def test_unauthenticated_peer_that_speaks_while_it_is_turned_out_ends_nobody_else(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    peers = [peer_of(served, streams) for _ in range(8)]
    reader = connected(served, streams)
    tools.wait_for(lambda: len(served.greeter._peers) == 9)
    hello = GREETING + served.admit()
    with served._changed:  # the accepting thread reads the reader's greeting, and then waits
        reader.send_raw(hello)
        tools.wait_for(lambda: len(served.greeter._peers) == 8)
        monkeypatch.setattr(greeter, "_MAX_PEERS", 8)
        peer_of(served, streams)
        peers[0].send(GREETING[:1])  # it has something to say, and is the one whose place is needed
    assert echoed(reader) == b"request"
    assert is_served(served, streams)


def test_readers_beyond_the_bound_are_told_to_come_back(serve: Serve, streams: contextlib.ExitStack) -> None:
    proceed = threading.Event()
    begun = threading.Semaphore(0)

    def slow(request: bytes, reply: Reply) -> EncodedBatch:
        begun.release()
        assert proceed.wait(100)
        return echo(request, reply)

    served = serve(slow, max_requests=2, transport=NETWORK)
    working = [admitted(served, streams) for _ in range(2)]
    for stream in working:
        stream.send(b"request")
        assert begun.acquire(timeout=100)
    turned_away = admitted(served, streams)
    with pytest.raises(CallFailedError) as caught:
        ask(turned_away)
    assert caught.value.fault is Fault.BUSY
    proceed.set()
    for stream in working:
        assert bytes(receive(stream)["request"]) == b"request"
    assert is_served(served, streams)


def test_connection_beyond_the_bound_is_told_to_come_back_and_closed(
    serve: Serve, streams: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, tools: Any
) -> None:
    monkeypatch.setattr(delivery_module, "_MAX_CONNECTIONS", 2)
    served = serve(transport=NETWORK)
    first, second = admitted(served, streams), admitted(served, streams)
    ask(first)
    ask(second)
    third = admitted(served, streams)
    with pytest.raises(CallFailedError) as caught:
        ask(third)
    assert caught.value.fault is Fault.BUSY
    assert third.receive_message(100) is None
    first.close()
    tools.wait_for(lambda: num_threads() == 2)
    assert is_served(served, streams)


def test_connection_beyond_the_bound_that_asks_for_much_is_closed_without_being_read(
    serve: Serve, streams: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "_MAX_CONNECTIONS", 1)
    served = serve(transport=NETWORK)
    first = admitted(served, streams)
    ask(first)
    second = admitted(served, streams)
    answer = None
    with contextlib.suppress(OSError):  # it is closed while this sends, or before the answer
        second.send(bytes(2**20 + 1))
        answer = second.receive_message(1000)
    assert answer is None
    assert echoed(first) == b"request"


def test_connection_beyond_the_bound_that_asks_nothing_is_closed(
    serve: Serve, streams: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery_module, "_MAX_CONNECTIONS", 1)
    monkeypatch.setattr(delivery_module, "CALL_TIMEOUT_S", 0.1)
    served = serve(transport=NETWORK)
    first = admitted(served, streams)
    ask(first)
    assert admitted(served, streams).receive_message(100) is None
    assert echoed(first) == b"request"


@pytest.mark.attack("A9")
def test_connections_that_are_idle_keep_nobody_out(serve: Serve, streams: contextlib.ExitStack, tools: Any) -> None:
    served = serve(max_requests=2, transport=NETWORK)
    session_token = served.admit()
    idle = [admitted(served, streams, session_token) for _ in range(20)]
    for stream in idle * 2:
        assert echoed(stream) == b"request"
        tools.wait_for(lambda: served._num_busy == 0)  # an answer is there before its request stops to count
    assert is_served(served, streams)


def test_reader_that_does_not_read_frees_its_thread_when_its_attendance_ends(
    serve: Serve, streams: contextlib.ExitStack, tools: Any
) -> None:
    served = serve(lambda _request, _reply: LARGE, transport=NETWORK)
    session_token = served.admit()
    for _ in range(3):
        admitted(served, streams, session_token).send(b"request")
    tools.wait_for(lambda: served._num_busy == 3)
    served.dismiss(session_token)
    tools.wait_for(lambda: num_threads() == 1)
    assert served._num_busy == served.num_batches == 0
    served.dismiss(session_token)  # idempotent
    assert not served._session_tokens


@pytest.mark.attack("A11")
def test_session_token_of_a_reader_that_left_admits_nobody(serve: Serve, streams: contextlib.ExitStack) -> None:
    served = serve(transport=NETWORK)
    session_token = served.admit()
    served.dismiss(session_token)
    stream = admitted(served, streams, session_token)
    with contextlib.suppress(OSError):
        stream.send(b"request")
        assert stream.receive_message(100) is None


@pytest.mark.parametrize("leave", ["close", "dismiss"])
def test_answer_nobody_waits_for_is_given_up(
    serve: Serve, streams: contextlib.ExitStack, tools: Any, leave: str
) -> None:
    begun = threading.Event()

    def endless(_request: bytes, reply: Reply) -> None:
        begun.set()
        tools.wait_for(reply.has_left)

    served = serve(endless, transport=NETWORK)
    session_token = served.admit()
    stream = admitted(served, streams, session_token)
    stream.send(b"request")
    assert begun.wait(100)
    if leave == "close":
        stream.close()
    else:
        served.dismiss(session_token)
    tools.wait_for(lambda: num_threads() == 1)


@pytest.mark.attack("A8")
def test_request_that_is_too_long_is_rejected(serve: Serve, streams: contextlib.ExitStack) -> None:
    served = serve(transport=NETWORK)
    stream = admitted(served, streams)
    stream.send_raw(struct.pack("<I", 2**32 - 1))
    with pytest.raises(CallFailedError, match="4294967295 bytes") as caught:
        receive(stream, request=b"")  # no thread has read that
    assert caught.value.fault is Fault.MALFORMED
    assert stream.receive_message(100) is None


def test_stop_finishes_the_answer_in_progress_and_turns_away_who_asks_meanwhile(
    serve: Serve, streams: contextlib.ExitStack, tools: Any
) -> None:
    proceed, begun = threading.Event(), threading.Event()

    def slow(_request: bytes, _reply: Reply) -> EncodedBatch:
        begun.set()
        assert proceed.wait(100)
        return LARGE

    served = serve(slow, transport=NETWORK)
    idle, working = admitted(served, streams), admitted(served, streams)
    working.send(b"request")
    assert begun.wait(100)
    stopping = threading.Thread(target=served.stop, args=(60.0,))
    stopping.start()
    tools.wait_for(lambda: served._is_draining)
    new = admitted(served, streams)
    for stream in (idle, new, idle, new):
        with pytest.raises(CallFailedError, match="about to end") as caught:
            ask(stream)
        assert caught.value.fault is Fault.BUSY
    assert stopping.is_alive()
    proceed.set()
    assert len(receive(working)["large"]) == 2**20
    stopping.join(100)
    assert served.is_stopped
    for stream in (idle, new, working):
        assert stream.receive_message(100) is None
    with pytest.raises(OSError, match="refused"):
        NETWORK.connect("127.0.0.1", served.port)


def test_stop_does_not_wait_for_a_reader_that_does_not_read(
    serve: Serve, streams: contextlib.ExitStack, tools: Any
) -> None:
    served = serve(lambda _request, _reply: LARGE, transport=NETWORK)
    admitted(served, streams).send(b"request")
    tools.wait_for(lambda: served._num_busy == 1)
    served.stop(0.2)
    tools.wait_for(lambda: num_threads() == 0)
    served.stop(60.0)  # idempotent
    assert served.num_batches == 0


def test_stop_lets_go_of_an_answer_that_never_comes(serve: Serve, streams: contextlib.ExitStack, tools: Any) -> None:
    served = serve(lambda _request, reply: tools.wait_for(reply.has_left), transport=NETWORK)
    admitted(served, streams).send(b"request")
    tools.wait_for(lambda: served._num_busy == 1)
    served.stop(0.0)
    tools.wait_for(lambda: num_threads() == 0)


def test_delivery_on_ipv6_is_reached(serve: Serve, streams: contextlib.ExitStack) -> None:
    try:
        served = serve(address="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    stream = streams.enter_context(contextlib.closing(connect("::1", served.port)))
    stream.send_raw(GREETING + served.admit())
    assert echoed(stream) == b"request"


@pytest.mark.fault("F29")
def test_descriptors_that_run_out_are_waited_for(
    serve: Serve, streams: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    accept, num_failures = socket.socket.accept, 0

    def failing(listener: socket.socket) -> Any:
        nonlocal num_failures
        if num_failures < 3:
            num_failures += 1
            raise OSError(24, os.strerror(24))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", failing)
    assert is_served(served, streams)
    assert num_failures == 3
    assert [record.message for record in caplog.records] == [
        "cannot accept connections: [Errno 24] Too many open files"
    ]


@pytest.mark.parametrize("error", [MemoryError(), OSError(12, "no memory")])
@pytest.mark.parametrize("place", ["register", "stream"])
def test_memory_that_runs_out_costs_one_connection(
    serve: Serve,
    streams: contextlib.ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: Exception,
) -> None:
    served = serve()

    def failing(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        if place == "register":
            patch.setattr(served.greeter._selector, "register", failing)
        else:
            patch.setattr("hetero.wire.transports.sockets.SocketConnection", failing)
        stream = admitted(served, streams)
        with contextlib.suppress(ConnectionResetError):
            assert stream.receive_message(100) is None
    assert is_served(served, streams)
    assert not served.greeter._peers


def test_threads_that_run_out_cost_one_connection(
    serve: Serve, streams: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(transport=NETWORK)

    def failing(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", failing)
        stream = admitted(served, streams)
        assert stream.receive_message(100) is None
    assert served._num_connections == 0
    assert is_served(served, streams)
