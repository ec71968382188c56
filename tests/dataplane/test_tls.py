"""The data plane under TLS: strangers of every kind, readers that are let in, real endpoints."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from job_certificates import folder, opener, tls, without_certificate

from hetero.dataplane import delivery
from hetero.dataplane.delivery import GREETING, Delivery
from hetero.dataplane.reader import Reader
from hetero.errors import AuthenticationError, EndpointUnavailableError
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import Limits
from hetero.wire.streams import Stream, connect
from hetero.wire.tls import TlsError

CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # its beginning


def echo(request: bytes, _has_left: Callable[[], bool]) -> EncodedBatch:
    return EncodedBatch({"request": np.frombuffer(request, np.uint8)}, request=request)


@pytest.fixture
def served(tools: Any) -> Iterator[Delivery]:
    """A delivery of algo-1 under TLS; afterwards its threads have to be gone."""
    served = Delivery("127.0.0.1", echo, max_requests=8, tls=tls())
    served.start()
    yield served
    served.stop(0.0)
    tools.wait_for(lambda: not [each for each in threading.enumerate() if each.name in ("delivery", "connection")])


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def stranger_of(served: Delivery, stack: contextlib.ExitStack, said: bytes = b"") -> socket.socket:
    stranger = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 10.0))
    stranger.sendall(said)
    return stranger


def reader_of(served: Delivery, stack: contextlib.ExitStack, make: Any = None) -> Stream:
    make = make or opener(tls(host="trainer"), "algo-1")
    return stack.enter_context(contextlib.closing(connect("127.0.0.1", served.port, make=make)))


def ask(stream: Stream, request: bytes = b"request") -> bytes:
    stream.send(request)
    message = stream.receive_message(Limits().max_answer_bytes)
    assert message is not None, "the connection ended"
    decoder = BatchDecoder(request=request)
    decoder.take_message(message)
    while not decoder.done:
        decoder.filled(stream.receive_into(decoder.room()))
    return bytes(decoder.result()["request"])


def is_served(served: Delivery, stack: contextlib.ExitStack) -> bool:
    stream = reader_of(served, stack)
    stream.send_raw(GREETING + served.admit())
    return ask(stream) == b"request"


def test_reader_with_certificate_and_ticket_is_answered_as_often_as_it_asks(
    served: Delivery, stack: contextlib.ExitStack
) -> None:
    stream = reader_of(served, stack)
    stream.send_raw(GREETING + served.admit())
    for size in (1, 10_000, 1_000_000):
        assert ask(stream, b"x" * size) == b"x" * size
        assert stream.is_quiet()


def test_hello_and_request_in_many_records_or_one_are_understood(served: Delivery, stack: contextlib.ExitStack) -> None:
    hello = GREETING + served.admit()
    slow, fast = reader_of(served, stack), reader_of(served, stack)
    for byte in hello:
        slow.send_raw(bytes([byte]))
    assert ask(slow) == b"request"
    fast.send_raw(hello + b"\7\0\0\0request")
    assert fast.receive_message(2**20)


@pytest.mark.attack("A18")
def test_certificate_without_a_ticket_lets_nobody_in(served: Delivery, stack: contextlib.ExitStack) -> None:
    served.admit()
    stream = reader_of(served, stack)
    stream.send_raw(GREETING + bytes(delivery.TICKET_BYTES))
    assert stream.receive_message(100) is None
    assert served.num_turned_out == 1


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: opener(tls("expired", "trainer"), "algo-1"), "its certificate is not valid: certificate has expired"),
        (lambda: opener(tls("other", "trainer"), "algo-1"), "it refuses this host's certificate: another authority"),
        (lambda: opener(tls(host="trainer"), "algo-2"), "refuses this host's certificate"),
        (lambda: without_certificate("algo-1"), "it shows no certificate"),
    ],
    ids=["expired", "other authority", "other name", "no certificate"],
)
def test_stranger_that_fails_a_check_is_named_and_counted(
    served: Delivery,
    stack: contextlib.ExitStack,
    caplog: pytest.LogCaptureFixture,
    tools: Any,
    make: Callable[[], Any],
    words: str,
) -> None:
    with pytest.raises(TlsError):
        reader_of(served, stack, make())
    tools.wait_for(lambda: any(words in message for message in caplog.messages))
    assert served.num_turned_out == 1
    assert is_served(served, stack)


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    "said",
    [GREETING + bytes(32), b"GET / HTTP/1.1\r\nHost: endpoint\r\n\r\n", bytes(100)],
    ids=["hetero", "HTTP", "zeros"],
)
def test_stranger_in_plaintext_is_closed_and_counted(
    served: Delivery, stack: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, tools: Any, said: bytes
) -> None:
    stranger_of(served, stack, said)
    tools.wait_for(lambda: "turned out a connection, TLS: " in caplog.text)
    assert served.num_turned_out == 1
    assert is_served(served, stack)


@pytest.mark.attack("A18")
def test_strangers_that_stop_in_the_middle_of_the_handshake_hold_up_nobody(
    served: Delivery, stack: contextlib.ExitStack, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "_HELLO_TIMEOUT_S", 2.0)
    strangers = [
        stranger_of(served, stack, CLIENT_HELLO[:size]) for size in (0, 1, 5, len(CLIENT_HELLO)) for _ in range(8)
    ]
    begin_s = time.monotonic()
    assert is_served(served, stack)
    assert time.monotonic() - begin_s < 2.0, "the reader had to wait for the strangers' time to be over"
    for stranger in strangers:
        assert stranger.recv(1) == b""  # when its time is over
    tools.wait_for(lambda: not served._strangers)


def test_tls_reader_at_a_plaintext_endpoint_says_what_to_do(stack: contextlib.ExitStack) -> None:
    plain = Delivery("127.0.0.1", echo, max_requests=8)
    plain.start()
    stack.callback(plain.stop, 0.0)
    with pytest.raises(TlsError, match="--tls-dir"):
        reader_of(plain, stack)


# Real endpoints


def read(fleet: Any, wanted: list[Any]) -> list[Any]:
    with Reader(fleet, iter(wanted)) as reader:
        return list(reader)


def test_endpoints_under_tls_give_the_same_batches(job: Any, tools: Any) -> None:
    job.pool("algo-1", tls_dir=str(folder("job")))
    job.pool("algo-2", tls_dir=str(folder("job")))
    wanted = tools.requests(tools.spec(width=20_000))
    assert tools.digest(read(job.fleet(tls=tls(host="trainer")), wanted)) == tools.digest(
        tools.local(job.script, wanted)
    )


@pytest.mark.attack("A18")
def test_reader_and_endpoint_that_do_not_agree_on_tls_never_exchange_a_batch(job: Any, tools: Any) -> None:
    wanted = tools.requests(tools.spec())
    pool = job.pool("algo-1", tls_dir=str(folder("job")))
    for options, words in (
        ({}, "algo-1/0"),
        ({"tls": tls("other", "trainer")}, "TLS: its certificate is not valid: another authority signed it"),
    ):
        with pytest.raises(EndpointUnavailableError) as caught:
            read(job.fleet(prepare_timeout_s=2.0, data_timeout_s=2.0, **options), wanted)
        assert words in str(caught.value)
    assert not pool.statistics().get("num_batches")
    plain = job.pool("algo-2")
    with pytest.raises(EndpointUnavailableError, match="TLS: it does not speak TLS"):
        read(job.fleet(prepare_timeout_s=2.0, data_timeout_s=2.0, tls=tls("other", "trainer")), wanted)
    assert not plain.statistics().get("num_batches")


def test_endpoint_whose_certificate_cannot_be_used_says_so(job: Any) -> None:
    pool = job.pool("algo-9", ready=False, tls_dir=str(folder("job")))
    with pytest.raises(AuthenticationError, match="algo-9.pem"):
        pool.wait_ready(60.0)


@pytest.mark.attack("A15")
def test_keys_are_in_no_environment_and_no_command_line(job: Any) -> None:
    pool = job.pool("algo-1", tls_dir=str(folder("job")))
    key = (folder("job") / "algo-1.key").read_text().splitlines()[1].encode()
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            told = json.dumps([process.cmdline(), process.environ()]).encode()
            assert key not in told
    assert pool.records
