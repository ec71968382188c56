"""Answers that are late, damaged, refused or cut short, from an endpoint in this process that misbehaves on purpose."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hetero.control.members.directory import Directory, EndpointRecord
from hetero.errors import BatchTimeoutError, DataPlaneError, EndpointUnavailableError, ExitCode, ProtocolError
from hetero.reader.fleet import Fleet
from hetero.reader.reader import Reader
from hetero.wire import channels
from hetero.wire.compression import COMPRESSIONS, compression_from_proto, is_installed
from hetero.wire.faults import Fault
from hetero.wire.framing import EncodedBatch, encode_refusal
from hetero.wire.limits import GREETING, SESSION_TOKEN_BYTES
from hetero.wire.proto import data_pb2 as pb
from tests.support.listening import Listener

import grpc  # isort: skip

Answer = Callable[[bytes, bytes, threading.Event], bytes]
"""From message, payload and the end of the test, what is sent instead. The connection ends after less than all."""


def framed(message: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<I", len(message)) + message + payload


def honest(message: bytes, payload: bytes, _ended: threading.Event) -> bytes:
    return framed(message, payload)


def damaged(message: bytes, payload: bytes, _ended: threading.Event) -> bytes:
    return framed(message, payload[:-1] + bytes([payload[-1] ^ 1]))


def nonsense(_message: bytes, _payload: bytes, _ended: threading.Event) -> bytes:
    return framed(b"\x80\x04\x95 a pickle")


def too_long(message: bytes, payload: bytes, _ended: threading.Event) -> bytes:
    return framed(message, payload + b"more")


def bomb(_message: bytes, _payload: bytes, _ended: threading.Event) -> bytes:
    return struct.pack("<I", 2**32 - 1)


def truncated(message: bytes, payload: bytes, _ended: threading.Event) -> bytes:
    return framed(message, payload[:-1])


def refused(refusal: Fault) -> Answer:
    def answer(message: bytes, _payload: bytes, _ended: threading.Event) -> bytes:
        refusing = pb.Answer.FromString(encode_refusal(refusal, "on purpose"))
        refusing.request = pb.Answer.FromString(message).request
        return framed(refusing.SerializeToString())

    return answer


def closed(_message: bytes, _payload: bytes, _ended: threading.Event) -> bytes:
    return b""


def silent(_message: bytes, _payload: bytes, ended: threading.Event) -> bytes:
    ended.wait(100)
    return b""


class Misbehaving:
    """An endpoint whose answers to requests for batches follow a script, then are honest."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.num_fetches = 0
        self._ended = threading.Event()
        self._listener = Listener(self._serve)
        self._threads = ThreadPoolExecutor(8)
        self._server = grpc.server(
            self._threads,
            [
                grpc.method_handlers_generic_handler(
                    "hetero.v1.Data",
                    {
                        "Prepare": grpc.unary_unary_rpc_method_handler(self._prepare),
                        "Attend": grpc.unary_stream_rpc_method_handler(self._attend),
                    },
                )
            ],
            options=channels.server_options(),
        )
        self.port = channels.bind(self._server, "127.0.0.1")
        self._server.start()

    def _prepare(self, _request: bytes, _context: grpc.ServicerContext) -> bytes:
        return pb.PrepareReply(num_samples=100, fingerprint="f").SerializeToString()

    def _attend(self, _request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        reply = pb.AttendReply(port=self._listener.place[1], ticket=bytes(SESSION_TOKEN_BYTES))
        yield reply.SerializeToString()
        ended.wait(100)

    def _serve(self, connection: socket.socket) -> None:
        hello = connection.recv(38, socket.MSG_WAITALL)
        assert hello in (
            b"",
            GREETING + bytes(SESSION_TOKEN_BYTES),
        )  # a link that ends may send nothing
        while prefix := connection.recv(4, socket.MSG_WAITALL):
            request = connection.recv(*struct.unpack("<I", prefix), socket.MSG_WAITALL)
            self.num_fetches += 1
            asked = pb.FetchRequest.FromString(request)
            encoded = EncodedBatch(
                {"index": np.frombuffer(asked.indices, np.int64), "zeros": np.zeros(1000)}, request=request
            )
            if name := compression_from_proto(asked.compression):
                encoded.compress(name)
            message, payload = encoded.message, b"".join(encoded.payload)
            answer = (self.answers.pop(0) if self.answers else honest)(message, payload, self._ended)
            connection.sendall(answer)
            if len(answer) < len(framed(message, payload)):
                return

    def stop(self) -> None:
        self._ended.set()
        self._listener.stop()
        self._server.stop(0).wait()
        self._threads.shutdown()


@pytest.fixture
def read(tools: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that reads three batches from an endpoint with scripted answers."""
    opened: list[Any] = []

    def read(
        answers: list[Answer], *, compression: str | None = None, **options: Any
    ) -> tuple[Fleet, Misbehaving, Reader]:
        endpoint = Misbehaving(answers)
        record = EndpointRecord(
            endpoint_id="algo-1/0", host="algo-1", address=f"127.0.0.1:{endpoint.port}", incarnation="a"
        )
        fleet = Fleet(Directory([record]), None, job_id="x", **{"data_timeout_s": 30.0, **options})
        opened.extend([endpoint.stop, fleet.close])
        wanted = [replace(request, compression=compression) for request in tools.requests(tools.spec(), num_batches=3)]
        return fleet, endpoint, Reader(fleet, iter(wanted))

    yield read
    for close in reversed(opened):
        close()


@pytest.mark.parametrize("fault", [damaged, nonsense, too_long, bomb])
@pytest.mark.fault("F22")
def test_damaged_answer_is_asked_for_again(read: Callable[..., Any], tools: Any, fault: Answer) -> None:
    fleet, endpoint, reader = read([fault, fault])
    expected = [request.work.indices.tolist() for request in tools.requests(tools.spec(), num_batches=3)]
    assert [batch["index"].tolist() for batch in reader] == expected
    assert endpoint.num_fetches == 5
    assert fleet.stats.retries == 2
    assert fleet.stats.checksum_errors == (2 if fault is damaged else 0)


@pytest.mark.parametrize("name", COMPRESSIONS)
@pytest.mark.fault("F22")
def test_damaged_compressed_answer_is_asked_for_again(read: Callable[..., Any], name: str) -> None:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    fleet, endpoint, reader = read([damaged, damaged], compression=name)
    assert [batch["zeros"].any() for batch in reader] == [False] * 3
    assert fleet.stats.saved_bytes > 3 * 7000
    assert (endpoint.num_fetches, fleet.stats.retries, fleet.stats.checksum_errors) == (5, 2, 2)


@pytest.mark.fault("F22")
def test_batch_damaged_three_times_names_the_peer(read: Callable[..., Any]) -> None:
    _, _, reader = read([damaged] * 30)
    with pytest.raises(ProtocolError, match=r"damaged 3 times, last from algo-1/0") as caught:
        list(reader)
    assert caught.value.exit_code is ExitCode.CORRUPTION


@pytest.mark.parametrize("answer", [closed, truncated, refused(Fault.BUSY), refused(Fault.UNPREPARED)])
@pytest.mark.fault("F21")
def test_passing_trouble_is_waited_out(read: Callable[..., Any], answer: Answer) -> None:
    fleet, _, reader = read([answer] * 4)  # an attempt takes two if the first was on a connection used before
    assert len(list(reader)) == 3
    assert fleet.stats.retries >= 2


@pytest.mark.parametrize("answer", [closed, truncated])
def test_unreachable_but_alive_is_no_death(
    read: Callable[..., Any], answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.reader.connection.backoff_s", lambda _: 0.05)
    fleet, _, reader = read([answer] * 16)
    assert len(list(reader)) == 3
    assert fleet.stats.failovers >= 8


@pytest.mark.parametrize("answer", [closed, truncated])
def test_endpoint_that_prepares_but_never_delivers_is_an_error_in_time(
    read: Callable[..., Any], answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.reader.connection.backoff_s", lambda _: 0.05)  # it is never away for long
    fleet, _, reader = read([answer] * 10_000, data_timeout_s=1.0)
    with pytest.raises(EndpointUnavailableError, match=r"algo-1/0 \(.*the connection failed(:| during the answer:) "):
        list(reader)
    assert fleet.stats.endpoint_losses >= 3


def test_internal_error_three_times_is_raised(read: Callable[..., Any]) -> None:
    _, _, reader = read([refused(Fault.BROKEN)] * 30)
    with pytest.raises(DataPlaneError, match="algo-1/0 .* failed: on purpose"):
        list(reader)


def test_rejected_request_is_raised_at_once(read: Callable[..., Any]) -> None:
    _, endpoint, reader = read([refused(Fault.MALFORMED)] * 30)
    with pytest.raises(ProtocolError, match="rejects the request: on purpose"):
        list(reader)
    assert endpoint.num_fetches <= 3  # each of the three batches at most once: all may be under way


def test_batch_that_never_comes_is_a_timeout(read: Callable[..., Any]) -> None:
    _, _, reader = read([silent] * 30, data_timeout_s=0.3)
    with pytest.raises(BatchTimeoutError, match="no batch arrived within 0.3 s in 3 attempts, last from algo-1/0"):
        list(reader)


def test_closing_cancels_calls_in_progress(read: Callable[..., Any]) -> None:
    _, endpoint, reader = read([silent] * 30)
    while endpoint.num_fetches == 0:
        pass
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-fetcher")]
