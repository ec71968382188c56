"""What readers get for an exception of an endpoint. Exceptions are converted to answers and gRPC statuses only here."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator
from typing import NoReturn, TypeVar

from hetero.documents.text import one_line
from hetero.errors import ConfigError, DatasetError, ProtocolError
from hetero.system.fault_injection import Strike
from hetero.wire import framing  # before grpc: channels sets its environment
from hetero.wire.faults import Fault

import grpc  # isort: skip

__all__ = ["Failures", "UnpreparedError"]

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


class UnpreparedError(Exception):
    """The data set is not built in this process, for example after a restart. The reader prepares it and asks again."""


class Failures:
    """Converts the exceptions of one endpoint.

    Args:
        name: Name of the endpoint, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def answered(self, request: bytes, answer: Callable[[], _Result]) -> _Result | bytes:
        """Return what ``answer`` returns, or the answer that reports its exception. Raises nothing.

        Args:
            request: The bytes of the answered request.
            answer: Computes the answer.
        """
        try:
            return answer()
        except DatasetError as error:
            return framing.encode_failure(error.record, request=request)
        except BaseException as error:  # noqa: BLE001 - a broken answer must not end the thread that sends it
            return framing.encode_refusal(*self._explain(error), request=request)

    @contextlib.contextmanager
    def as_statuses(self, context: grpc.ServicerContext, strike: Strike | None) -> Iterator[None]:
        """Convert exceptions of the body of a ``with`` to the status of a call.

        Args:
            context: The call.
            strike: Faults that a test injects into the call. None without such faults.
        """
        try:
            # A fault that delays or kills happens inside of `strike`. Any other fault is returned, and aborts the call.
            if strike is not None and strike() is not None:
                context.abort(grpc.StatusCode.UNAVAILABLE, "on purpose")
            yield
        except Exception as error:  # noqa: BLE001
            self._abort(error, context)

    def _abort(self, error: Exception, context: grpc.ServicerContext) -> NoReturn:
        """End a call with the status for an exception."""
        if context.code() is not None or not context.is_active():  # type: ignore[attr-defined]
            # A handler has aborted the call, or the caller has left.
            raise error
        fault, details = self._explain(error)
        # A fault may have several statuses (`Fault`), and the reader understands each. Endpoints send the first one.
        context.abort(grpc.StatusCode[fault.value.statuses[0]], details)
        raise AssertionError("abort raises")

    def _explain(self, error: BaseException) -> tuple[Fault, str]:
        """Return the fault and the text that the reader gets for an exception of this process."""
        if isinstance(error, UnpreparedError):
            return Fault.UNPREPARED, str(error)
        # These texts are hetero's own. Details of other errors are logged here, and never sent.
        if isinstance(error, ProtocolError | ConfigError):
            return Fault.MALFORMED, one_line(str(error), max_chars=500)
        incident = secrets.token_hex(4)
        logger.error("internal error %s", incident, exc_info=error)
        return Fault.BROKEN, f"internal error {incident}, see the log of {self._name}"
