"""Launchers meet over real gRPC, and reject unauthenticated peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from hetero.cluster import Role
from hetero.control import peer_connection, security
from hetero.control.hub import Hub
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.membership import Membership
from hetero.control.status import (
    CONTROL_PROTOCOL,
    Cause,
    HostState,
    HostStatus,
    status_to_proto,
)
from hetero.errors import ExitCode, PortError
from hetero.wire.proto import control_pb2 as pb
from tests.support.control.hubs import TOKEN, Names, make_hub, wait_for

RECORD = EndpointRecord(endpoint_id="data/0", host="data", address="127.0.0.1:9", incarnation="i", num_slots=3)
OTHER_PROTOCOL = CONTROL_PROTOCOL + 98


def test_hub_change_on_one_host_reaches_the_other(hubs: tuple[Hub, Hub]) -> None:
    trainer, data = hubs
    data.update(state=HostState.SERVING)
    wait_for(trainer, lambda membership: not membership.missing(Role.DATA, at_least=HostState.SERVING))


def test_hub_failure_of_a_data_host_is_decided_by_the_trainer_for_both(hubs: tuple[Hub, Hub]) -> None:
    _, data = hubs
    wait_for(data, lambda membership: membership.arbiter == "trainer")
    data.fail(Cause(host="data", summary="no such module", exit_code=ExitCode.SCRIPT_FAILED))
    for hub in hubs:
        wait_for(hub, lambda membership: membership.own.decided is not None)
        with hub.membership() as membership:
            assert membership.own.decided is not None
            assert membership.own.decided.first_line == "HET-30 data: no such module"


def test_hub_last_word_is_known_to_be_delivered(hubs: tuple[Hub, Hub]) -> None:
    trainer, data = hubs
    wait_for(trainer, lambda membership: len(membership.statuses()) == 2)
    trainer.update(state=HostState.DONE)
    wait_for(trainer, lambda membership: membership.final_delivered)
    wait_for(data, lambda membership: membership.trainers_done)


def test_hub_wrong_token_fails_the_job_naming_the_host() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports), make_hub("data", ports, token=security.Token.generate()) as data:
        wait_for(data, lambda membership: membership.own.decided is not None)
        with data.membership() as membership:
            assert membership.own.decided is not None
            assert membership.own.decided.exit_code is ExitCode.AUTHENTICATION
            assert "trainer" in membership.own.decided.summary


def last_word(membership: Membership, host: str = "data") -> str:
    """Return what was last heard of a host."""
    role = Role.TRAINER if host == "trainer" else Role.DATA
    return dict(membership.missing(role, at_least=HostState.FAILED))[host]


def serve(trainer: Hub, data: Hub) -> None:
    """Have the data host serve, and the trainer host know."""
    data.update(state=HostState.SERVING, endpoints=(RECORD,))
    wait_for(trainer, lambda membership: membership.endpoints() == (RECORD,))


@pytest.mark.fault("F15")
def test_hub_goes_on_while_names_cannot_be_resolved_any_more() -> None:
    ports: dict[str, int] = {}
    names, silence = Names(ports), Names({})
    with make_hub("trainer", ports, names=names) as trainer, make_hub("data", ports, names=silence) as data:
        wait_for(data, lambda membership: len(membership.statuses()) == 2)  # it never calls, it is called
        names.is_down = True
        serve(trainer, data)
        trainer.update(state=HostState.TRAINING)
        wait_for(data, lambda membership: not membership.missing(Role.TRAINER, at_least=HostState.TRAINING))
        data.stop()
        wait_for(trainer, lambda membership: "name resolution (DNS) of host 'data' failed" in last_word(membership))
        with trainer.membership() as membership:  # and what became of the connection
            assert f"127.0.0.1:{data.port}" in last_word(membership)


@pytest.mark.fault("F15")
def test_hub_tells_a_peer_while_the_name_service_does_not_answer() -> None:
    ports: dict[str, int] = {}
    names, silence = Names(ports), Names({})
    names.answers.clear()
    try:
        with make_hub("trainer", ports, names=names) as trainer:
            wait_for(trainer, lambda membership: "of host 'data' has not answered yet" in last_word(membership))
            with make_hub("data", ports, names=silence) as data:
                names.answers.set()
                wait_for(data, lambda membership: len(membership.statuses()) == 2)
                names.answers.clear()
                names.asked.clear()
            wait_for(trainer, lambda _: names.asked.is_set())  # a heartbeat failed, and the lookup stays open
            with make_hub("data", ports, names=silence, port=data.port, life=2) as again:
                wait_for(again, lambda membership: len(membership.statuses()) == 2)
    finally:
        names.answers.set()


@pytest.mark.fault("F15")
def test_hub_finds_a_peer_that_is_back_under_another_address() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer:
        with make_hub("data", ports) as data:
            wait_for(trainer, lambda membership: len(membership.statuses()) == 2)
        with make_hub("data", ports, life=2) as again:
            assert again.port != data.port
            wait_for(trainer, lambda membership: membership.statuses()[-1].incarnation == "data-2")


def test_hub_of_another_host_at_the_address_is_told_by_its_name() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer:
        ports["data"] = trainer.port
        target = f"127.0.0.1:{trainer.port}"
        wait_for(trainer, lambda membership: f"{target} is trainer, not data" in last_word(membership))
        with trainer.membership() as membership:
            assert len(membership.statuses()) == 1


def test_hub_replacement_of_a_data_host_with_another_token_does_not_end_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer:
        with make_hub("data", ports) as data:
            serve(trainer, data)
        with make_hub("data", ports, token=security.Token.generate(), life=2) as again:
            wait_for(again, lambda membership: membership.own.decided is not None)
            wait_for(trainer, lambda membership: "refuses this host's token" in last_word(membership))
            with trainer.membership() as membership:
                assert membership.own.failure is None
    assert [record for record in caplog.records if "continues without data host data: " in record.getMessage()] != []


@pytest.mark.fault("F31")
def test_hub_of_another_job_with_another_token_has_the_port() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer:
        with make_hub("data", ports, token=security.Token.generate(), job_id="job-b"):
            wait_for(trainer, lambda membership: membership.own.decided is not None)
        with trainer.membership() as membership:
            decided = membership.own.decided
    assert decided is not None
    assert decided.exit_code is ExitCode.PORT
    assert "a launcher of another job has this port; give each job that runs there another --port" in decided.summary
    assert "job-b" not in decided.summary


def test_hub_goes_on_telling_its_peer_after_an_error_that_nobody_expected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed: list[str] = []
    is_mended = threading.Event()

    def convert(status: HostStatus, *, has_metrics: bool) -> pb.HostStatus:
        if not is_mended.is_set():
            failed.append(status.host)
            raise ZeroDivisionError("on purpose")
        return status_to_proto(status, has_metrics=has_metrics)

    monkeypatch.setattr(peer_connection, "status_to_proto", convert)
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, make_hub("data", ports):
        wait_for(trainer, lambda _: min(failed.count("trainer"), failed.count("data")) > 1)
        is_mended.set()
        wait_for(trainer, lambda membership: len(membership.statuses()) == 2)
        trainer.update(state=HostState.DONE)
        wait_for(trainer, lambda membership: membership.final_delivered)
    said = sorted(record.getMessage() for record in caplog.records if "ZeroDivisionError" in record.getMessage())
    assert [text.partition(" failed")[0] for text in said] == [
        "sending this host's status to data",
        "sending this host's status to trainer",
    ]


@contextlib.contextmanager
def of_another_protocol(port: int) -> Iterator[int]:
    """Yield a port that leads to the launcher at ``port``. At either end the other seems to speak `OTHER_PROTOCOL`."""

    def translated(data: bytes) -> bytes:
        status = pb.HostStatus.FromString(data)
        status.protocol = OTHER_PROTOCOL if status.protocol == CONTROL_PROTOCOL else CONTROL_PROTOCOL
        return status.SerializeToString()

    def heartbeat(request: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return translated(behind(translated(request), metadata=security.call_metadata(TOKEN, "job-a"), timeout=100))
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())
            raise AssertionError("abort raises") from error

    server = grpc.server(ThreadPoolExecutor(2))
    handlers = {"Heartbeat": grpc.unary_unary_rpc_method_handler(heartbeat)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("hetero.v1.Control", handlers),))
    with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
        behind = channel.unary_unary("/hetero.v1.Control/Heartbeat")
        relay_port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield relay_port
        finally:
            server.stop(0).wait()


@pytest.mark.fault("F32")
def test_hubs_of_two_protocols_end_the_job_on_both_hosts_with_both_values() -> None:
    peers = {"trainer": "data", "data": "trainer"}
    names = {host: Names({}) for host in peers}
    ports: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        hubs = {host: make_hub(host, ports, names=names[host]) for host in peers}
        for host, peer in peers.items():
            names[host].ports[peer] = stack.enter_context(of_another_protocol(ports[peer]))
        for hub in hubs.values():
            stack.enter_context(hub)
        for host, peer in peers.items():
            wait_for(hubs[host], lambda membership: membership.own.decided is not None)
            decided = hubs[host].decided
            assert decided is not None
            text = f"host '{peer}' speaks control protocol {OTHER_PROTOCOL}, this host speaks {CONTROL_PROTOCOL};"
            assert decided.first_line.startswith(f"HET-11 {host}: {text}")


@pytest.mark.fault("F32")
def test_hub_replacement_of_a_data_host_with_another_protocol_does_not_end_the_job() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer:
        with make_hub("data", ports) as data:
            serve(trainer, data)
        with make_hub("data", {}, life=2) as again, of_another_protocol(again.port) as port:
            ports["data"] = port
            text = f"host 'data' speaks control protocol {OTHER_PROTOCOL}"
            wait_for(trainer, lambda membership: text in last_word(membership))
            with trainer.membership() as membership:
                assert membership.own.failure is None
                assert membership.statuses()[-1].incarnation == "data-1"


def test_hub_goes_on_after_heartbeats_that_are_no_good_and_says_once_what_is_wrong(
    hubs: tuple[Hub, Hub], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = hubs
    wait_for(trainer, lambda membership: len(membership.statuses()) == 2)
    given_up = pb.Cause(host="data", summary="give up", exit_code=int(ExitCode.SCRIPT_FAILED))
    forged = pb.HostStatus(protocol=OTHER_PROTOCOL, host="data", incarnation="x", failure=given_up, decided=given_up)
    unknown = pb.HostStatus(protocol=CONTROL_PROTOCOL, host="data", incarnation="x", failure=given_up)
    unknown.state = 77
    with contextlib.closing(grpc.insecure_channel(f"127.0.0.1:{trainer.port}")) as channel:
        heartbeat = channel.unary_unary("/hetero.v1.Control/Heartbeat")
        metadata = security.call_metadata(TOKEN, "job-a")
        for _ in range(3):
            reply = heartbeat(forged.SerializeToString(), metadata=metadata, timeout=100)
            assert pb.HostStatus.FromString(reply) == pb.HostStatus(protocol=CONTROL_PROTOCOL, host="trainer")
            with pytest.raises(grpc.RpcError) as caught:
                heartbeat(unknown.SerializeToString(), metadata=metadata, timeout=100)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with trainer.membership() as membership:
        assert membership.own.failure is None
        assert membership.own.decided is None
        assert membership.statuses()[-1].incarnation == "data-1"
    assert [record.getMessage() for record in caplog.records if record.name == "hetero.control.hub"] == [
        f"refused a message: it speaks control protocol {OTHER_PROTOCOL}, this host speaks {CONTROL_PROTOCOL}",
        "refused a message: the status of host 'data': found the unknown HostState 77",
    ]


@pytest.mark.fault("F31")
def test_hub_of_another_job_at_the_address_is_told_by_its_id() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, make_hub("data", ports, job_id="job-b") as data:
        for hub, other, own, peer in ((trainer, "b", "a", "data"), (data, "a", "b", "trainer")):
            text = f"this server belongs to job job-{other}, this host belongs to job job-{own}"
            wait_for(hub, lambda membership, text=text, peer=peer: text in last_word(membership, peer))  # type: ignore[misc]


@pytest.mark.fault("F30")
def test_hub_port_in_use_names_the_port() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, pytest.raises(PortError, match=f"127.0.0.1:{trainer.port}"):
        make_hub("data", {}, port=trainer.port)


@pytest.mark.attack("A10")
@pytest.mark.parametrize("method", sorted(security.CONTROL_POLICIES))
def test_hub_call_without_token_is_refused(hubs: tuple[Hub, Hub], method: str) -> None:
    trainer, _ = hubs
    channel = grpc.insecure_channel(f"127.0.0.1:{trainer.port}")
    with contextlib.closing(channel), pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"", timeout=100)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
