"""Mutated frames over real connections: to an endpoint, and to a reader."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero.control.members.directory import EndpointRecord
from hetero.control.security import proof_of_rank
from hetero.endpoint.link import EndpointLink
from hetero.errors import DatasetError, ProtocolError
from hetero.wire.faults import CallFailedError
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import GREETING, PROTOCOL, SESSION_TOKEN_BYTES, Limits
from hetero.wire.proto import control_pb2
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.transports.interface import Connection
from hetero.wire.transports.sockets import SocketConnection
from tests.support.attacks import servers
from tests.support.batch_path.deliveries import num_descriptors
from tests.support.fuzz.seeds import BATCHES, answer, seeds
from tests.support.waiting import wait_for
from tests.support.wire.damage import mutate
from tests.support.wire.ends import connect

import grpc  # isort: skip

pytestmark = [pytest.mark.integration, pytest.mark.attack("A7")]

REQUEST = pb.FetchRequest(
    protocol=PROTOCOL,
    dataset=pb.DatasetSpec(name="photos", arguments_json="{}"),
    indices=np.array([1, 2, 3]).tobytes(),
    occurrences=np.array([0, 1, 2], np.uint32).tobytes(),
    collate=True,
    seed=17,
    compression=pb.ZSTD,
).SerializeToString()
CONTROL_SEEDS = {
    "/hetero.v1.Control/Heartbeat": [data[1:] for data in seeds() if data[0] == 6],
    "/hetero.v1.Control/Join": [
        control_pb2.JoinRequest(
            protocol=1,
            host=control_pb2.JoinedHost(
                host="new", address="10.0.0.9:17170", group="data", instance_type="ml.c5.xlarge"
            ),
            version="1",
            script_digest="d",
            options={"data plane protocol": "1"},
        ).SerializeToString()
    ],
}
RANK_SEEDS = [
    control_pb2.RankRequest(register=control_pb2.RegisterRequest(rank=1, world_size=2)).SerializeToString(),
    *(
        control_pb2.RankRequest(report=control_pb2.RankReport.FromString(data[1:])).SerializeToString()
        for data in seeds()
        if data[0] == 7
    ),
]


def threads() -> int:
    return threading.active_count()


@pytest.mark.parametrize("num_calls", [500, pytest.param(15_000, marks=pytest.mark.long)])
def test_endpoint_survives_mutated_calls(tmp_path: Path, caplog: pytest.LogCaptureFixture, num_calls: int) -> None:
    rng = random.Random(5)
    given = [data[2:] for data in seeds() if data[0] == 8]
    codes: Counter[object] = Counter()
    texts: set[str] = set()
    with servers.endpoint(tmp_path) as server:
        metadata = server.metadata
        for _ in range(num_calls):
            try:
                server.call("/hetero.v1.Data/Prepare", metadata, request=mutate(rng.choice(given), rng))
                codes["answered"] += 1  # the data set is unknown
            except grpc.RpcError as error:
                codes[error.code()] += 1
                texts.add(error.details() or "")
    # Nothing unexpected, and both sides of the parser were seen.
    assert set(codes) == {"answered", grpc.StatusCode.INVALID_ARGUMENT}
    assert min(codes.values()) > num_calls / 150
    assert not any("Traceback" in text for text in texts)
    assert "internal error" not in caplog.text


@pytest.mark.parametrize("num_calls", [500, pytest.param(15_000, marks=pytest.mark.long)])
def test_launcher_survives_mutated_calls(caplog: pytest.LogCaptureFixture, num_calls: int) -> None:
    rng = random.Random(6)
    codes: Counter[object] = Counter()
    texts: set[str] = set()
    with servers.launcher() as server:
        metadata = server.metadata
        for _ in range(num_calls):
            method = rng.choice(sorted(CONTROL_SEEDS))
            try:
                server.call(method, metadata, request=mutate(rng.choice(CONTROL_SEEDS[method]), rng))
                codes["accepted"] += 1
            except grpc.RpcError as error:
                codes[error.code()] += 1
                texts.add(error.details() or "")
        heartbeat = "/hetero.v1.Control/Heartbeat"
        assert server.call(heartbeat, metadata, request=CONTROL_SEEDS[heartbeat][0])
    # A heartbeat with another name is one of a stranger.
    assert set(codes) == {"accepted", grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert min(codes["accepted"], codes[grpc.StatusCode.INVALID_ARGUMENT]) > num_calls / 15
    assert not any("Traceback" in text for text in texts)


@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_launcher_survives_mutated_requests_of_ranks(caplog: pytest.LogCaptureFixture, num_requests: int) -> None:
    rng = random.Random(8)
    outcomes: Counter[str] = Counter()
    with servers.launcher() as server:
        hello = GREETING + proof_of_rank(server.token, servers.JOB)
        for _ in range(num_requests):
            with contextlib.closing(connect("127.0.0.1", server.running.rank_port)) as stream:
                stream.send_raw(hello)
                stream.send(mutate(rng.choice(RANK_SEEDS), rng))
                # A mutated request may be one to watch, whose connection stays open.
                stream.send(RANK_SEEDS[0])
                try:
                    outcomes["ended" if stream.receive_message(2**20) is None else "answered"] += 1
                except ConnectionResetError:
                    outcomes["ended"] += 1
        wait_for(lambda: not server.running._ranks._connections)
    assert min(outcomes["answered"], outcomes["ended"]) > num_requests / 15
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("num_connections", [600, pytest.param(30_000, marks=pytest.mark.long)])
def test_endpoint_survives_mutated_greetings_and_requests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_connections: int
) -> None:
    rng = random.Random(7)
    whole = struct.pack("<I", len(REQUEST)) + REQUEST
    with servers.endpoint(tmp_path) as server, servers.attended(server) as session_token:
        place = ("127.0.0.1", server.batch_port)
        before = threads(), num_descriptors()
        for number in range(num_connections):
            greeting = GREETING + session_token
            said = mutate(greeting, rng) + whole if number % 3 == 0 else greeting + mutate(whole, rng)
            with socket.create_connection(place, 20.0) as connection, contextlib.suppress(OSError):
                connection.sendall(said)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65_536):
                    pass
        wait_for(lambda: threads() <= before[0] + 2)
        wait_for(lambda: num_descriptors() <= before[1] + 4)
        with contextlib.closing(connect(*place)) as stream:
            stream.send_raw(GREETING + session_token)
            stream.send(REQUEST)
            message = stream.receive_message(2**20)
        assert message is not None
        assert pb.Answer.FromString(message).refusal.reason == pb.Refusal.UNPREPARED
        wait_for(lambda: server.running._service.delivery._num_busy == 0)
    assert "internal error" not in caplog.text


class Liar:
    """The real service for `Attend`. Batches come from here, mutated."""

    def __init__(self, server: servers.Server) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._server = server
        server.running._service.delivery.port = self._listener.getsockname()[1]
        self.next: bytes = b""
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # The first connection is made in advance, and waits for its request.
            threading.Thread(target=self._answer, args=(SocketConnection(connection),), daemon=True).start()

    def _answer(self, stream: Connection) -> None:
        with contextlib.closing(stream), contextlib.suppress(OSError, ProtocolError):
            stream.receive_into(memoryview(bytearray(len(GREETING) + SESSION_TOKEN_BYTES)))
            if stream.receive_message(2**20) is not None:
                stream.send_raw(self.next)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(100)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_reader_survives_mutated_answers(tmp_path: Path, compression: str | None) -> None:
    if compression is not None:
        pytest.importorskip({"lz4": "lz4.block", "zstd": "zstandard"}[compression])
    rng = random.Random(8)
    given = [answer(batch, compression) for batch in BATCHES]
    limits = Limits(max_batch_bytes=2**16)
    outcomes: Counter[str] = Counter()
    largest = 0

    def allocate(nbytes: int) -> memoryview:
        nonlocal largest
        largest = max(largest, nbytes)
        return memoryview(bytearray(nbytes))

    def fetch(link: EndpointLink) -> Any:
        decoder = BatchDecoder(limits, allocate=allocate, compression=compression)
        link.fetch(b"request", decoder, timeout_s=20.0, on_call=lambda call: None)
        return decoder.result()

    with (
        servers.endpoint(tmp_path) as server,
        contextlib.closing(Liar(server)) as liar,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("hetero.wire.framing._allocate", allocate)
        record = EndpointRecord(endpoint_id="a/0", host="a", address=server.address, incarnation="first")
        metadata = server.metadata
        with contextlib.closing(EndpointLink(record, metadata, limits)) as link:
            link.attend()
            for _ in range(700):
                liar.next = mutate(rng.choice(given), rng)
                try:
                    fetch(link)
                    outcomes["batch"] += 1
                except (ProtocolError, DatasetError, CallFailedError) as error:
                    outcomes[type(error).__name__] += 1
            liar.next = given[0]
            assert fetch(link)["scalar"] == 2
            assert len(link._connections) <= 1
    assert largest <= limits.max_batch_bytes
    assert outcomes["ProtocolError"] + outcomes["ChecksumError"] > 150
    assert outcomes["CallFailedError"] > 20
