"""The standard health service (``grpc.health.v1``), for probes and load balancers.

Open to anybody, so it says nothing but SERVING or not. Its two messages have
one field each and are written and read by hand.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetero.control.security import Policy, serve_on
from hetero.wire import channels  # noqa: F401  (before grpc: sets its environment)

import grpc  # isort: skip

__all__ = ["HEALTH_POLICIES", "Health"]

_SERVICE = "grpc.health.v1.Health"

HEALTH_POLICIES: Mapping[str, Policy] = {f"/{_SERVICE}/Check": Policy.OPEN, f"/{_SERVICE}/Watch": Policy.OPEN}

_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
_SERVICE_UNKNOWN = b"\x08\x03"


class Health:
    """Whether this server wants work. Thread-safe; serving from the start.

    Args:
        services: Service names known here; the empty name, which stands for all, is always known.
    """

    MAX_WATCHERS = 4
    """Each holds a thread, and strangers may watch."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._changed = threading.Condition()
        self._is_serving = True
        self._num_watchers = 0

    def set_serving(self, serving: bool) -> None:
        """Change the answer, and tell those who watch."""
        with self._changed:
            self._is_serving = serving
            self._changed.notify_all()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the service for ``grpc.server``."""
        # Of its own: strangers may ask, and must not make the server start as many threads as it has.
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
                    self._changed.wait(0.5)  # bounded: a watch that was cancelled must free its thread
        finally:
            with self._changed:
                self._num_watchers -= 1

    def _answer(self) -> bytes:
        with self._changed:
            return _SERVING if self._is_serving else _NOT_SERVING


def _service_name(request: bytes) -> str | None:
    """Return field 1 of a HealthCheckRequest; None if these bytes are none, or the name is absurd."""
    if not request:
        return ""
    if len(request) < 2 or len(request) > 129 or request[0] != 0x0A or request[1] != len(request) - 2:
        return None
    return request[2:].decode("utf-8", "replace")
