"""Strangers at the port for batches: every bad form of what such a connection begins with."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import http2
import pytest
import servers
from servers import JOB, Server, attended
from waiting import wait_for

from hetero.control.security import call_metadata
from hetero.dataplane.endpoint.transport import GREETING, TICKET_BYTES
from hetero.wire.framing import BatchDecoder, RefusedError
from hetero.wire.limits import PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.streams import Stream, connect

import grpc  # isort: skip

pytestmark = pytest.mark.attack("A1")

REQUEST = pb.FetchRequest(protocol=PROTOCOL, dataset=pb.DatasetSpec(name="photos", arguments_json="{}"), indices=[1])
ASKING = struct.pack("<I", REQUEST.ByteSize()) + REQUEST.SerializeToString()
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda _: GREETING + bytes(TICKET_BYTES),
    "wrong": lambda ticket: GREETING + ticket[::-1],
    "one bit off": lambda ticket: GREETING + ticket[:-1] + bytes([ticket[-1] ^ 1]),
    "prefix and zeros": lambda ticket: GREETING + ticket[: TICKET_BYTES // 2] + bytes(TICKET_BYTES - TICKET_BYTES // 2),
    "no greeting": lambda ticket: ticket + bytes(len(GREETING)),
    "greeting of another case": lambda ticket: GREETING.upper() + ticket,
    "greeting with one letter wrong": lambda ticket: GREETING[:-1] + b"O" + ticket,
    "ticket before the greeting": lambda ticket: ticket + GREETING,
    "ticket as text": lambda ticket: GREETING + ticket.hex().encode(),
    "a space between": lambda ticket: GREETING + b" " + ticket,
    "a megabyte": lambda _: GREETING + b"\xff" * 2**20,
    "the job's token": lambda _: GREETING + b"Bearer TOKEN"[:TICKET_BYTES].ljust(TICKET_BYTES),
    "a message": lambda ticket: struct.pack("<I", TICKET_BYTES) + ticket + bytes(2),
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
    with attended(server) as ticket, contextlib.closing(connect("127.0.0.1", server.batch_port)) as stream:
        stream.send_raw(GREETING + ticket)
        return answers(stream)


def answers(stream: Stream) -> bool:
    request = REQUEST.SerializeToString()
    stream.send(request, deadline_s=time.monotonic() + 20.0)
    message = stream.receive_message(Limits().max_answer_bytes, deadline_s=time.monotonic() + 20.0)
    if message is None:
        return False
    with pytest.raises(RefusedError, match="without collation|not built"):
        BatchDecoder(request=request).take_message(message)
    return True


def heard(place: tuple[str, int], said: bytes) -> bytes:
    """Say something to a port; return what it answers before it ends the connection."""
    with socket.create_connection(place, 20.0) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(said)
        try:
            return connection.recv(1000)
        except ConnectionResetError:  # it had said more than anybody read
            return b""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("then", [b"", ASKING], ids=["alone", "with a request"])
def test_bad_greeting_is_closed_without_a_word_and_counted(
    endpoint: Server, caplog: pytest.LogCaptureFixture, form: str, then: bytes
) -> None:
    delivery = endpoint.running._service.delivery
    with attended(endpoint) as ticket, caplog.at_level(logging.DEBUG):
        before = delivery.num_turned_out
        for number in range(1, 6):
            assert heard(("127.0.0.1", endpoint.batch_port), FORMS[form](ticket) + then) == b""
            wait_for(lambda number=number: delivery.num_turned_out == before + number)
        assert endpoint.running.statistics().auth_failures >= before + 5
    assert sum("turned out a connection" in record.message for record in caplog.records) <= 1
    assert ticket.hex() not in caplog.text
    assert str(ticket) not in caplog.text
    assert is_served(endpoint)


@pytest.mark.parametrize("length", [0, 1, len(GREETING), len(GREETING) + 1, len(GREETING) + TICKET_BYTES - 1])
def test_greeting_that_ends_early_admits_nobody(endpoint: Server, length: int) -> None:
    delivery = endpoint.running._service.delivery
    wait_for(lambda: not delivery._num_connections)  # the thread of a connection that has ended may still be there
    with attended(endpoint) as ticket:
        with socket.create_connection(("127.0.0.1", endpoint.batch_port), 20.0) as connection:
            connection.sendall((GREETING + ticket)[:length])
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
        wait_for(lambda: not delivery._strangers)
        assert delivery._num_connections == 0
    assert is_served(endpoint)


@pytest.mark.attack("A11")
def test_recorded_greeting_admits_nobody_once_its_reader_has_left(endpoint: Server) -> None:
    delivery = endpoint.running._service.delivery
    with attended(endpoint) as ticket, contextlib.closing(connect("127.0.0.1", endpoint.batch_port)) as stream:
        stream.send_raw(GREETING + ticket)
        assert answers(stream)
    wait_for(lambda: not delivery._tickets)
    assert heard(("127.0.0.1", endpoint.batch_port), GREETING + ticket + ASKING) == b""


@pytest.mark.attack("A11")
def test_recorded_call_and_greeting_are_worth_nothing_after_a_restart(tmp_path: Path) -> None:
    """The same job, token and even a client that strips nothing: only the process is another."""
    with servers.endpoint(tmp_path, incarnation="first") as first, attended(first) as ticket:
        token = first.token
        recorded = call_metadata(token, JOB, incarnation="first")
        code, _ = first.refusal("/hetero.v1.Data/Describe", recorded, request=b"\xff")
        assert code is grpc.StatusCode.INVALID_ARGUMENT  # it got through
    with servers.endpoint(tmp_path, incarnation="second") as second:
        second.access._token = token
        for method in ("Prepare", "Describe", "Attend"):
            for arity in servers.ARITIES:
                found = second.refusal(f"/hetero.v1.Data/{method}", recorded, arity=arity)
                assert found == (grpc.StatusCode.FAILED_PRECONDITION, "this server was started anew")
        assert heard(("127.0.0.1", second.batch_port), GREETING + ticket + ASKING) == b""
        code, _ = second.refusal(
            "/hetero.v1.Data/Describe", call_metadata(token, JOB, incarnation="second"), request=b"\xff"
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
