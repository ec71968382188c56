"""TLS: which check fails, and what its message says. Handshakes that end in time. Streams."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.wire.tls import Tls, TlsError, diagnose
from hetero.wire.transports import tls as tls_module
from hetero.wire.transports.interface import Connection, DeadlineError
from hetero.wire.transports.tls import TlsTransport
from tests.support.wire.ends import accept, connect, listen, opened
from tests.support.wire.job_certificates import Connect, folder, opener, opener_of, tls, without_certificate


def shake_hands(server: Tls, connect: Connect) -> tuple[str, str]:
    """Return what the server and the client say of a handshake that must fail."""
    failures: dict[str, str] = {}

    def serve() -> None:
        with contextlib.suppress(ConnectionResetError):
            try:
                accept(listener).close()
            except TlsError as error:
                failures["server"] = str(error)

    with contextlib.closing(TlsTransport(server).listen("127.0.0.1")) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(TlsError) as caught:
            connect("127.0.0.1", listener.port)
        thread.join(100)
    return failures.get("server", ""), str(caught.value)


@pytest.mark.attack("A18")
def test_server_of_another_authority_is_refused_and_both_sides_say_so() -> None:
    server, client = shake_hands(tls("other"), opener(tls(host="algo-2"), "algo-1"))
    assert "its certificate is not valid: another authority signed it" in client
    assert "it refuses this host's certificate: another authority signed it" in server


@pytest.mark.attack("A18")
def test_client_of_another_authority_is_refused_and_both_sides_say_so() -> None:
    intruder = tls("other", "algo-2")
    with pytest.MonkeyPatch.context() as patch:  # it trusts the job's authority, its own certificate is of another
        patch.setattr(intruder, "_client", _trusting(intruder))
        server, client = shake_hands(tls(), opener(intruder, "algo-1"))
    assert "its certificate is not valid: another authority signed it" in server
    assert "it refuses this host's certificate: another authority signed it" in client


def _trusting(intruder: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cafile=folder("job") / "ca.pem")
    own = intruder.directory / intruder.host
    context.load_cert_chain(f"{own}.pem", f"{own}.key")
    return context


@pytest.mark.attack("A18")
def test_server_whose_certificate_has_expired_is_refused() -> None:
    server, client = shake_hands(tls("expired"), opener(tls(host="algo-2"), "algo-1"))
    assert client == "its certificate is not valid: certificate has expired"
    assert server == "it refuses this host's certificate: certificate has expired"


@pytest.mark.attack("A18")
def test_client_whose_certificate_has_expired_is_refused() -> None:
    server, client = shake_hands(tls(), opener(tls("expired", "algo-2"), "algo-1"))
    assert server == "its certificate is not valid: certificate has expired"
    assert client == "it refuses this host's certificate: certificate has expired"


@pytest.mark.attack("A18")
def test_server_of_another_name_is_refused() -> None:
    _, client = shake_hands(tls(host="intruder"), opener(tls(host="algo-2"), "algo-1"))
    assert "its certificate is not valid: Hostname mismatch" in client
    assert "'algo-1'" in client


@pytest.mark.attack("A18")
def test_client_without_a_certificate_is_refused() -> None:
    server, client = shake_hands(tls(), without_certificate("algo-1"))
    assert server == "it shows no certificate"
    assert client == "it demands a certificate, and this side shows none"


@pytest.mark.attack("A18")
def test_plaintext_client_at_a_tls_server_is_refused() -> None:
    listener = TlsTransport(tls()).listen("127.0.0.1")
    with contextlib.closing(listener), contextlib.closing(connect("127.0.0.1", listener.port)) as client:
        client.send_raw(b"hetero" + bytes(32))
        with pytest.raises(TlsError, match="it does not speak TLS; give every host of the job --tls-dir"):
            accept(listener)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.receive_into(memoryview(bytearray(100)))


@pytest.mark.attack("A18")
@pytest.mark.parametrize("answer", [b"", b"hetero, in plaintext, and more of it than a record's head"])
def test_tls_client_at_a_plaintext_server_says_what_to_do(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as given:
                given.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(TlsError, match="--tls-dir"):
            opener(tls(host="algo-2"), "algo-1")(*listener.getsockname())
        thread.join(100)


@pytest.mark.attack("A18")
def test_old_versions_of_tls_are_refused() -> None:
    context = _trusting(tls(host="algo-2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = ssl.TLSVersion.TLSv1
        context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("DEFAULT@SECLEVEL=0")
    server, client = shake_hands(tls(), opener_of(context, "algo-1"))
    assert "version of TLS" in server or "TLS failed" in server
    assert client


def test_something_else_under_tls_is_no_endpoint() -> None:
    with contextlib.closing(TlsTransport(tls()).listen("127.0.0.1")) as listener:

        def serve() -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("hetero.wire.tls.WELCOME", b"HTTP/1")
                accept(listener).close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(TlsError, match="not an endpoint of hetero"):
            opener(tls(host="algo-2"), "algo-1")("127.0.0.1", listener.port)
        thread.join(100)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("failed to connect to all addresses; last error: UNAVAILABLE: Connection refused", None),
        ("error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED", "verification failed"),
        ("CERTIFICATE_VERIFY_FAILED: self signed certificate in certificate chain: x", "another authority"),
    ],
)
def test_words_of_a_library_are_read(words: str, text: str | None) -> None:
    found = diagnose(words)
    assert (found is None) == (text is None)
    assert found is None or (text is not None and text in found.text)


# Handshakes that do not go on


@pytest.fixture
def silent() -> Iterator[tuple[str, int]]:
    """Where connections are made and nothing is ever said."""
    with contextlib.closing(listen("127.0.0.1")) as listener:
        yield "127.0.0.1", listener.port


def test_handshake_that_gets_no_answer_ends_by_itself_or_at_the_deadline(
    silent: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = opener(tls(host="algo-2"), "algo-1")
    with pytest.raises(DeadlineError):
        connect(*silent, deadline_s=time.monotonic() + 0.05)
    monkeypatch.setattr(tls_module, "CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(TimeoutError, match="no TLS handshake within 0.05 s") as caught:
        connect(*silent)
    assert not isinstance(caught.value, DeadlineError)


def test_handshake_that_gets_no_answer_ends_when_another_thread_shuts_it_down(silent: tuple[str, int]) -> None:
    streams: list[Connection] = []
    failures: list[OSError] = []
    begun = threading.Event()

    def run() -> None:
        try:
            opener(tls(host="algo-2"), "algo-1")(
                *silent, on_connection=lambda stream: (streams.append(stream), begun.set())
            )
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert begun.wait(100)
    streams[0].shut_down()
    thread.join(100)
    assert failures
    assert not isinstance(failures[0], TimeoutError)


# Connections


def test_nothing_is_sent_in_plaintext() -> None:
    secret = b"a secret that must not be seen on the way" * 100
    with opened("tls") as (first, second):
        seen = bytearray()
        receive = second._socket.recv_into  # type: ignore[attr-defined]

        class Watched:
            def __getattr__(self, name: str) -> object:
                return getattr(given, name)

            def recv_into(self, room: memoryview, *arguments: int) -> int:
                size = receive(room, *arguments)
                seen.extend(room[:size])
                return size

        given, second._socket = second._socket, Watched()  # type: ignore[assignment]
        first.send(secret)
        assert second.receive_message(2**20) == secret
    assert len(seen) > len(secret)
    assert b"secret" not in seen


def test_damaged_record_ends_the_connection_and_is_named() -> None:
    with opened("tls") as (first, second):
        encrypted = bytearray(first._session.encrypt(memoryview(b"\5\0\0\0whole")))  # type: ignore[attr-defined]
        encrypted[-1] ^= 1
        first._socket.sendall(encrypted)  # type: ignore[attr-defined]
        with pytest.raises(TlsError, match="damaged"):
            second.receive_message(100)


def test_idle_connection_is_quiet_after_the_handshake_and_after_messages() -> None:
    with opened("tls") as (first, second):
        for _ in range(3):
            assert first.is_quiet()
            assert second.is_quiet()
            first.send(b"there")
            assert second.receive_message(10) == b"there"
            second.send(b"and back", [memoryview(bytes(100_000))])
            assert first.receive_message(10) == b"and back"
            first.receive_into(memoryview(bytearray(100_000)))


def test_sending_under_tls_to_an_ended_connection_survives_a_script_that_restored_sigpipe() -> None:
    script = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from tests.support.wire.ends import opened

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
for send in (lambda stream: stream.send(b"message"), lambda stream: stream.send_raw(b"raw")):
    with opened("tls") as (first, second):
        second.close()
        try:
            while True:
                send(first)
        except OSError:
            first.close()
"""
    subprocess.run([sys.executable, "-c", script, str(Path(__file__).parents[3])], check=True, timeout=100)
