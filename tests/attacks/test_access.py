"""Unauthenticated peers at every RPC of every server, with every bad form of the token."""

from __future__ import annotations

import ast
import contextlib
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor

import hetero
from hetero.control.security import Policy, Token, call_metadata
from hetero.endpoint.service import DATA_POLICIES
from hetero.wire.proto import control_pb2, data_pb2
from tests.support.attacks import http2, servers
from tests.support.attacks.servers import ARITIES, JOB, POLICIES, Server
from tests.support.waiting import wait_for

import grpc  # isort: skip

PACKAGE = Path(hetero.__file__).parent
PROTOS: tuple[FileDescriptor, ...] = (control_pb2.DESCRIPTOR, data_pb2.DESCRIPTOR)
REFUSED = (grpc.StatusCode.UNAUTHENTICATED, "authentication failed")
FOREIGN = (
    "/hetero.v1.Data/Shutdown",
    "/hetero.v1.Control/Abort",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.channelz.v1.Channelz/GetServers",
    "/grpc.health.v1.Health/Check",
    "/",
)
BAD_TOKENS: dict[str, list[tuple[str, str | bytes]]] = {
    "none": [],
    "empty": [("authorization", "")],
    "blank": [("authorization", "Bearer ")],
    "wrong": [("authorization", f"Bearer {Token.generate().reveal()}")],
    "no scheme": [("authorization", "TOKEN")],
    "wrong scheme": [("authorization", "Basic TOKEN")],
    "prefix": [("authorization", "Bearer PREFIX")],
    "longer": [("authorization", "Bearer TOKENx")],
    "other case": [("authorization", "Bearer nekot")],
    "two spaces": [("authorization", "Bearer  TOKEN")],
    "space at the end": [("authorization", "Bearer TOKEN x")],
    "the same twice": [("authorization", "Bearer TOKEN"), ("authorization", "Bearer TOKEN")],
    "right and wrong": [("authorization", "Bearer TOKEN"), ("authorization", "Bearer wrong")],
    "wrong and right": [("authorization", "Bearer wrong"), ("authorization", "Bearer TOKEN")],
    "two in one": [("authorization", "Bearer TOKEN,Bearer TOKEN")],
    "binary header": [("authorization-bin", b"Bearer TOKEN")],
    "other header": [("x-authorization", "Bearer TOKEN")],
    "in the job's id": [("hetero-job", "TOKEN")],
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One server of each kind."""
    with (
        servers.endpoint(tmp_path_factory.mktemp("endpoint")) as endpoint,
        servers.launcher() as launcher,
        servers.registrar() as registrar,
    ):
        yield {"endpoint": endpoint, "launcher": launcher, "registrar": registrar}


def tokens(server: Server, name: str) -> list[tuple[str, str | bytes]]:
    """Return the bad headers for one server, and the right id of the job."""
    right = server.token.reveal()

    def filled(value: str | bytes) -> str | bytes:
        if isinstance(value, bytes):
            return value.replace(b"TOKEN", right.encode())
        text = value.replace("TOKEN", right).replace("PREFIX", right[:-1])
        return text.replace("nekot", right.swapcase())

    return [*((key, filled(value)) for key, value in BAD_TOKENS[name]), ("hetero-job", JOB)]


def is_served(server: Server) -> bool:
    """Tell whether a holder of the token gets an answer from the method behind, even if its request is malformed."""
    method = "/hetero.v1.Data/Prepare" if server.name == "endpoint" else "/hetero.v1.Control/Join"
    try:
        return server.call(method, server.metadata) == b""
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.attack("A1")
@pytest.mark.parametrize("name", POLICIES)
def test_every_method_that_is_served_has_a_policy(running: dict[str, Server], name: str) -> None:
    assert set(running[name].methods) == set(POLICIES[name])


@pytest.mark.attack("A1")
def test_every_method_of_the_protocol_demands_the_token() -> None:
    declared = {
        f"/{service.full_name}/{method.name}"
        for proto in PROTOS
        for service in proto.services_by_name.values()
        for method in service.methods
    }
    assert {method for table in POLICIES.values() for method in table} == declared


@pytest.mark.attack("A1")
def test_every_server_of_the_package_is_behind_the_interceptor() -> None:
    """And is one of those that are started here: a new one has to be added to `servers`."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("grpc.server", "grpc.aio.server", "server"):
                found[str(path.relative_to(PACKAGE))] = {keyword.arg for keyword in node.keywords}
    assert set(found) == {"control/security.py", "endpoint/endpoint.py"}
    assert all("interceptors" in keywords for keywords in found.values())


@pytest.mark.attack("A1")
@pytest.mark.attack("A2")
@pytest.mark.attack("A10")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("form", BAD_TOKENS)
def test_call_with_a_bad_token_is_refused_alike_whatever_it_calls(
    running: dict[str, Server], caplog: pytest.LogCaptureFixture, name: str, form: str
) -> None:
    server = running[name]
    metadata = tokens(server, form)
    before = server.access.auth_failures
    calls = list(itertools.product((*POLICIES[name], *FOREIGN), ARITIES))
    with caplog.at_level(logging.DEBUG):
        assert {server.refusal(method, metadata, arity=arity) for method, arity in calls} == {REFUSED}
    assert server.access.auth_failures == before + len(calls)
    assert sum("refused a call" in record.message for record in caplog.records) <= 1
    assert server.token.reveal() not in caplog.text
    assert is_served(server)


@pytest.mark.attack("A2")
@pytest.mark.parametrize("name", POLICIES)
def test_method_that_nobody_serves_is_refused_even_with_the_token(running: dict[str, Server], name: str) -> None:
    server = running[name]
    metadata = server.metadata
    known = {method for table in POLICIES.values() for method in table} - set(POLICIES[name])
    for method, arity in itertools.product((*FOREIGN, *sorted(known)), ARITIES):
        assert server.refusal(method, metadata, arity=arity) == REFUSED


@pytest.mark.attack("A1")
@pytest.mark.attack("A11")
@pytest.mark.parametrize("name", POLICIES)
def test_call_of_another_job_is_refused_and_counted(running: dict[str, Server], name: str) -> None:
    server = running[name]
    bearer = call_metadata(server.token, JOB)[0]
    ids = ([], [("hetero-job", "")], [("hetero-job", JOB + "x")], [("hetero-job", JOB)] * 2)
    demanding = [method for method, policy in POLICIES[name].items() if policy is Policy.TOKEN]
    before = server.access.auth_failures
    for method, arity, jobs in itertools.product(demanding, ARITIES, ids):
        found = server.refusal(method, (bearer, *jobs), arity=arity)
        assert found == (grpc.StatusCode.FAILED_PRECONDITION, f"this server belongs to job {JOB}")
    assert server.access.auth_failures == before + len(demanding) * len(ARITIES) * len(ids)
    assert is_served(server)


@pytest.mark.attack("A11")
def test_call_to_an_endpoint_that_does_not_name_this_start_of_it_is_refused(running: dict[str, Server]) -> None:
    server = running["endpoint"]
    bare = call_metadata(server.token, JOB)
    right, wrong = ("hetero-incarnation", server.incarnation), ("hetero-incarnation", server.incarnation + "x")
    forms = ((), (("hetero-incarnation", ""),), (wrong,), (right, wrong), (wrong, right), (right, right))
    before = server.access.auth_failures
    for method, arity, named in itertools.product(DATA_POLICIES, ARITIES, forms):
        found = server.refusal(method, (*bare, *named), arity=arity)
        assert found == (grpc.StatusCode.FAILED_PRECONDITION, "this server was started anew")
    assert server.access.auth_failures == before  # a reader that is late makes such a call, too
    assert is_served(server)


@pytest.mark.attack("A1")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "value",
    [
        b"Bearer \xff\xfe\xfd" + b"x" * 40,
        "Bearer grün".encode(),
        b"Bearer a\r\nhetero-job: b",
        b"Bearer \0",
        b"\x80" * 9,
    ],
    ids=["not UTF-8", "not ASCII", "line ends", "zero", "noise"],
)
def test_header_that_no_library_would_send_gets_no_answer_but_refusal(
    running: dict[str, Server], caplog: pytest.LogCaptureFixture, name: str, value: bytes
) -> None:
    server = running[name]
    method = next(iter(POLICIES[name]))
    fields = [(b"authorization", value), (b"hetero-job", JOB.encode())]
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            with contextlib.closing(http2.opened(server.place, http2.call(method, fields))) as connection:
                received = http2.answer(connection, (b"authentication failed", b"\x00\x00\x00\x07\x00"))
            assert http2.DATA not in http2.kinds(received)
            assert b"another job" not in received
    # What an unauthenticated peer says is in no log, and how often it says it fills none.
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 1
    assert is_served(server)


@pytest.mark.attack("A1")
@pytest.mark.attack("A8")
@pytest.mark.parametrize("name", POLICIES)
def test_header_of_a_megabyte_is_refused(running: dict[str, Server], name: str) -> None:
    server = running[name]
    method = next(iter(POLICIES[name]))
    for value in (b"x" * 2**20, b"Bearer " + b"\xff" * 2**20):
        said = http2.call(method, [(b"authorization", value), (b"hetero-job", JOB.encode())])
        with contextlib.closing(http2.opened(server.place, said)) as connection:
            assert http2.DATA not in http2.kinds(http2.answer(connection, (b"grpc-status",), timeout_s=5.0))
    code, _ = server.refusal(method, [("authorization", "Bearer " + "x" * 2**20), ("hetero-job", JOB)])
    assert code in (
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
    )
    assert is_served(server)


@pytest.mark.attack("A8")
@pytest.mark.parametrize("name", POLICIES)
def test_request_of_two_megabytes_exhausts_nothing(running: dict[str, Server], name: str) -> None:
    server = running[name]
    methods = list(POLICIES[name])
    for method in (*methods, *methods[:1] * 70):  # more than a launcher takes at once
        code, _ = server.refusal(method, server.metadata, request=bytes(2**21))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert is_served(server)


@pytest.mark.attack("A9")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("who", ["unauthenticated peer", "holder of the token"])
@pytest.mark.parametrize("said", ["nothing", "half a message", "noise"])
def test_calls_that_break_off_hold_no_place(running: dict[str, Server], name: str, who: str, said: str) -> None:
    """The calls that any server takes at the same time, and half that number more."""
    server = running[name]
    given = server.metadata if who != "unauthenticated peer" else [("hetero-job", JOB)]
    fields = [(key.encode(), value.encode()) for key, value in given]
    methods = sorted(POLICIES[name])
    body = {"nothing": b"", "half a message": b"\0\0\0\0\x20half", "noise": b"\0\0\0\0\x03\xff\xff\xff"}[said]
    for _ in range(80):
        opening = b""
        for stream in range(1, 41, 2):
            opening += http2.call(methods[stream % len(methods)], fields, stream=stream)
            opening += http2.frame(http2.DATA, said == "noise", stream, body) if body else b""
        http2.opened(server.place, opening).close()
    wait_for(lambda: is_served(server))


@pytest.mark.attack("A10")
@pytest.mark.parametrize("form", ["none", "wrong"])
def test_forged_heartbeat_changes_nothing(running: dict[str, Server], form: str) -> None:
    server = running["launcher"]
    cause = control_pb2.Cause(host="algo-2", summary="give up", exit_code=40)
    forged = control_pb2.HostStatus(
        protocol=1, version="1", script_digest="d", host="algo-2", incarnation="x", state=7, revision=9, decided=cause
    )
    for host in ("algo-1", "algo-2"):
        forged.host = host
        assert (
            server.refusal("/hetero.v1.Control/Heartbeat", tokens(server, form), request=forged.SerializeToString())
            == REFUSED
        )
    with server.running.membership() as membership:
        assert membership.own.decided is None
        assert membership.own.failure is None
        assert [status.host for status in membership.statuses()] == ["algo-1"]
