"""Useless connections cost few threads and descriptors, and not for long. Readers are served meanwhile."""

from __future__ import annotations

import contextlib
import resource
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero.control.members.directory import EndpointRecord
from hetero.endpoint.endpoint import allow_descriptors
from hetero.endpoint.link import EndpointLink
from hetero.wire import channels
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.framing import BatchDecoder
from hetero.wire.limits import GREETING, PROTOCOL, Limits
from hetero.wire.proto import data_pb2 as pb
from hetero.wire.transports import greeter
from tests.support.attacks import http2, servers
from tests.support.attacks.servers import Server
from tests.support.attacks.unauthenticated_peers import KINDS, UnauthenticatedPeers
from tests.support.batch_path.deliveries import num_descriptors
from tests.support.waiting import wait_for

import grpc  # isort: skip

pytestmark = [pytest.mark.integration, pytest.mark.attack("A9")]

NUM = 500


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An endpoint that gives unauthenticated peers less time than users' do."""
    monkeypatch.setattr(channels, "HANDSHAKE_MS", 2_000)
    monkeypatch.setattr(channels, "MAX_IDLE_MS", 2_000)
    monkeypatch.setattr(greeter, "CONNECT_TIMEOUT_S", 2.0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_descriptors()  # as endpoints do, and both ends of every connection are in this process
    with servers.endpoint(tmp_path) as server:
        yield server
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_served(server: Server) -> bool:
    """Tell whether a reader comes through both ports: here, to hear that the data set is not built."""
    record = EndpointRecord(endpoint_id="a/0", host="a", address=server.address, incarnation="first")
    metadata = server.metadata
    message = pb.FetchRequest(
        protocol=PROTOCOL,
        dataset=pb.DatasetSpec(name="photos", arguments_json="{}"),
        indices=(1).to_bytes(8, "little"),
        collate=True,
    )
    request = message.SerializeToString()
    with contextlib.closing(EndpointLink(record, metadata, Limits())) as link:
        try:
            link.attend()
            link.fetch(request, BatchDecoder(request=request), timeout_s=20.0, on_call=lambda call: None)
        except CallFailedError as error:
            return error.fault is Fault.UNPREPARED
    return False


def test_idle_connections_are_closed_and_readers_served_meanwhile(endpoint: Server) -> None:
    assert is_served(endpoint)
    threads, before = threading.active_count(), num_descriptors()
    with UnauthenticatedPeers(endpoint.place, ("127.0.0.1", endpoint.batch_port), NUM) as peers:
        assert len(peers.connections) == NUM
        # gRPC drops some calls of any peer while more than a thousand wait to be looked at: readers ask again.
        wait_for(lambda: is_served(endpoint), 5.0)
        # Ours are among them: each connection has an end here, too.
        assert num_descriptors() - before <= 2 * NUM + 64
        assert len(endpoint.running._service.delivery.greeter._peers) <= greeter._MAX_PEERS
        # Few threads refuse calls. No connection has a separate one.
        assert threading.active_count() - threads <= 16
        # Peers that answer gRPC's pings make no calls, and are closed for that. The others answer none.
        wait_for(lambda: not peers.living())
        assert is_served(endpoint)
        assert num_descriptors() - before <= NUM + 64
    wait_for(lambda: num_descriptors() - before <= 16)


def test_connection_that_answers_pings_but_calls_nothing_is_closed(endpoint: Server) -> None:
    with contextlib.closing(http2.opened(endpoint.place)) as connection:
        deadline_s = time.monotonic() + 30.0
        received = b""
        connection.settimeout(0.2)
        while time.monotonic() < deadline_s:
            try:
                data = connection.recv(65_536)
            except TimeoutError:
                continue
            if not data:
                break
            received += data
            for at in [at for at in range(len(data) - 8) if data[at : at + 5] == b"\0\0\x08\x06\0"]:
                connection.sendall(http2.frame(http2.PING, 1, 0, data[at + 9 : at + 17]))
        assert http2.GOAWAY in http2.kinds(received)
        assert time.monotonic() < deadline_s


def test_reader_that_watches_or_attends_is_never_idle(endpoint: Server) -> None:
    record = EndpointRecord(endpoint_id="a/0", host="a", address=endpoint.address, incarnation="first")
    metadata = endpoint.metadata
    with contextlib.closing(EndpointLink(record, metadata, Limits())) as link:
        link.attend()
        deadline_s = time.monotonic() + 6.0
        while time.monotonic() < deadline_s:  # three times what a connection without calls may last
            assert not link.why_ended
            endpoint.running._service.delivery.admit()
            time.sleep(0.2)


def test_channel_that_was_idle_and_closed_is_made_anew_by_the_next_call(endpoint: Server) -> None:
    def ask() -> None:
        code, _ = endpoint.refusal("/hetero.v1.Data/Prepare", endpoint.metadata, request=b"\xff")
        assert code is grpc.StatusCode.INVALID_ARGUMENT

    states: list[grpc.ChannelConnectivity] = []
    endpoint._channel.subscribe(states.append)
    ask()
    wait_for(lambda: grpc.ChannelConnectivity.READY in states)
    wait_for(lambda: states[-1] is grpc.ChannelConnectivity.IDLE)
    ask()
    endpoint._channel.unsubscribe(states.append)


def test_session_token_holders_that_never_read_are_bounded_and_others_are_told_to_come_back(endpoint: Server) -> None:
    """They belong to the job, and a trainer may be stopped, so their connections stay. What they hold is bounded."""
    from hetero.wire.framing import EncodedBatch

    large = EncodedBatch({"large": b"x" * 2**26})
    endpoint.running._service.delivery._answer = lambda _request, _reply: large
    served = endpoint.running._service.delivery
    asking = GREETING + served.admit() + struct.pack("<I", 1) + b"x"
    threads = threading.active_count()
    with UnauthenticatedPeers(endpoint.place, ("127.0.0.1", endpoint.batch_port), NUM, asking=asking) as peers:
        greedy = sum(kind == KINDS[-1] for kind, _ in peers.connections)
        assert greedy > served._max_requests // 2
        wait_for(lambda: served._num_busy == min(greedy, served._max_requests))
        assert served._num_connections <= greedy
        assert threading.active_count() - threads <= greedy + 16
        wait_for(lambda: set(peers.living()) <= {KINDS[-1]})
    wait_for(lambda: served._num_connections == 0)
