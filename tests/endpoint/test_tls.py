"""The data plane under TLS: unauthenticated peers of every kind, readers that are let in, real endpoints."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from hetero.endpoint.delivery import Delivery
from hetero.errors import AuthenticationError, EndpointUnavailableError
from hetero.reader.reader import Reader
from hetero.wire.limits import GREETING, SESSION_TOKEN_BYTES
from hetero.wire.tls import TlsError
from hetero.wire.transports import greeter
from hetero.wire.transports.interface import Connection
from hetero.wire.transports.tls import TlsTransport
from tests.support.batch_path.deliveries import REQUEST, admitted, connected, echoed, peer_of
from tests.support.wire.job_certificates import folder, opener, tls, without_certificate

CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # its beginning


@pytest.fixture
def served(serve: Callable[..., Delivery]) -> Delivery:
    """A delivery of algo-1 under TLS."""
    return serve(transport=TlsTransport(tls()))


def reader_of(served: Delivery, streams: contextlib.ExitStack) -> Connection:
    return admitted(served, streams, connect=opener(tls(host="trainer"), "algo-1"))


def is_served(served: Delivery, streams: contextlib.ExitStack) -> bool:
    return echoed(reader_of(served, streams)) == REQUEST


def test_reader_with_certificate_and_session_token_is_answered_as_often_as_it_asks(
    served: Delivery, streams: contextlib.ExitStack
) -> None:
    stream = reader_of(served, streams)
    for size in (1, 10_000, 1_000_000):
        assert echoed(stream, b"x" * size) == b"x" * size
        assert stream.is_quiet()


def test_hello_and_request_in_many_records_or_one_are_understood(
    served: Delivery, streams: contextlib.ExitStack
) -> None:
    hello, connect = GREETING + served.admit(), opener(tls(host="trainer"), "algo-1")
    slow, fast = connected(served, streams, connect), connected(served, streams, connect)
    for byte in hello:
        slow.send_raw(bytes([byte]))
    assert echoed(slow) == REQUEST
    fast.send_raw(hello + b"\7\0\0\0request")
    assert fast.receive_message(2**20)


@pytest.mark.attack("A18")
def test_certificate_without_a_session_token_lets_nobody_in(served: Delivery, streams: contextlib.ExitStack) -> None:
    served.admit()
    stream = admitted(served, streams, bytes(SESSION_TOKEN_BYTES), opener(tls(host="trainer"), "algo-1"))
    assert stream.receive_message(100) is None
    assert served.greeter.num_rejected == 1


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
def test_unauthenticated_peer_that_fails_a_check_is_named_and_counted(
    served: Delivery,
    streams: contextlib.ExitStack,
    caplog: pytest.LogCaptureFixture,
    tools: Any,
    make: Callable[[], Any],
    words: str,
) -> None:
    with pytest.raises(TlsError):
        connected(served, streams, make())
    tools.wait_for(lambda: any(words in message for message in caplog.messages))
    assert served.greeter.num_rejected == 1
    assert is_served(served, streams)


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    "said",
    [GREETING + bytes(32), b"GET / HTTP/1.1\r\nHost: endpoint\r\n\r\n", bytes(100)],
    ids=["hetero", "HTTP", "zeros"],
)
def test_unauthenticated_peer_in_plaintext_is_closed_and_counted(
    served: Delivery, streams: contextlib.ExitStack, caplog: pytest.LogCaptureFixture, tools: Any, said: bytes
) -> None:
    peer_of(served, streams, said)
    tools.wait_for(lambda: "rejected a connection, TLS: " in caplog.text)
    assert served.greeter.num_rejected == 1
    assert is_served(served, streams)


@pytest.mark.attack("A18")
def test_unauthenticated_peers_that_stop_in_the_middle_of_the_handshake_hold_up_nobody(
    served: Delivery, streams: contextlib.ExitStack, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeter, "CONNECT_TIMEOUT_S", 2.0)
    peers = [peer_of(served, streams, CLIENT_HELLO[:size]) for size in (0, 1, 5, len(CLIENT_HELLO)) for _ in range(8)]
    begin_s = time.monotonic()
    assert is_served(served, streams)
    assert time.monotonic() - begin_s < 2.0, "the reader had to wait for the unauthenticated peers' time to be over"
    for peer in peers:
        assert peer.recv(1) == b""  # when its time is over
    tools.wait_for(lambda: not served.greeter._peers)


def test_tls_reader_at_a_plaintext_endpoint_says_what_to_do(
    serve: Callable[..., Delivery], streams: contextlib.ExitStack
) -> None:
    plain = serve()
    with pytest.raises(TlsError, match="--tls-dir"):
        reader_of(plain, streams)


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
        pool.wait_ready(300.0)


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
