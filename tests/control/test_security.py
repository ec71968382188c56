from __future__ import annotations

import contextlib
import logging
import os
import pickle
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.control import security
from hetero.control.security import Policy, ServerInterceptor, Token
from hetero.errors import AuthenticationError
from hetero.wire import channels

import grpc  # isort: skip

JOB = "job-1"
ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


@dataclass
class Server:
    port: int
    interceptor: ServerInterceptor


@pytest.fixture(scope="module")
def token() -> Token:
    return Token.generate()


@pytest.fixture(scope="module")
def server(token: Token) -> Iterator[Server]:
    def one(_request: Any, _context: grpc.ServicerContext) -> bytes:
        return b"yes"

    def many(_request: Any, _context: grpc.ServicerContext) -> Iterator[bytes]:
        yield b"yes"

    handlers = {}
    for arity in ARITIES:
        make = getattr(grpc, f"{arity}_rpc_method_handler")
        for name in ("allowed", "forgotten"):
            handlers[f"{name}_{arity}"] = make(many if arity.endswith("stream") else one)
    policies = {f"/test.T/allowed_{arity}": Policy.TOKEN for arity in ARITIES}
    interceptor = ServerInterceptor(token, job_id=JOB, policies=policies)
    real = grpc.server(
        ThreadPoolExecutor(4),
        [grpc.method_handlers_generic_handler("test.T", handlers)],
        interceptors=[interceptor],
        options=channels.server_options(),
    )
    port = channels.bind(real, "127.0.0.1")
    real.start()
    yield Server(port, interceptor)
    real.stop(0).wait()


def call(server: Server, method: str, metadata: tuple[tuple[str, str], ...]) -> bytes:
    """Call with the arity that the method's name ends with."""
    arity = next(arity for arity in ARITIES if method.endswith(arity))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}", options=channels.client_options()) as channel:
        stub = getattr(channel, arity)(f"/test.T/{method}")
        request = iter([b"ask"]) if arity.startswith("stream") else b"ask"
        answer = stub(request, metadata=metadata, timeout=100)
        return b"".join(answer) if arity.endswith("stream") else answer


def refused(server: Server, method: str, metadata: tuple[tuple[str, str], ...]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(server, method, metadata)
    return caught.value.code(), caught.value.details()


@pytest.mark.parametrize("arity", ARITIES)
def test_call_with_token_and_job_is_served(server: Server, token: Token, arity: str) -> None:
    assert call(server, f"allowed_{arity}", security.call_metadata(token, JOB)) == b"yes"


@pytest.mark.attack("A1")
@pytest.mark.parametrize("arity", ARITIES)
@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer "),),
        (("authorization", "Bearer " + "x" * 43),),
        (("authorization", "TOKEN"),),
        (("authorization", "Basic TOKEN"),),
        (("authorization", "Bearer TOKEN"), ("authorization", "Bearer TOKEN")),
        (("authorization", "Bearer TOKEN"), ("authorization", "Bearer other")),
    ],
    ids=["none", "empty", "blank", "wrong", "no-scheme", "other-scheme", "twice", "two"],
)
def test_call_without_valid_token_is_refused_with_one_message(
    server: Server, token: Token, arity: str, headers: tuple[tuple[str, str], ...]
) -> None:
    before = server.interceptor.auth_failures
    metadata = tuple((name, value.replace("TOKEN", token.reveal())) for name, value in headers)
    found = refused(server, f"allowed_{arity}", (*metadata, ("hetero-job", JOB)))
    assert found == (grpc.StatusCode.UNAUTHENTICATED, "authentication failed")
    assert server.interceptor.auth_failures == before + 1


@pytest.mark.attack("A1")
@pytest.mark.attack("A2")
@pytest.mark.parametrize("arity", ARITIES)
@pytest.mark.parametrize("name", ["forgotten", "unknown"])
def test_method_without_policy_is_refused_even_with_token(server: Server, token: Token, name: str, arity: str) -> None:
    found = refused(server, f"{name}_{arity}", security.call_metadata(token, JOB))
    assert found == (grpc.StatusCode.UNAUTHENTICATED, "authentication failed")


@pytest.mark.attack("A11")
@pytest.mark.fault("F31")
def test_call_of_another_job_is_refused(server: Server, token: Token) -> None:
    for metadata in (security.call_metadata(token, "job-2"), security.call_metadata(token, JOB)[:1]):
        code, details = refused(server, "allowed_unary_unary", metadata)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert details == f"this server belongs to job {JOB}"


@pytest.mark.attack("A1")
def test_huge_header_leaves_the_server_healthy(server: Server, token: Token) -> None:
    with pytest.raises(grpc.RpcError):
        call(server, "allowed_unary_unary", (("authorization", "x" * 2**20),))
    assert call(server, "allowed_unary_unary", security.call_metadata(token, JOB)) == b"yes"


@pytest.mark.attack("A1")
def test_failures_are_logged_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 100.0
    interceptor = ServerInterceptor(Token.generate(), job_id=JOB, policies={}, clock=lambda: now_s)

    class Details:
        method = "/evil\nline"
        invocation_metadata = (("authorization", "Bearer evil"),)

    def intercept() -> None:
        interceptor.intercept_service(lambda _details: None, Details())  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            intercept()
        now_s += 10.0
        intercept()
    assert len(caplog.records) == 2
    assert "evil" not in caplog.text
    assert interceptor.auth_failures == 6


@pytest.mark.attack("A15")
def test_token_hides_itself(token: Token) -> None:
    secret = token.reveal()
    metadata = security.call_metadata(token, JOB)
    assert secret not in f"{token} {token!r} {[token]} {metadata} {dict(metadata)}"
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(metadata)
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(token)
    assert token == Token(secret)
    assert token != Token.generate()


@pytest.mark.parametrize("value", ["", "short", "x" * 600, "spaces in a token value", "tab\tin-a-token"])
def test_token_rejects_unusable_values_without_quoting_them(value: str) -> None:
    with pytest.raises(AuthenticationError) as caught:
        Token(value)
    assert not value or value not in str(caught.value)


def test_token_file_round_trips(tmp_path: Path, token: Token) -> None:
    path = tmp_path / "token"
    security.write_token(str(path), token)
    assert path.stat().st_mode & 0o777 == 0o600
    assert security.load_token(str(path)) == token
    assert security.token_from_environment({security.TOKEN_FILE_VARIABLE: str(path)}) == token
    assert security.token_from_environment({}) is None
    with pytest.raises(FileExistsError):
        security.write_token(str(path), token)


def test_token_memfd_can_be_read_repeatedly(token: Token) -> None:
    descriptor, path = security.token_memfd(token)
    try:
        assert security.load_token(path) == token
        assert security.load_token(path) == token
    finally:
        os.close(descriptor)
    with pytest.raises(AuthenticationError, match="cannot open"):
        security.load_token(path)


@pytest.mark.parametrize(
    ("owner", "mode", "is_accepted"),
    [(0, 0o440, True), (0, 0o400, True), (0, 0o640, False), (0, 0o444, False), (0, 0o460, False), (1000, 0o440, False)],
)
def test_token_file_of_a_pod_without_root_is_accepted(
    tmp_path: Path, token: Token, owner: int, mode: int, is_accepted: bool
) -> None:
    path = tmp_path / "token"
    path.write_text(token.reveal())
    facts = SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=owner)
    refusal = pytest.raises(AuthenticationError, match=f"has mode {mode:04o}: others have access")
    with contextlib.nullcontext() if is_accepted else refusal, pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 1000)
        patch.setattr("os.fstat", lambda _: facts)
        assert security.load_token(str(path)) == token


def test_token_file_that_cannot_be_trusted_is_refused(tmp_path: Path, token: Token) -> None:
    path = tmp_path / "token"
    with pytest.raises(AuthenticationError, match="cannot open"):
        security.token_from_environment({security.TOKEN_FILE_VARIABLE: str(path)})
    path.write_text(token.reveal())
    path.chmod(0o640)
    with pytest.raises(AuthenticationError, match="0640"):
        security.load_token(str(path))
    path.chmod(0o600)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(AuthenticationError, match="not ASCII"):
        security.load_token(str(path))
    path.write_text("")
    with pytest.raises(AuthenticationError, match="holds no token"):
        security.load_token(str(path))
    with pytest.raises(AuthenticationError, match="not a regular file"):
        security.load_token(str(tmp_path))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(AuthenticationError, match="not a regular file"):
        security.load_token(str(fifo))
