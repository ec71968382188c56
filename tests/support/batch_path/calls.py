"""Calls that fail, or end later, what readers ask of endpoints, and times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hetero.wire.faults import CallFailedError, Fault

LARGE = 2**26  # bytes: more than all buffers on the way hold
Measured = Callable[[str, float], None]
"""What the fixture ``measured`` gives: it records a time of the test."""


@dataclass
class Asked:
    """A request for a batch as one endpoint got it."""

    at_s: float
    """Monotonic."""
    endpoint: tuple[str, str]
    """Id and incarnation."""
    position: int
    is_answered: bool | None = None
    """Whether the batch came. None while that is not known."""


def fault_of(work: Callable[[], object]) -> tuple[Fault, str]:
    with pytest.raises(CallFailedError) as caught:
        work()
    return caught.value.fault, caught.value.details


def in_thread(work: Callable[[], object]) -> Callable[[], Any]:
    """Run it in a thread. Return a function that waits for its result or its exception."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised by join
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join() -> Any:
        thread.join(100)
        (outcome,) = found
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    return join
