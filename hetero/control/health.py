"""The standard health service (``grpc.health.v1``), for probes and load balancers.

Anyone may call it, so it returns only whether the server is SERVING. Its two messages have one field each, so this
module encodes and decodes them without generated code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetero.control.security import Policy, serve_on
from hetero.wire import channels  # noqa: F401  (before grpc, because channels sets grpc's environment)

import grpc  # isort: skip

__all__ = ["HEALTH_POLICIES", "Health"]

_SERVICE = "grpc.health.v1.Health"

HEALTH_POLICIES: Mapping[str, Policy] = {f"/{_SERVICE}/Check": Policy.OPEN, f"/{_SERVICE}/Watch": Policy.OPEN}

_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
_SERVICE_UNKNOWN = b"\x08\x03"


class Health:
    """The health service of one server. Thread-safe. It reports SERVING until `set_serving` changes it.

    Args:
        services: Names of the server's services. The empty name, which means all services, is always known.
    """

    MAX_WATCHERS = 4
    """Limit on watchers. Each watcher holds a thread, and unauthenticated peers may watch."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._changed = threading.Condition()
        self._is_serving = True
        self._num_watchers = 0

    def set_serving(self, serving: bool) -> None:
        """Set whether the server accepts work, and notify all watchers."""
        with self._changed:
            self._is_serving = serving
            self._changed.notify_all()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the service for ``grpc.server``."""
        # A separate pool: unauthenticated peers may call, and must not make the server start all of its threads.
        threads = ThreadPoolExecutor(self.MAX_WATCHERS + 2, thread_name_prefix="health")
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(serve_on(threads, functools.partial(self._check))),
                "Watch": grpc.unary_stream_rpc_method_handler(serve_on(threads, functools.partial(self._watch))),
            },
        )

    def _check(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        if _service_name(request) not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._answer()

    def _watch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        known = _service_name(request) in self._services
        with self._changed:
            if self._num_watchers >= self.MAX_WATCHERS:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watchers")
            self._num_watchers += 1
        try:
            sent = b""
            while context.is_active():
                answer = self._answer() if known else _SERVICE_UNKNOWN
                if answer != sent:
                    sent = answer
                    yield answer
                with self._changed:
                    self._changed.wait(0.5)  # bounded, because a cancelled watch must free its thread
        finally:
            with self._changed:
                self._num_watchers -= 1

    def _answer(self) -> bytes:
        with self._changed:
            return _SERVING if self._is_serving else _NOT_SERVING


def _service_name(request: bytes) -> str | None:
    """Return field 1 of a HealthCheckRequest, or None if the bytes are not such a request or are too long."""
    if not request:
        return ""
    if len(request) < 2 or len(request) > 129 or request[0] != 0x0A or request[1] != len(request) - 2:
        return None
    return request[2:].decode("utf-8", "replace")
