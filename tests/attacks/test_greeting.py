"""Unauthenticated peers at the port for batches: every bad form of a greeting."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.control.security import call_metadata
from hetero.wire.faults import CallFailedError
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import GREETING, PROTOCOL, SESSION_TOKEN_BYTES, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.transports.interface import Connection
from tests.support.attacks import http2, servers
from tests.support.attacks.servers import JOB, Server, attended
from tests.support.waiting import wait_for
from tests.support.wire.ends import connect

import grpc  # isort: skip

pytestmark = pytest.mark.attack("A1")

REQUEST = pb.FetchRequest(
    protocol=PROTOCOL, dataset=pb.DatasetSpec(name="photos", arguments_json="{}"), indices=(1).to_bytes(8, "little")
)
ASKING = struct.pack("<I", REQUEST.ByteSize()) + REQUEST.SerializeToString()
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda _: GREETING + bytes(SESSION_TOKEN_BYTES),
    "wrong": lambda session_token: GREETING + session_token[::-1],
    "one bit off": lambda session_token: GREETING + session_token[:-1] + bytes([session_token[-1] ^ 1]),
    "prefix and zeros": lambda session_token: (
        GREETING + session_token[: SESSION_TOKEN_BYTES // 2].ljust(SESSION_TOKEN_BYTES, b"\0")
    ),
    "no greeting": lambda session_token: session_token + bytes(len(GREETING)),
    "greeting of another case": lambda session_token: GREETING.upper() + session_token,
    "greeting with one letter wrong": lambda session_token: GREETING[:-1] + b"O" + session_token,
    "session token before the greeting": lambda session_token: session_token + GREETING,
    "session token as text": lambda session_token: GREETING + session_token.hex().encode(),
    "a space between": lambda session_token: GREETING + b" " + session_token,
    "a megabyte": lambda _: GREETING + b"\xff" * 2**20,
    "the job's token": lambda _: GREETING + b"Bearer TOKEN"[:SESSION_TOKEN_BYTES].ljust(SESSION_TOKEN_BYTES),
    "a message": lambda session_token: struct.pack("<I", SESSION_TOKEN_BYTES) + session_token + bytes(2),
    "a request at once": lambda _: ASKING,
    "HTTP": lambda _: b"GET / HTTP/1.1\r\nHost: endpoint\r\nAuthorization: Bearer x\r\n\r\n",
    "HTTP/2": lambda _: http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0, b"") + bytes(20),
    "TLS": lambda _: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "pickle": lambda _: b"\x80\x04\x95" + b"cposix\nsystem\n(S'true'\ntR." + bytes(30),
}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with servers.endpoint(tmp_path_factory.mktemp("endpoint")) as server:
        yield server


def is_served(server: Server) -> bool:
    """Tell whether a reader gets an answer: here, that the data set is not built."""
    with (
        attended(server) as session_token,
        contextlib.closing(connect("127.0.0.1", server.batch_port)) as stream,
    ):
        stream.send_raw(GREETING + session_token)
        return answers(stream)


def answers(stream: Connection) -> bool:
    request = REQUEST.SerializeToString()
    stream.send(request, deadline_s=time.monotonic() + 20.0)
    message = stream.receive_message(Limits().max_answer_bytes, deadline_s=time.monotonic() + 20.0)
    if message is None:
        return False
    with pytest.raises(CallFailedError, match="without collation|not built"):
        BatchDecoder(request=request).take_message(message)
    return True


def heard(place: tuple[str, int], said: bytes) -> bytes:
    """Send something to a port. Return what it answers before it ends the connection."""
    with socket.create_connection(place, 20.0) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(said)
        try:
            return connection.recv(1000)
        except ConnectionResetError:  # it had sent more than was read
            return b""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("then", [b"", ASKING], ids=["alone", "with a request"])
def test_bad_greeting_is_closed_without_a_word_and_counted(
    endpoint: Server, caplog: pytest.LogCaptureFixture, form: str, then: bytes
) -> None:
    delivery = endpoint.running._service.delivery
    with attended(endpoint) as session_token, caplog.at_level(logging.DEBUG):
        before = delivery.greeter.num_rejected
        for number in range(1, 6):
            assert heard(("127.0.0.1", endpoint.batch_port), FORMS[form](session_token) + then) == b""
            wait_for(lambda number=number: delivery.greeter.num_rejected == before + number)
        assert endpoint.running.statistics()["auth_failures"] >= before + 5
    assert sum("rejected a connection" in record.message for record in caplog.records) <= 1
    assert session_token.hex() not in caplog.text
    assert str(session_token) not in caplog.text
    assert is_served(endpoint)


@pytest.mark.parametrize("length", [0, 1, len(GREETING), len(GREETING) + 1, len(GREETING) + SESSION_TOKEN_BYTES - 1])
def test_greeting_that_ends_early_admits_nobody(endpoint: Server, length: int) -> None:
    delivery = endpoint.running._service.delivery
    wait_for(lambda: not delivery._num_connections)  # the thread of a connection that has ended may still be there
    with attended(endpoint) as session_token:
        with socket.create_connection(("127.0.0.1", endpoint.batch_port), 20.0) as connection:
            connection.sendall((GREETING + session_token)[:length])
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        wait_for(lambda: not delivery.greeter._peers)
        assert delivery._num_connections == 0
    assert is_served(endpoint)


@pytest.mark.attack("A11")
def test_recorded_greeting_admits_nobody_once_its_reader_has_left(endpoint: Server) -> None:
    delivery = endpoint.running._service.delivery
    with (
        attended(endpoint) as session_token,
        contextlib.closing(connect("127.0.0.1", endpoint.batch_port)) as stream,
    ):
        stream.send_raw(GREETING + session_token)
        assert answers(stream)
    wait_for(lambda: not delivery._session_tokens)
    assert heard(("127.0.0.1", endpoint.batch_port), GREETING + session_token + ASKING) == b""


@pytest.mark.attack("A11")
def test_recorded_call_and_greeting_are_worth_nothing_after_a_restart(tmp_path: Path) -> None:
    """The same job, token and even a client that strips nothing: only the process is another."""
    with servers.endpoint(tmp_path, incarnation="first") as first, attended(first) as session_token:
        token = first.token
        recorded = call_metadata(token, JOB, incarnation="first")
        code, _ = first.refusal("/hetero.v1.Data/Prepare", recorded, request=b"\xff")
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # it got through
    with servers.endpoint(tmp_path, incarnation="second") as second:
        second.access._token = token
        for method in ("Prepare", "Attend"):
            for arity in servers.ARITIES:
                found = second.refusal(f"/hetero.v1.Data/{method}", recorded, arity=arity)
                assert found == (grpc.StatusCode.FAILED_PRECONDITION, "this server was started anew")
        assert heard(("127.0.0.1", second.batch_port), GREETING + session_token + ASKING) == b""
        code, _ = second.refusal(
            "/hetero.v1.Data/Prepare", call_metadata(token, JOB, incarnation="second"), request=b"\xff"
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
