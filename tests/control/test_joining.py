"""What a host that wants to join says, what it is answered, and what it accepts from a launcher of others."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hetero.wire import channels  # before grpc, because channels sets grpc's environment
from tests.support.control.clocks import Clock

import grpc  # isort: skip

from hetero.cluster import ClusterSpec, parse_cluster
from hetero.control.members.admission import Admitter, JoinRequest, ask_to_join, request_from_proto
from hetero.control.members.joined import JoinedHost
from hetero.control.members.registrar import Registrar
from hetero.control.status import CONTROL_PROTOCOL
from hetero.errors import ClusterError, ConfigError, DisagreementError, ProtocolError
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import fields_of, record_of

NEW = JoinedHost(host="new", address="10.0.0.9:17170", group="data", instance_type="CPU:16")
REQUEST = JoinRequest(host=NEW, version="1", script_digest="d", options={})
Answer = Callable[[pb.JoinRequest], pb.JoinReply]


def cluster(*data: str) -> ClusterSpec:
    groups = [
        {"instance_group_name": "data", "instance_type": "CPU:16", "hosts": list(data)},
        {"instance_group_name": "trainer", "instance_type": "GPU:1", "hosts": ["first"]},
    ]
    return parse_cluster({"current_host": "first", "instance_groups": groups}, source="test")


@contextlib.contextmanager
def answering(answer: Answer) -> Iterator[str]:
    """Run a server that answers requests to join. Yield its address."""

    def on_join(request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        try:
            return answer(request)
        except ProtocolError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError from error

    handler = grpc.unary_unary_rpc_method_handler(
        on_join,
        request_deserializer=pb.JoinRequest.FromString,
        response_serializer=lambda reply: reply.SerializeToString(),
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("hetero.v1.Control", {"Join": handler}),))
    port = channels.bind(server, "127.0.0.1")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(100.0)


def ask(address: str) -> Any:
    return ask_to_join("first", address, REQUEST, token=None, tls=None)


@pytest.mark.attack("A23")
@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        ({"cluster_json": "{not json"}, ProtocolError, "malformed JSON"),
        ({"cluster_json": "[" * 100_000}, ProtocolError, "malformed JSON"),
        ({"cluster_json": "[1]"}, ProtocolError, "as a list; expected an object"),
        ({"cluster_json": "{}" + " " * (1 << 20)}, ProtocolError, "which is too long"),
        ({"cluster_json": "{}", "job_id": "a\nb"}, ProtocolError, "id of the job"),
        ({"admitter": "other", "admitter_address": "unix:/tmp/x"}, ProtocolError, "expected a numeric address"),
        ({}, ClusterError, "waits for the other hosts"),
        ({"refusal": "a\x1b[31mname", "exit_code": 2}, ConfigError, "does not admit this host: a"),
        ({"refusal": "another script", "exit_code": 11}, DisagreementError, "another script"),
        ({"refusal": "may have been lost", "exit_code": 2, "may_pass": True}, ClusterError, "not admit this host yet"),
    ],
)
def test_answer_of_an_untrusted_launcher_is_checked(reply: dict[str, Any], error: type[Exception], words: str) -> None:
    with answering(lambda _: pb.JoinReply(**reply)) as address, pytest.raises(error, match=words) as caught:
        ask(address)
    assert str(caught.value).isprintable()


@pytest.mark.attack("A23")
def test_one_redirection_is_followed() -> None:
    asked: list[pb.JoinRequest] = []

    def redirect(request: pb.JoinRequest) -> pb.JoinReply:
        asked.append(request)
        return pb.JoinReply(admitter=f"host-{len(asked)}", admitter_address=address)

    with answering(redirect) as address, pytest.raises(ClusterError, match="do not agree"):
        ask(address)
    assert len(asked) == 2


def test_job_that_is_about_to_end_is_no_error() -> None:
    with answering(lambda _: pb.JoinReply(refusal="the job is about to end")) as address:
        assert ask(address) is None


def test_host_that_is_rejected_for_its_protocol_does_not_ask_again() -> None:
    def parsed(request: pb.JoinRequest) -> pb.JoinReply:
        request.protocol = CONTROL_PROTOCOL + 1
        request_from_proto(request)
        raise AssertionError

    with answering(parsed) as address, pytest.raises(DisagreementError, match="speaks control protocol"):
        ask(address)


@pytest.mark.attack("A23")
@pytest.mark.parametrize(
    "changes",
    [
        {"host": ""},
        {"host": "a\nhetero_metric x=1"},
        {"host": "../../etc"},
        {"host": "a" * 254},
        {"address": "unix:/tmp/x"},
        {"address": "name:17170"},
        {"address": "10.0.0.9"},
        {"address": "10.0.0.9:0"},
        {"address": "10.0.0.9:65536"},
        {"address": "10.0.0.999:17170"},
        {"address": "fe80::1:17170"},
        {"group": "a\x1b[31m"},
        {"group": "g" * 65},
        {"instance_type": "t" * 254},
        {"instance_type": "a\tb"},
    ],
)
def test_malformed_joined_host_is_rejected(changes: dict[str, str]) -> None:
    message = pb.JoinedHost(**fields_of(NEW))
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(ProtocolError) as caught:
        record_of(JoinedHost, message)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("address", ["", "10.0.0.9:17170", "[fd00::9]:17170"])
def test_joined_host_survives_the_wire(address: str) -> None:
    joined = JoinedHost(host="new", address=address, group="", instance_type="")
    assert record_of(JoinedHost, pb.JoinedHost(**fields_of(joined))) == joined


@pytest.mark.attack("A23")
@pytest.mark.parametrize("changes", [{"version": "v" * 254}, {"script_digest": "d" * 1_000_000}, {"version": "\n"}])
def test_request_with_a_malformed_text_is_rejected(changes: dict[str, str]) -> None:
    message = pb.JoinRequest(
        protocol=CONTROL_PROTOCOL, host=pb.JoinedHost(**fields_of(NEW)), version="1", script_digest="d"
    )
    for name, value in changes.items():
        setattr(message, name, value)
    with pytest.raises(ProtocolError) as caught:
        request_from_proto(message)
    assert len(str(caught.value)) < 200


def test_hosts_that_are_added_to_the_description_together_are_found_with_one_reading(clock: Clock) -> None:
    names = [f"data-{number}" for number in range(100)]
    num_readings = 0

    def read_again() -> ClusterSpec:
        nonlocal num_readings
        num_readings += 1
        return cluster("data-0", *names[1:])

    admitter = Admitter(cluster("data-0"), "job", read_again=read_again, clock=clock)
    found = [admitter.described(name) for name in names]
    assert [joined.host for joined in found if joined is not None] == names[1:]  # the first was there at the start
    assert admitter.described("stranger") is None
    assert num_readings == 1
    clock.now_s += Admitter.READ_INTERVAL_S
    assert admitter.described("stranger") is None
    assert num_readings == 2


def test_only_one_thread_waits_for_a_description_that_cannot_be_read(clock: Clock) -> None:
    is_reading, may_end = threading.Event(), threading.Event()

    def read_again() -> ClusterSpec:
        is_reading.set()
        may_end.wait(100.0)
        raise ClusterError("stale file handle")

    admitter = Admitter(cluster("data-0"), "job", read_again=read_again, clock=clock)
    reader = threading.Thread(target=admitter.described, args=("new",))
    reader.start()
    assert is_reading.wait(100.0)
    assert admitter.described("new") is None  # it does not wait
    may_end.set()
    reader.join(100.0)


def test_host_of_the_description_is_known_by_its_name_and_group() -> None:
    admitter = Admitter(cluster("data-0"), "job")
    for host, group, expected in (("data-0", "data", True), ("first", "trainer", True), ("data-0", "trainer", False)):
        joined = JoinedHost(host=host, address="10.0.0.1:1", group=group, instance_type="")
        assert admitter.has_described(joined) is expected
    assert not admitter.has_described(NEW)


def test_registrar_rejects_a_group_that_the_main_host_does_not_have() -> None:
    main = JoinedHost(host="main", address="127.0.0.1:1", group="trainer", instance_type="GPU:1")
    registrar = Registrar(main, num_hosts=2, groups=("trainer", "data"), token=None, tls=None, job_id="j")
    other = JoinRequest(
        host=JoinedHost(host="new", address="127.0.0.1:2", group="dta", instance_type=""),
        version="1",
        script_digest="d",
        options={},
    )
    with registrar.serving("127.0.0.1", 0):
        address = f"127.0.0.1:{registrar.port}"
        with pytest.raises(DisagreementError, match="has the groups trainer, data, and not 'dta'"):
            ask_to_join("main", address, other, token=None, tls=None)
        # The name is taken, although the job still lacks a host.
        namesake = dataclasses.replace(
            other, host=JoinedHost(host="main", address="127.0.0.1:2", group="data", instance_type="")
        )
        with pytest.raises(ConfigError, match="another host has registered as main, of group trainer"):
            ask_to_join("main", address, namesake, token=None, tls=None)
        admission = ask_to_join("main", address, REQUEST, token=None, tls=None)
    assert admission is not None
    assert admission.document["current_host"] == "new"
