"""What every transport does: messages and payload of all sizes, deadlines, ends in the wrong place, and TCP alone."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import PortError, ProtocolError
from hetero.wire.transports import sockets
from hetero.wire.transports.interface import Connection, DeadlineError
from hetero.wire.transports.tcp import TcpTransport
from tests.support.listening import full_listener
from tests.support.wire.ends import KINDS, connect, listen, opened
from tests.support.wire.in_process import InProcess

SIZES = st.sampled_from([0, 1, 5, 2**14 - 1, 2**14, 2**16 - 5, 2**16 - 4, 2**16, 2**16 + 1, 300_000])


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(kind: str) -> Iterator[tuple[Connection, Connection]]:
    with opened(kind) as streams:
        yield streams


def in_thread(work: object, *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


@settings(max_examples=settings.default.max_examples // 2)
@given(answers=st.lists(st.tuples(SIZES, st.lists(SIZES.filter(bool), max_size=4)), min_size=1, max_size=4))
def test_messages_and_payload_arrive_as_they_were_sent(kind: str, answers: list[tuple[int, list[int]]]) -> None:
    data = memoryview(bytes(range(256)) * 1200)

    def send() -> None:
        for size, pieces in answers:
            sender.send(bytes(data[:size]), [data[:piece] for piece in pieces])

    with opened(kind) as (sender, receiver):
        thread = in_thread(send)
        for size, pieces in answers:
            assert receiver.receive_message(2**20) == data[:size]
            for piece in pieces:
                room = memoryview(bytearray(piece))
                assert receiver.receive_into(room) == piece
                assert room == data[:piece]
        assert not receiver.has_leftover
        thread.join(100)


@pytest.mark.parametrize("size", [2**19 - 1, 2**19, 2**19 + 1, 3 * 2**20 + 7])
@pytest.mark.parametrize("num_missing", [0, 1, 2**18 - 1, 2**18 + 1])
def test_large_payload_arrives_whole_or_its_end_is_told_at_once(
    pair: tuple[Connection, Connection], size: int, num_missing: int
) -> None:
    sender, receiver = pair
    data = memoryview(os.urandom(size))
    halves = [data[: size // 2], data[size // 2 : size - num_missing]]

    def send() -> None:
        for half in halves:
            sender.send_raw(bytes(half))
        if num_missing:
            sender.shut_down()

    thread = in_thread(send)
    room = memoryview(bytearray(size))
    if num_missing:
        with pytest.raises(ConnectionResetError, match="in the middle of an answer"):
            receiver.receive_into(room)
    else:
        receiver.receive_into(room)
        assert room == data
        sender.send(b"after")  # little is enough again to wake who waits
        assert receiver.receive_message(10) == b"after"
    thread.join(100)


def test_payload_of_more_pieces_than_one_call_takes_arrives(pair: tuple[Connection, Connection]) -> None:
    sender, receiver = pair
    pieces = [memoryview(bytes([number % 256]) * 100) for number in range(3000)]
    thread = in_thread(sender.send, b"m", pieces)
    assert receiver.receive_message(10) == b"m"
    room = memoryview(bytearray(300_000))
    receiver.receive_into(room)
    assert room == b"".join(pieces)
    thread.join(100)


@pytest.mark.attack("A8")
def test_message_longer_than_allowed_is_refused_before_it_is_read(pair: tuple[Connection, Connection]) -> None:
    pair[0].send_raw(struct.pack("<I", 2**32 - 1))
    with pytest.raises(ProtocolError, match="4294967295 bytes is announced, at most 100"):
        pair[1].receive_message(100)


def test_end_before_a_message_is_none_and_inside_of_one_an_error(
    kind: str, pair: tuple[Connection, Connection]
) -> None:
    sender, receiver = pair
    sender.send(b"whole")
    sender.send_raw(struct.pack("<I", 5) + b"cut")
    sender.close()
    assert receiver.receive_message(100) == b"whole"
    with pytest.raises(ConnectionResetError):
        receiver.receive_message(100)
    with opened(kind) as (first, second):
        first.close()
        assert second.receive_message(100) is None
        with pytest.raises(ConnectionResetError):
            second.wait_for_data()


def test_deadline_in_the_past_ends_waiting(pair: tuple[Connection, Connection]) -> None:
    now_s = time.monotonic()
    with pytest.raises(DeadlineError):
        pair[1].receive_message(100, deadline_s=now_s)
    with pytest.raises(DeadlineError):
        pair[1].receive_into(memoryview(bytearray(2**20)), deadline_s=now_s)
    payload = memoryview(bytes(2**26))  # more than all buffers on the way hold
    with pytest.raises(DeadlineError):
        pair[0].send(b"", [payload], deadline_s=now_s)


def test_shut_down_by_another_thread_ends_waiting(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    failures: list[BaseException] = []

    def run(blocked: Callable[[], object]) -> None:
        try:
            blocked()
        except OSError as error:
            failures.append(error)

    receiving = in_thread(run, lambda: first.receive_into(memoryview(bytearray(2**20))))
    sending = in_thread(run, lambda: first.send(b"", [memoryview(bytes(2**26))]))
    first.shut_down()
    receiving.join(100)
    sending.join(100)
    assert len(failures) == 2
    assert not second.receive_message(2**20)


def test_is_ended_tells_whether_the_other_side_left(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    assert not second.is_ended()
    first.send(b"unread")
    assert not second.is_ended()
    assert second.receive_message(10) == b"unread"
    first.close()
    while not second.is_ended():
        pass
    second.close()
    assert second.is_ended()


def test_is_quiet_tells_whether_anything_came(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    assert second.is_quiet()
    first.send(b"two")
    first.send(b"messages")
    while second.is_quiet():
        pass
    assert not second.is_ended()
    assert second.receive_message(10) == b"two"
    assert not second.is_quiet()
    assert second.receive_message(10) == b"messages"
    assert second.is_quiet()
    first.close()
    while second.is_quiet():
        pass
    assert second.is_ended()


def test_closed_connection_ends_though_a_forked_process_has_a_copy(pair: tuple[Connection, Connection]) -> None:
    first, second = pair
    copy = os.dup(first._socket.fileno())  # type: ignore[attr-defined]
    try:
        first.close()
        assert second.receive_message(10, deadline_s=time.monotonic() + 30.0) is None
    finally:
        os.close(copy)


def test_closed_connection_leaves_alone_whoever_has_its_descriptor_next(
    kind: str, pair: tuple[Connection, Connection]
) -> None:
    first, second = pair
    first.close()
    first.close()  # idempotent
    with opened(kind) as (third, fourth):
        first.shut_down()
        assert first.is_ended()
        third.send(b"alive")
        assert fourth.receive_message(10) == b"alive"
    assert second.is_ended()


def test_sending_to_an_ended_connection_survives_a_script_that_restored_sigpipe() -> None:
    script = """
import signal, socket
import contextlib, select
from hetero.wire.transports.tcp import TcpTransport

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
for send in (lambda stream: stream.send(b"message"), lambda stream: stream.send_raw(b"raw")):
    with contextlib.closing(TcpTransport().listen("127.0.0.1")) as listener:
        first = TcpTransport().connect("127.0.0.1", listener.port)
        select.select([listener], [], [])
        listener.accept().close()
        try:
            while True:
                send(first)
        except OSError:
            first.close()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=100)


@pytest.mark.parametrize("kind", ["tcp", "tls"])
def test_connection_is_not_given_up_because_the_other_side_does_not_read(kind: str) -> None:
    # The kernel would end it after so many ms with data unsent: a trainer that is stopped must lose nothing.
    with opened(kind) as pair:
        for stream in pair:
            given = stream._socket  # type: ignore[attr-defined]
            assert given.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
            assert given.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    with full_listener() as place:
        yield place


def test_pending_connect_ends_when_another_thread_shuts_it_down(silent: tuple[str, int]) -> None:
    streams: list[Connection] = []
    failures: list[OSError] = []
    begun = threading.Event()

    def run() -> None:
        try:
            connect(*silent, on_connection=lambda stream: (streams.append(stream), begun.set()))
        except OSError as error:
            failures.append(error)

    thread = in_thread(run)
    assert begun.wait(100)
    streams[0].shut_down()
    thread.join(100)
    assert not isinstance(failures[0], TimeoutError)


def test_pending_connect_ends_at_its_deadline_or_by_itself(
    silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeadlineError):
        connect(*silent, deadline_s=time.monotonic() + 0.01)
    monkeypatch.setattr(sockets, "CONNECT_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match="no connection within 0.01 s") as caught:
        connect(*silent)
    assert not isinstance(caught.value, DeadlineError)


def test_connect_that_was_shut_down_before_it_began_fails() -> None:
    with contextlib.closing(listen("127.0.0.1")) as listener, pytest.raises(ConnectionAbortedError):
        connect("127.0.0.1", listener.port, on_connection=lambda connection: connection.shut_down())


def test_listen_on_an_address_of_another_host_is_a_port_error() -> None:
    with pytest.raises(PortError, match=r"cannot listen on 192\.0\.2\.1"):
        listen("192.0.2.1")


@pytest.mark.parametrize("transport", [TcpTransport(), InProcess()], ids=["tcp", "in_process"])
def test_connect_where_no_one_listens_fails(transport: TcpTransport | InProcess) -> None:
    with contextlib.closing(transport.listen("127.0.0.1")) as listener:
        port = listener.port
    for _ in range(2):
        with pytest.raises(OSError, match="refused"):
            transport.connect("127.0.0.1", port)


def test_deadline_holds_for_a_peer_that_trickles(pair: tuple[Connection, Connection]) -> None:
    sender, receiver = pair
    has_ended = threading.Event()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not has_ended.wait(0.05):
                sender.send_raw(b"x")

    thread = in_thread(trickle)
    for size in (100, 2**20):
        with pytest.raises(DeadlineError):
            receiver.receive_into(memoryview(bytearray(size)), deadline_s=time.monotonic() + 0.2)
    has_ended.set()
    thread.join(100)
