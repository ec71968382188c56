"""gRPC calls of an endpoint that fail on purpose, if faults are set: see `hetero.system.fault_injection`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hetero.system.fault_injection import Strike, faults_at
from hetero.wire import channels  # noqa: F401 - before grpc: sets its environment

import grpc  # isort: skip

__all__ = ["faulty_calls"]

_SITES = ("Prepare", "Describe", "Attend")


def faulty_calls() -> list[Any]:
    """Return an interceptor if calls are to fail in this process. Put it behind the one that checks tokens.

    Raises:
        ConfigError: If `HETERO_FAULTS` is malformed.
    """
    strikes = {site: strike for site in _SITES if (strike := faults_at(site)) is not None}
    return [_FaultyCalls(strikes)] if strikes else []


class _FaultyCalls(grpc.ServerInterceptor):  # type: ignore[type-arg]
    def __init__(self, strikes: dict[str, Strike]) -> None:
        self._strikes = strikes

    def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        """Wrap the handlers of the calls that are to fail."""
        handler = continuation(handler_call_details)
        strike = self._strikes.get(handler_call_details.method.rpartition("/")[2])
        if handler is None or strike is None:
            return handler

        def go_wrong(context: grpc.ServicerContext) -> None:
            if strike() is not None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "on purpose")

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            go_wrong(context)
            return handler.unary_unary(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Any:
            go_wrong(context)
            yield from handler.unary_stream(request, context)

        return (
            grpc.unary_stream_rpc_method_handler(stream)
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler(answer)
        )
