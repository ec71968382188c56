"""What an endpoint says to unauthenticated peers, to clients that misbehave, and to probes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.control.security import Token, call_metadata
from hetero.endpoint.service import DATA_POLICIES
from hetero.reader.reader import Reader
from hetero.wire import channels
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import GREETING, PROTOCOL, SESSION_TOKEN_BYTES
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.transports.interface import Connection
from tests.support.wire.ends import connect

import grpc  # isort: skip

JOB = "test-job"
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Data"].methods]


@pytest.fixture
def address(job: Any) -> str:
    return str(job.pool().records[0].address)


def reader_metadata(job: Any) -> tuple[tuple[str, str], ...]:
    """Return what the calls of a reader carry to the only endpoint."""
    return call_metadata(job.token, JOB, incarnation=job.pools[0].records[0].incarnation)


def call(address: str, method: str, request: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = channel.unary_stream(method, None, None)
        return b"".join(stub(request, metadata=metadata, timeout=100))


def status(address: str, method: str, request: bytes, metadata: tuple[tuple[str, str], ...]) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(address, method, request, metadata)
    return caught.value.code(), channels.short_details(caught.value)


@pytest.mark.attack("A1")
def test_every_method_demands_the_token(address: str) -> None:
    assert {f"/hetero.v1.Data/{method}" for method in METHODS} == set(DATA_POLICIES)
    for method in METHODS:
        for metadata in ((), call_metadata(Token.generate(), JOB)):
            found, _ = status(address, f"/hetero.v1.Data/{method}", b"", metadata)
            assert found is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.attack("A2")
@pytest.mark.parametrize(
    "method",
    [
        "/hetero.v1.Data/Shutdown",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
    ],
)
def test_unknown_methods_are_refused_even_with_the_token(job: Any, address: str, method: str) -> None:
    found, _ = status(address, method, b"", reader_metadata(job))
    assert found is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.attack("A3")
@pytest.mark.attack("A8")
def test_requests_that_break_the_protocol_are_refused_and_harm_nothing(job: Any, tools: Any, address: str) -> None:
    good = reader_metadata(job)
    canary = Path(job.path / "canary")
    bad: list[tuple[str, bytes, Any]] = [
        ("Prepare", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("Prepare", b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.", grpc.StatusCode.INVALID_ARGUMENT),
        ("Attend", pb.AttendRequest(protocol=PROTOCOL + 1).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "Prepare",
            pb.PrepareRequest(
                protocol=PROTOCOL, dataset=pb.DatasetSpec(name="", arguments_json="{}")
            ).SerializeToString(),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        ("Prepare", b"\x12" * 2**21, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ]
    for method, request, expected in bad:
        found, details = status(address, f"/hetero.v1.Data/{method}", request, good)
        assert found is expected, (method, request[:40], details)
        assert "Traceback" not in details
    assert not canary.exists()
    assert job.fleet().describe(tools.spec()).num_samples == 100


@contextlib.contextmanager
def attended(job: Any, address: str) -> Iterator[tuple[tuple[str, int], bytes]]:
    """Attend an endpoint. Yield the address for batches and the session token."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_stream("/hetero.v1.Data/Attend", None, None)(
            pb.AttendRequest(protocol=PROTOCOL).SerializeToString(), metadata=reader_metadata(job), timeout=60
        )
        reply = pb.AttendReply.FromString(next(call))
        yield (address.rpartition(":")[0], reply.port), reply.ticket
        call.cancel()


def ask(stream: Connection, request: bytes) -> None:
    """Send a request and raise what the answer says."""
    stream.send(request)
    answer = stream.receive_message(2**21)
    assert answer is not None
    BatchDecoder(request=request).take_message(answer)


@pytest.mark.attack("A3")
@pytest.mark.attack("A8")
@pytest.mark.attack("A12")
def test_batch_requests_that_break_the_protocol_are_refused_and_harm_nothing(
    job: Any, tools: Any, address: str
) -> None:
    spec = pb.DatasetSpec(name="numbers", arguments_json="{}")
    canary = Path(job.path / "canary")
    too_many = pb.FetchRequest(protocol=PROTOCOL, dataset=spec, indices=bytes(8 * (2**20 + 1)), collate=True)
    unprepared = pb.FetchRequest(protocol=PROTOCOL, dataset=spec, indices=(1).to_bytes(8, "little"), collate=True)
    bad: list[tuple[bytes, Fault]] = [
        (b"", Fault.MALFORMED),
        (b"\xff\xff\xff", Fault.MALFORMED),
        (b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.", Fault.MALFORMED),
        (pb.FetchRequest(protocol=PROTOCOL + 1).SerializeToString(), Fault.MALFORMED),
        (pb.FetchRequest(protocol=PROTOCOL).SerializeToString(), Fault.MALFORMED),
        (unprepared.SerializeToString(), Fault.UNPREPARED),
        (too_many.SerializeToString(), Fault.MALFORMED),
        (b"\x12" * 2**20, Fault.MALFORMED),
    ]
    with attended(job, address) as (place, session_token), contextlib.closing(connect(*place)) as stream:
        stream.send_raw(GREETING + session_token)
        for request, expected in bad:
            with pytest.raises(CallFailedError) as caught:
                ask(stream, request)
            assert caught.value.fault is expected, request[:40]
            assert "Traceback" not in caught.value.details
        stream.send_raw(b"\xff\xff\xff\x7f")  # announces a request of 2 GiB
        answer = stream.receive_message(2**21)
        assert answer is not None
        with pytest.raises(CallFailedError, match="2147483647 bytes is announced, at most"):
            BatchDecoder().take_message(answer)
        assert stream.receive_message(1) is None
    assert not canary.exists()
    assert job.fleet().describe(tools.spec()).num_samples == 100


@pytest.mark.parametrize("implementation", ["python", "upb"])
def test_text_that_is_not_utf8_is_refused_by_every_protobuf(
    job: Any, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    monkeypatch.setenv("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", implementation)
    address = job.pool().records[0].address
    spec = pb.DatasetSpec(name="numbers", arguments_json="{}")
    prepare = pb.PrepareRequest(protocol=PROTOCOL, dataset=spec).SerializeToString().replace(b"num", b"\xff\xfe\xfd")
    fetch = pb.FetchRequest(protocol=PROTOCOL, dataset=spec, indices=(1).to_bytes(8, "little")).SerializeToString()
    found, _ = status(address, "/hetero.v1.Data/Prepare", prepare, reader_metadata(job))
    assert found is grpc.StatusCode.INVALID_ARGUMENT
    with attended(job, address) as (place, session_token), contextlib.closing(connect(*place)) as stream:
        stream.send_raw(GREETING + session_token)
        with pytest.raises(CallFailedError) as caught:
            ask(stream, fetch.replace(b"num", b"\xff\xfe\xfd"))
        assert caught.value.fault is Fault.MALFORMED
    assert not any("internal error" in line for line in job.lines)


@pytest.mark.attack("A1")
def test_connections_without_a_valid_session_token_are_closed_without_a_word(job: Any, address: str) -> None:
    with attended(job, address) as (place, session_token):
        for hello in (
            GREETING + bytes(SESSION_TOKEN_BYTES),
            GREETING + session_token[:-1] + bytes([session_token[-1] ^ 1]),
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(40),
            b"h\0",
        ):
            with contextlib.closing(connect(*place)) as stream:
                stream.send_raw(hello)
                # The connection is reset if it had sent more than was read.
                with contextlib.suppress(ConnectionResetError):
                    assert stream.receive_message(2**21) is None
        with contextlib.closing(connect(*place)) as stream:
            for piece in (GREETING[:3], GREETING[3:], session_token[:5], session_token[5:]):
                stream.send_raw(piece)
            with pytest.raises(CallFailedError):
                ask(stream, b"")
    with contextlib.closing(connect(*place)) as stream:  # the attendance has ended
        stream.send_raw(GREETING + session_token)
        assert stream.receive_message(2**21) is None


@pytest.mark.attack("A9")
def test_unauthenticated_peers_that_say_nothing_do_not_keep_others_out(job: Any, tools: Any, address: str) -> None:
    with attended(job, address) as (place, _session_token), contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(contextlib.closing(socket.create_connection(place)))
        wanted = tools.requests(tools.spec(), num_batches=3)
        with Reader(job.fleet(), iter(wanted)) as reader:
            assert len(list(reader)) == 3


def test_end_of_attendance_ends_its_connections(job: Any, address: str) -> None:
    with attended(job, address) as (place, session_token):
        stream = connect(*place)
        stream.send_raw(GREETING + session_token)
        with pytest.raises(CallFailedError):
            ask(stream, b"")
    assert stream.receive_message(2**21) is None
    stream.close()


def test_torch_data_sets_travel_as_tensors(job: Any, tools: Any) -> None:
    torch = pytest.importorskip("torch")
    script = job.path / "with_torch.py"
    script.write_text(
        "import torch\n"
        "import hetero\n"
        "class Squares(torch.utils.data.Dataset):\n"
        "    def __len__(self):\n"
        "        return 100\n"
        "    def __getitem__(self, index):\n"
        "        info = torch.utils.data.get_worker_info()\n"
        "        assert (info.num_workers, torch.get_num_threads()) == (2, 1)\n"
        "        return torch.rand(3), index * index\n"
        "@hetero.dataset\n"
        "def squares():\n"
        "    return Squares()\n"
    )
    job.pool(script=str(script), num_endpoints=2)
    wanted = tools.requests(tools.spec("squares"), num_batches=6)
    with Reader(job.fleet(), iter(wanted)) as reader:
        found = list(reader)
    for request, (noise, squares) in zip(wanted, found, strict=True):
        assert noise.shape == (4, 3)
        assert squares.dtype is torch.int64
        assert squares.tolist() == [index * index for index in request.work.indices.tolist()]
    assert not any("fresh" in line for line in job.lines)
