"""What an endpoint says to strangers, to clients that misbehave, and to probes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero.control.security import Token, call_metadata
from hetero.dataplane.service import DATA_POLICIES
from hetero.wire import channels
from hetero.wire.limits import PROTOCOL
from hetero.wire.proto import data_pb2 as pb

import grpc  # isort: skip

JOB = "test-job"
METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Data"].methods]


@pytest.fixture
def address(job: Any) -> str:
    return str(job.pool().records[0].address)


def call(address: str, method: str, request: bytes, metadata: tuple[tuple[str, str], ...] = ()) -> bytes:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = channel.unary_stream(method, None, None)
        return b"".join(stub(request, metadata=metadata, timeout=20))


def status(address: str, method: str, request: bytes, metadata: tuple[tuple[str, str], ...]) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(address, method, request, metadata)
    return caught.value.code(), channels.short_details(caught.value)


def test_every_method_demands_the_token(address: str) -> None:
    assert {f"/hetero.v1.Data/{method}" for method in METHODS} == set(DATA_POLICIES)
    for method in METHODS:
        for metadata in ((), call_metadata(Token.generate(), JOB)):
            found, _ = status(address, f"/hetero.v1.Data/{method}", b"", metadata)
            assert found is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "method",
    [
        "/hetero.v1.Data/Shutdown",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        "/grpc.channelz.v1.Channelz/GetServers",
    ],
)
def test_unknown_methods_are_refused_even_with_the_token(job: Any, address: str, method: str) -> None:
    found, _ = status(address, method, b"", call_metadata(job.token, JOB))
    assert found is grpc.StatusCode.UNAUTHENTICATED


def test_requests_that_break_the_protocol_are_refused_and_harm_nothing(job: Any, tools: Any, address: str) -> None:
    good = call_metadata(job.token, JOB)
    spec = pb.DatasetSpec(name="numbers", arguments_json="{}")
    canary = Path(job.path / "canary")
    describe = pb.DescribeRequest(protocol=PROTOCOL, dataset=spec)
    too_many = pb.FetchRequest(protocol=PROTOCOL, dataset=spec, indices=[1] * 100_000, collate=True)
    bad: list[tuple[str, bytes, Any]] = [
        ("Fetch", b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
        ("Fetch", b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.", grpc.StatusCode.INVALID_ARGUMENT),
        ("Fetch", pb.FetchRequest(protocol=PROTOCOL + 1).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        ("Fetch", pb.FetchRequest(protocol=PROTOCOL).SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        (
            "Fetch",
            pb.FetchRequest(protocol=PROTOCOL, dataset=spec, indices=[1], collate=True).SerializeToString(),
            grpc.StatusCode.NOT_FOUND,
        ),
        (
            "Prepare",
            pb.PrepareRequest(
                protocol=PROTOCOL, dataset=pb.DatasetSpec(name="", arguments_json="{}")
            ).SerializeToString(),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        ("Describe", describe.SerializeToString(), grpc.StatusCode.NOT_FOUND),
        ("Fetch", too_many.SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT),
        ("Fetch", b"\x12" * 2**21, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ]
    for method, request, expected in bad:
        found, details = status(address, f"/hetero.v1.Data/{method}", request, good)
        assert found is expected, (method, request[:40], details)
        assert "Traceback" not in details
    assert not canary.exists()
    assert job.fleet().describe(tools.spec()).num_samples == 100


def test_health_is_open_and_says_serving(address: str) -> None:
    def named(name: bytes) -> bytes:
        return b"\x0a" + bytes([len(name)]) + name

    assert call(address, "/grpc.health.v1.Health/Check", b"") == b"\x08\x01"
    assert call(address, "/grpc.health.v1.Health/Check", named(b"hetero.data")) == b"\x08\x01"
    found, _ = status(address, "/grpc.health.v1.Health/Check", named(b"other"), ())
    assert found is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", None, None)
        watches = [watch(b"", timeout=20) for _ in range(4)]
        assert [next(answers) for answers in watches] == [b"\x08\x01"] * 4
        with pytest.raises(grpc.RpcError) as caught:
            next(watch(b"", timeout=20))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for answers in watches:
            answers.cancel()


def test_torch_data_sets_travel_as_tensors(job: Any, tools: Any) -> None:
    torch = pytest.importorskip("torch")
    from hetero.dataplane.reader import Reader

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
        assert squares.tolist() == [index * index for index in request.indices.tolist()]
    assert not any("fresh" in line for line in job.lines)
