"""The callbacks that a script registers for a stop of the job, and their failures."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["CallbackFailure", "run_callbacks"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFailure:
    """Why a callback failed."""

    summary: str
    """The reason in one line."""
    detail: str
    """Traceback."""


def run_callbacks(callbacks: Iterable[Callable[[], object]]) -> list[CallbackFailure]:
    """Run all callbacks, even if some of them raise. Log and return the failures."""
    failures = []
    for callback in callbacks:
        try:
            callback()
        except (Exception, SystemExit) as error:
            # A callback that ends the process with success has done its work.
            if isinstance(error, SystemExit) and error.code in (None, 0):
                continue
            logger.exception("a stop callback failed")
            line = traceback.format_exception_only(type(error), error)[-1].strip()
            detail = "".join(traceback.format_exception(error))
            failures.append(CallbackFailure(summary=f"a stop callback raised {line}", detail=detail))
    return failures
