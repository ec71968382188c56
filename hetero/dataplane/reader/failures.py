"""Why a call to an endpoint failed. Distinguishes what the reader acts on."""

from __future__ import annotations

import enum

__all__ = ["MAX_ATTEMPTS", "CallFailedError", "Fault"]

MAX_ATTEMPTS = 3
"""Deaths, late answers, damaged arrivals or internal failures, each counted apart, after which a request fails."""


class Fault(enum.Enum):
    """The cause of a failed call, which decides what the reader does next."""

    UNSENT = "it could not be asked"
    """The request cannot have reached the endpoint, so it did not cause the endpoint's end."""
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
        """Whether the endpoint could not be reached or was lost."""
        return self in (Fault.UNREACHABLE, Fault.UNSENT)


class CallFailedError(Exception):
    """A failed call to one endpoint. The fleet decides what the failure means."""

    def __init__(self, fault: Fault, details: str) -> None:
        super().__init__(fault, details)
        self.fault = fault
        self.details = details

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.details}" if self.details else self.fault.value
