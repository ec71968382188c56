"""Every server that hetero runs, in this process, with everything that it was told to serve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control import security
from hetero.control.hub import Hub
from hetero.control.members.joined import JoinedHost
from hetero.control.members.membership import Member, Membership
from hetero.control.members.registrar import Registrar
from hetero.control.security import CONTROL_POLICIES
from hetero.control.status import HostStatus, SessionOptions
from hetero.endpoint.endpoint import Endpoint
from hetero.endpoint.options import EndpointOptions
from hetero.endpoint.service import DATA_POLICIES
from hetero.wire import channels  # noqa: F401  (before grpc: sets its environment)
from hetero.wire.limits import PROTOCOL
from hetero.wire.proto import data_pb2 as pb

import grpc  # isort: skip

JOB = "job-of-servers"
ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
POLICIES = {"endpoint": DATA_POLICIES, "launcher": CONTROL_POLICIES, "registrar": CONTROL_POLICIES}


@dataclass
class Server:
    """One server, and how to reach it."""

    name: str
    token: security.Token
    address: str
    access: security.ServerInterceptor
    methods: tuple[str, ...]
    """What its handler tables have."""
    incarnation: str = ""
    """Of an endpoint."""
    batch_port: int = 0
    """Endpoints only."""
    running: Any = None
    _channel: grpc.Channel = field(init=False)

    def __post_init__(self) -> None:
        # Not with our own clients' options: an unauthenticated peer knows no limits.
        self._channel = grpc.insecure_channel(self.address, options=[("grpc.enable_http_proxy", 0)])

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.address.rpartition(":")
        return host, int(port)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What the calls of the job's own processes carry."""
        return security.call_metadata(self.token, JOB, incarnation=self.incarnation)

    def call(self, method: str, metadata: Any, *, arity: str = "unary_unary", request: bytes = b"") -> bytes:
        """Call a method as if it were of some arity. Raises `grpc.RpcError`."""
        stub = getattr(self._channel, arity)(method, None, None)
        given = iter([request]) if arity.startswith("stream") else request
        reply = stub(given, metadata=metadata, timeout=100)
        return next(reply) if arity.endswith("stream") else reply

    def refusal(self, method: str, metadata: Any, **options: Any) -> tuple[grpc.StatusCode, str]:
        """Return how a call is refused. One that comes before the server is rid of a flood is made again."""
        for _ in range(100):
            with pytest.raises(grpc.RpcError) as caught:
                self.call(method, metadata, **options)
            if caught.value.details() != "Concurrent RPC limit exceeded!":
                break
            time.sleep(0.1)
        return caught.value.code(), caught.value.details()

    def close(self) -> None:
        """End the connection to it."""
        self._channel.close()


@contextlib.contextmanager
def noted_methods() -> Iterator[list[str]]:
    """Record the full names of all methods whose handlers are made meanwhile."""
    names: list[str] = []
    make = grpc.method_handlers_generic_handler

    def making(service: str, handlers: dict[str, Any]) -> Any:
        names.extend(f"/{service}/{method}" for method in handlers)
        return make(service, handlers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc, "method_handlers_generic_handler", making)
        yield names


@contextlib.contextmanager
def endpoint(folder: Path, **options: Any) -> Iterator[Server]:
    """Run an endpoint that serves no data set."""
    token = security.Token.generate()
    path = folder / "token"
    path.unlink(missing_ok=True)
    security.write_token(str(path), token)
    given = {"host": "algo-1", "index": 0, "num_endpoints": 1, "address": "127.0.0.1", "incarnation": "first"}
    chosen = EndpointOptions(**{**given, "job_id": JOB, **options})
    with pytest.MonkeyPatch.context() as patch, noted_methods() as methods:
        patch.setenv(security.TOKEN_FILE_VARIABLE, str(path))
        running = Endpoint(chosen)
    with running:
        server = Server(
            name="endpoint",
            token=token,
            address=f"127.0.0.1:{running.port}",
            access=running._access,
            methods=tuple(methods),
            incarnation=chosen.incarnation,
            batch_port=running._service.delivery.port,
            running=running,
        )
        with contextlib.closing(server):
            yield server


@contextlib.contextmanager
def launcher() -> Iterator[Server]:
    """Run a launcher's control plane whose only peer cannot be reached."""
    token = security.Token.generate()
    members = (Member(host="algo-1", role=Role.TRAINER), Member(host="algo-2", role=Role.DATA))
    own = HostStatus(host="algo-1", incarnation="first", version="1", script_digest="d")
    session_options = SessionOptions(
        data_timeout_s=1,
        prepare_timeout_s=2,
        emulate_step_s=None,
        purity_checks=0,
        warmup_steps=1,
        max_batch_bytes=2**30,
    )
    with noted_methods() as methods:
        running = Hub(
            Membership(members, own, timings=Timings(), clock=time.monotonic),
            address="127.0.0.1",
            port=0,
            resolve=lambda _: "127.0.0.1:1",
            peers=("algo-2",),
            token=token,
            job_id=JOB,
            remote=True,
            session_options=session_options,
            heartbeat_s=2.0,
            num_ranks=1,
        )
    with running:
        server = Server(
            name="launcher",
            token=token,
            address=f"127.0.0.1:{running.port}",
            access=running._interceptor,
            methods=tuple(methods),
            running=running,
        )
        with contextlib.closing(server):
            yield server


@contextlib.contextmanager
def registrar() -> Iterator[Server]:
    """Run the registrar of a job with two hosts. One of them never comes."""
    token = security.Token.generate()
    own = JoinedHost(host="10.0.0.1", address="10.0.0.1:1", group="trainer", instance_type="")
    running = Registrar(own, num_hosts=2, groups=["trainer"], token=token, tls=None, job_id=JOB)
    with noted_methods() as methods, running.serving("127.0.0.1", 0):
        server = Server(
            name="registrar",
            token=token,
            address=f"127.0.0.1:{running.port}",
            access=running.access,
            methods=tuple(methods),
            running=running,
        )
        with contextlib.closing(server):
            yield server


@contextlib.contextmanager
def attended(server: Server) -> Iterator[bytes]:
    """Attend the endpoint as a reader does. Yield the session token."""
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream("/hetero.v1.Data/Attend", None, None)(
            pb.AttendRequest(protocol=PROTOCOL).SerializeToString(), metadata=server.metadata
        )
        yield pb.AttendReply.FromString(next(call)).ticket
        call.cancel()
