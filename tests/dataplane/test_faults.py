"""Answers that are late, damaged, refused or cut short, from an endpoint in this process that misbehaves on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hetero.control.directory import Directory, EndpointRecord
from hetero.dataplane.fleet import Fleet
from hetero.dataplane.reader import Reader
from hetero.errors import BatchTimeoutError, DataPlaneError, ExitCode, ProtocolError
from hetero.wire import channels
from hetero.wire.framing import EncodedBatch
from hetero.wire.proto import data_pb2 as pb

import grpc  # isort: skip

Answer = Callable[[list[bytes], grpc.ServicerContext], Iterator[bytes]]


def honest(frames: list[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from frames


def damaged(frames: list[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from frames[:-1]
    yield frames[-1][:-1] + bytes([frames[-1][-1] ^ 1])


def truncated(frames: list[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield from frames[:-1]


def nonsense(_frames: list[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
    yield b"\x80\x04\x95 a pickle"


def aborted(code: grpc.StatusCode) -> Answer:
    def answer(frames: list[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        yield frames[0]
        context.abort(code, "on purpose")

    return answer


def silent(_frames: list[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
    ended = threading.Event()
    context.add_callback(ended.set)
    ended.wait(30)
    yield b""


class Misbehaving:
    """An endpoint whose answers to Fetch follow a script, then are honest."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.num_fetches = 0
        self._server = grpc.server(
            ThreadPoolExecutor(8),
            [
                grpc.method_handlers_generic_handler(
                    "hetero.v1.Data",
                    {
                        "Prepare": grpc.unary_unary_rpc_method_handler(self._prepare),
                        "Describe": grpc.unary_unary_rpc_method_handler(self._describe),
                        "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
                    },
                )
            ],
            options=channels.server_options(),
        )
        self.port = channels.bind(self._server, "127.0.0.1")
        self._server.start()

    def _prepare(self, _request: bytes, _context: grpc.ServicerContext) -> bytes:
        return pb.PrepareReply(num_slots=1).SerializeToString()

    def _describe(self, _request: bytes, _context: grpc.ServicerContext) -> bytes:
        return pb.DescribeReply(num_samples=100, fingerprint="f").SerializeToString()

    def _fetch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        self.num_fetches += 1
        indices = np.array(pb.FetchRequest.FromString(request).indices)
        answer = self.answers.pop(0) if self.answers else honest
        yield from answer(list(EncodedBatch({"index": indices}).frames()), context)

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def read(tools: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that reads three batches from an endpoint with scripted answers."""
    opened: list[Any] = []

    def read(answers: list[Answer], **options: Any) -> tuple[Fleet, Misbehaving, Reader]:
        endpoint = Misbehaving(answers)
        record = EndpointRecord(
            endpoint_id="algo-1/0", host="algo-1", address=f"127.0.0.1:{endpoint.port}", incarnation="a"
        )
        fleet = Fleet(Directory([record]), None, job_id="x", **{"data_timeout_s": 30.0, **options})
        opened.extend([endpoint.stop, fleet.close])
        return fleet, endpoint, Reader(fleet, iter(tools.requests(tools.spec(), num_batches=3)))

    yield read
    for close in reversed(opened):
        close()


@pytest.mark.parametrize("fault", [damaged, truncated, nonsense])
def test_damaged_answer_is_asked_for_again(read: Callable[..., Any], tools: Any, fault: Answer) -> None:
    fleet, endpoint, reader = read([fault, fault])
    expected = [request.indices.tolist() for request in tools.requests(tools.spec(), num_batches=3)]
    assert [batch["index"].tolist() for batch in reader] == expected
    assert endpoint.num_fetches == 5
    assert fleet.stats.retries == 2
    assert fleet.stats.checksum_errors == (2 if fault is damaged else 0)


def test_batch_damaged_three_times_names_the_peer(read: Callable[..., Any]) -> None:
    _, _, reader = read([damaged] * 30)
    with pytest.raises(ProtocolError, match=r"damaged 3 times, last from algo-1/0") as caught:
        list(reader)
    assert caught.value.exit_code is ExitCode.CORRUPTION


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND]
)
def test_passing_trouble_is_waited_out(read: Callable[..., Any], code: grpc.StatusCode) -> None:
    fleet, _, reader = read([aborted(code)] * 2)
    assert len(list(reader)) == 3
    assert fleet.stats.retries >= 2  # closing a failed connection takes the other call on it along


def test_unreachable_but_alive_is_no_death(read: Callable[..., Any]) -> None:
    fleet, _, reader = read([aborted(grpc.StatusCode.UNAVAILABLE)] * 8)
    assert len(list(reader)) == 3
    assert fleet.stats.failovers >= 8


def test_internal_error_three_times_is_raised(read: Callable[..., Any]) -> None:
    _, _, reader = read([aborted(grpc.StatusCode.INTERNAL)] * 30)
    with pytest.raises(DataPlaneError, match="algo-1/0 .* failed: on purpose"):
        list(reader)


def test_rejected_request_is_raised_at_once(read: Callable[..., Any]) -> None:
    _, endpoint, reader = read([aborted(grpc.StatusCode.INVALID_ARGUMENT)] * 30)
    with pytest.raises(ProtocolError, match="rejects the request: on purpose"):
        list(reader)
    assert endpoint.num_fetches <= 2


def test_batch_that_never_comes_is_a_timeout(read: Callable[..., Any]) -> None:
    _, _, reader = read([silent] * 30, data_timeout_s=0.3)
    with pytest.raises(BatchTimeoutError, match="3 times no batch within 0.3 s, last from algo-1/0"):
        list(reader)


def test_closing_cancels_calls_in_progress(read: Callable[..., Any]) -> None:
    _, endpoint, reader = read([silent] * 30)
    while endpoint.num_fetches == 0:
        pass
    reader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-lane")]
