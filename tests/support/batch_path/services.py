"""The service of an endpoint in this process, and what links to it fetch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetero.control.members.directory import EndpointRecord
from hetero.endpoint.compute import Compute
from hetero.endpoint.link import Call, EndpointLink
from hetero.endpoint.options import EndpointOptions
from hetero.endpoint.replies import Reply
from hetero.endpoint.service import DataServicer
from hetero.wire import channels
from hetero.wire.framing import BatchDecoder, EncodedBatch
from hetero.wire.limits import Limits
from hetero.wire.transports.interface import Transport, UnauthenticatedPeer
from tests.support.batch_path.deliveries import TCP

import grpc  # isort: skip


def make_service(
    compute: Compute, *, address: str = "127.0.0.1", transport: Transport = TCP, limits: Limits | None = None
) -> DataServicer:
    """Return the service of a host's only endpoint."""
    options = EndpointOptions(
        host="algo-1",
        address=address,
        num_endpoints=1,
        job_id="job",
        index=0,
        max_batch_bytes=(limits or Limits()).max_batch_bytes,
    )
    return DataServicer(compute, options, max_requests=8, transport=transport)


def echo(request: bytes, _reply: Reply) -> EncodedBatch | bytes | None:
    """Answer with the request."""
    return EncodedBatch({"request": request}, request=request)


class Endpoint:
    """The real service in this process, except for its answers to requests for batches."""

    def __init__(self, answer: Any = echo, *, address: str = "127.0.0.1", transport: Transport = TCP) -> None:
        self.compute = Compute()
        self.service = make_service(self.compute, address=address, transport=transport)
        self.delivery = self.service.delivery
        self.delivery._answer = answer
        self.num_admitted = 0
        admit = self.delivery.greeter._admit

        def counting(peer: UnauthenticatedPeer, shown: bytes) -> bool:
            self.num_admitted += 1
            return admit(peer, shown)

        self.delivery.greeter._admit = counting  # type: ignore[method-assign]
        self._threads = ThreadPoolExecutor(16)
        self.server = grpc.server(self._threads, [self.service.handler()], options=channels.server_options())
        port = channels.bind(self.server, address)
        host = f"[{address}]" if ":" in address else address
        self.record = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address=f"{host}:{port}", incarnation="a")
        self.delivery.start()
        self.server.start()

    def stop(self) -> None:
        self.delivery.stop(0.0)
        self.server.stop(0.0).wait()
        self._threads.shutdown()
        self.compute.close()


def fetch(
    link: EndpointLink,
    request: bytes = b"request",
    *,
    timeout_s: float = 300.0,
    on_call: Callable[[Call], None] | None = None,
) -> Any:
    """Fetch a batch. The first fetch of a link attends before."""
    if not link.why_ended:
        link.attend()
    decoder = BatchDecoder(request=request)
    link.fetch(request, decoder, timeout_s=timeout_s, on_call=on_call or (lambda call: None))
    return decoder.result()
