"""Why a call to an endpoint failed, as far as the reader draws conclusions from it."""

from __future__ import annotations

import enum

__all__ = ["MAX_ATTEMPTS", "CallFailedError", "Fault"]

MAX_ATTEMPTS = 3
"""Deaths, damaged arrivals, or late answers of one request before it fails by name."""


class Fault(enum.Enum):
    """What is to be done next depends on it."""

    UNSENT = "it could not be asked"
    """The request cannot have reached it: whatever ended it, this request did not."""
    UNREACHABLE = "the connection failed"
    LATE = "no answer in time"
    BUSY = "it has too many requests in work"
    UNPREPARED = "it has not built the data set"
    FOREIGN = "it is not the endpoint that was meant"
    MALFORMED = "it does not understand the request"
    CANCELLED = "the call was given up"
    BROKEN = "it failed internally"

    @property
    def is_loss(self) -> bool:
        """Whether the endpoint is not there, or not any more."""
        return self in (Fault.UNREACHABLE, Fault.UNSENT)


class CallFailedError(Exception):
    """A call to one endpoint failed; the fleet decides what that means."""

    def __init__(self, fault: Fault, details: str) -> None:
        super().__init__(fault, details)
        self.fault = fault
        self.details = details

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.details}" if self.details else self.fault.value
