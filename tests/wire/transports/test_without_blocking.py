"""Sending and receiving without blocking, over every transport."""

from __future__ import annotations

import random
import select
import struct
import threading
from collections.abc import Iterator

import pytest

from hetero.errors import ProtocolError
from hetero.wire.transports.interface import Connection
from tests.support.wire.ends import KINDS, opened

DATA = memoryview(bytes(range(256)) * 2**14)  # 4 MiB: more than the buffers on the way hold


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Connection, Connection]]:
    with opened(request.param) as streams:
        yield streams


def wait_readable(connection: Connection) -> None:
    assert select.select([connection], [], [], 30.0)[0]


def receive(connection: Connection, num_bytes: int) -> bytes:
    """Receive payload as a consumer does that waits for descriptors."""
    room = memoryview(bytearray(num_bytes))
    filled = 0
    while filled < num_bytes:
        size = connection.receive_now(room[filled:])
        filled += size
        if not size:
            wait_readable(connection)
    return bytes(room)


def receive_message(connection: Connection) -> bytes:
    while (message := connection.receive_message_now(2**23)) is None:
        wait_readable(connection)
    return message


@pytest.mark.parametrize("size", [0, 1, 2**14, 2**16 - 4, 2**16, 300_000])
def test_messages_and_payload_arrive_as_they_were_sent(pair: tuple[Connection, Connection], size: int) -> None:
    sender, receiver = pair
    for _ in range(3):
        send_rest = sender.send_now(bytes(DATA[:size]), [DATA[:size]] if size else [])
        thread = None if send_rest is None else threading.Thread(target=send_rest)
        if thread is not None:
            thread.start()
        assert receive_message(receiver) == DATA[:size]
        assert receive(receiver, size) == DATA[:size]
        assert not receiver.has_leftover
        if thread is not None:
            thread.join(100.0)
    sender.send(b"and as ever")
    assert receiver.receive_message(100) == b"and as ever"


def test_rest_is_sent_when_the_other_side_reads(pair: tuple[Connection, Connection]) -> None:
    sender, receiver = pair
    send_rest = sender.send_now(b"message", [DATA, DATA])
    assert send_rest is not None
    thread = threading.Thread(target=send_rest)
    thread.start()
    assert receiver.receive_message(100) == b"message"
    room = memoryview(bytearray(2 * len(DATA)))
    receiver.receive_into(room)
    thread.join(100.0)
    assert not thread.is_alive()
    assert room[: len(DATA)] == DATA == room[len(DATA) :]


def test_rest_fails_if_the_connection_is_shut_down(pair: tuple[Connection, Connection]) -> None:
    sender, _ = pair
    send_rest = sender.send_now(b"", [DATA, DATA])
    assert send_rest is not None
    sender.shut_down()
    with pytest.raises(OSError, match="shut down"):
        send_rest()
    with pytest.raises(OSError, match="shut down"):
        sender.send_now(b"message")


def test_message_that_arrives_byte_by_byte_is_returned_with_its_last(pair: tuple[Connection, Connection]) -> None:
    sender, receiver = pair
    assert receiver.receive_message_now(100) is None
    said = struct.pack("<I", 7) + b"message"
    for end in range(1, len(said)):
        sender.send_raw(said[end - 1 : end])
        wait_readable(receiver)
        assert receiver.receive_message_now(100) is None
    sender.send_raw(said[-1:])
    wait_readable(receiver)
    assert receiver.receive_message_now(100) == b"message"
    assert receiver.receive_message_now(100) is None


def test_messages_that_arrive_in_pieces_of_any_size_are_as_they_were_sent(pair: tuple[Connection, Connection]) -> None:
    """Messages end within the receiver's buffer of 64 KiB, at its end, and beyond."""
    sender, receiver = pair
    draws = random.Random(2)
    sizes = [0, 1, 60, 2**16 - 5, 2**16 - 4, 2**16 - 3, 70_000, 200, 3, 65_000, 500, 100] * 3
    draws.shuffle(sizes)
    sent = b"".join([struct.pack("<I", size) + DATA[:size] + DATA[: size // 2] for size in sizes])

    def send() -> None:
        begin = 0
        while begin < len(sent):
            end = begin + draws.choice([1, 3, 4, 5, draws.randrange(1, 70_000)])
            sender.send_raw(sent[begin:end])
            begin = end

    thread = threading.Thread(target=send)
    thread.start()
    for size in sizes:
        assert receive_message(receiver) == DATA[:size]
        assert receive(receiver, size // 2) == DATA[: size // 2]
    thread.join(100.0)


def test_message_that_is_too_long_is_rejected_before_it_is_allocated(pair: tuple[Connection, Connection]) -> None:
    sender, receiver = pair
    sender.send_raw(struct.pack("<I", 2**32 - 1))
    wait_readable(receiver)
    with pytest.raises(ProtocolError, match="4294967295 bytes"):
        receive_message(receiver)


@pytest.mark.parametrize("after", [b"", b"\0", struct.pack("<I", 7), struct.pack("<I", 7) + b"mess"])
def test_end_of_the_connection_is_told(pair: tuple[Connection, Connection], after: bytes) -> None:
    sender, receiver = pair
    sender.send_raw(after or b"\0\0\0\0")
    if not after:
        assert receive_message(receiver) == b""
    sender.close()
    with pytest.raises(ConnectionResetError):
        receive_message(receiver)


def test_what_had_arrived_is_received_after_the_connection_was_shut_down(pair: tuple[Connection, Connection]) -> None:
    """An endpoint that has ended may have answered before. Its last answers are not lost."""
    sender, receiver = pair
    sender.send(b"message", [DATA[:1000]])
    wait_readable(receiver)
    receiver.shut_down()
    assert receive_message(receiver) == b"message"
    assert receive(receiver, 1000) == DATA[:1000]
    with pytest.raises(OSError, match=r"shut down|ended"):
        receive(receiver, 1)


def test_both_sides_of_a_session_are_used_at_the_same_time() -> None:
    """A thread of an endpoint waits for the next request while another one sends the answer."""
    with opened("tls") as (first, second):
        count = 200

        def talk(connection: Connection) -> None:
            for number in range(count):
                send_rest = connection.send_now(b"%d" % number, [DATA[:2000]])
                if send_rest is not None:
                    send_rest()

        threads = [threading.Thread(target=talk, args=(each,)) for each in (first, second)]
        found: list[list[bytes]] = [[], []]

        def listen(connection: Connection, into: list[bytes]) -> None:
            for _ in range(count):
                message = connection.receive_message(100)
                assert message is not None
                into.append(message)
                connection.receive_into(memoryview(bytearray(2000)))

        threads += [
            threading.Thread(target=listen, args=(each, into))
            for each, into in zip((first, second), found, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100.0)
        assert found == [[b"%d" % number for number in range(count)]] * 2


def test_many_pieces_are_sent_at_once(pair: tuple[Connection, Connection]) -> None:
    """A batch of hundreds of tensors. The kernel takes 1,024 pieces at most in one call."""
    sender, receiver = pair
    pieces = [DATA[number : number + 20] for number in range(3000)]
    assert sender.send_now(b"message", pieces) is None
    assert receive_message(receiver) == b"message"
    assert receive(receiver, 60_000) == b"".join(pieces)
