"""gRPC under TLS: which check fails, and what the error of the call says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import hetero
from hetero.wire import channels
from hetero.wire.tls import Tls
from tests.support.wire.job_certificates import GRPC_NAMES_THE_CHECK, folder, tls

import grpc  # isort: skip


@contextlib.contextmanager
def grpc_server(server_tls: Tls | None) -> Iterator[int]:
    """Serve one method that echoes its request."""
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, options=channels.server_options())
        echo = grpc.unary_unary_rpc_method_handler(lambda request, _context: request)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.T", {"Echo": echo}),))
        port = channels.bind(server, "127.0.0.1", tls=server_tls)
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


def call(port: int, client_tls: Tls | None, name: str = "algo-1") -> bytes:
    with channels.open_channel(f"127.0.0.1:{port}", name=name, tls=client_tls) as channel:
        answer: bytes = channel.unary_unary("/test.T/Echo")(b"hello", timeout=100)
        return answer


def refusal(port: int, client_tls: Tls | None, name: str = "algo-1") -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(port, client_tls, name)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return channels.short_details(caught.value)


def test_call_under_tls_is_answered() -> None:
    with grpc_server(tls()) as port:
        assert call(port, tls(host="algo-2")) == b"hello"


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    ("server_kind", "server_host", "words"),
    [
        ("other", "algo-1", "another authority signed it than this host's ca.pem"),
        ("expired", "algo-1", "its certificate is not valid: certificate has expired"),
        ("job", "intruder", "it is one of another host"),
    ],
)
def test_call_to_a_server_that_fails_a_check_names_the_check(server_kind: str, server_host: str, words: str) -> None:
    with grpc_server(tls(server_kind, server_host)) as port:
        why = refusal(port, tls(host="algo-2"))
        assert why.startswith("TLS: its certificate is not valid")
        assert words in why or not GRPC_NAMES_THE_CHECK


@pytest.mark.attack("A18")
@pytest.mark.parametrize("kind", ["other", "expired", "none"])
def test_call_of_a_client_that_fails_a_check_is_refused(kind: str) -> None:
    class Client:
        host = "algo-2"

        def reveal(self) -> tuple[bytes, bytes | None, bytes | None]:
            authority = (folder("job") / "ca.pem").read_bytes()
            if kind == "none":
                return authority, None, None
            own = folder(kind) / "algo-2"
            return authority, own.with_suffix(".pem").read_bytes(), own.with_suffix(".key").read_bytes()

    with grpc_server(tls()) as port:
        assert refusal(port, Client())  # type: ignore[arg-type]
        assert call(port, tls(host="algo-2")) == b"hello"


@pytest.mark.attack("A18")
def test_call_never_falls_back_to_plaintext() -> None:
    with grpc_server(tls()) as port:
        assert refusal(port, None)
    with grpc_server(None) as port:
        assert "it does not speak TLS" in refusal(port, tls(host="algo-2"))


def test_every_channel_and_port_goes_through_one_place_that_knows_tls() -> None:
    package = Path(hetero.__file__).parent
    names = ("insecure_channel", "add_insecure_port", "secure_channel", "add_secure_port")
    found = {path for path in package.rglob("*.py") for name in names if name in path.read_text(encoding="utf-8")}
    assert found == {package / "wire" / "channels.py"}
