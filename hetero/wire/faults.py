"""The catalogue of faults: why a call to an endpoint fails, how the reader notices it, and what the reader does.

If an endpoint refuses a request for a batch, it sends a message that names the fault. If it refuses any other call, it
sends a gRPC status. The reader itself notices all other faults. A wrong token is not in the catalogue, because it ends
all reading (`hetero.errors.AuthenticationError`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["MAX_ATTEMPTS", "CallFailedError", "Fault", "fault_of_status"]

MAX_ATTEMPTS = 3
"""A request fails after this many failures of one kind: endpoint deaths, late or damaged answers, internal failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    text: str
    """Public text. Details may follow."""
    is_refusal: bool = False
    """Whether an endpoint may refuse a request for a batch with this fault. If so, its name is part of the protocol."""
    statuses: tuple[str, ...] = ()
    """gRPC statuses that mean this fault. Endpoints send the first one."""


class Fault(enum.Enum):
    """The cause of a failed call, which decides what the reader does next."""

    # Each fault has a comment that says what the reader does with the request and with the endpoint.

    # Request elsewhere. Connect again after a back-off. Do not blame the request, because it was not sent. If an
    # endpoint dies while it is idle, the next request to it fails before it is sent. When this counted, a batch that
    # had killed no endpoint failed after three such deaths.
    UNSENT = _Entry(text="the request could not be sent")
    # Request elsewhere. Connect again after a back-off. Count a death if the endpoint ended. Closing the channel
    # cancels its calls.
    UNREACHABLE = _Entry(text="the connection failed", statuses=("UNAVAILABLE", "CANCELLED"))
    # As for UNREACHABLE, but do not blame the request, because its batch was computed.
    CUT_OFF = _Entry(text="the connection failed during the answer")
    # Request again, up to three times. Prefer other endpoints for a second.
    LATE = _Entry(text="no answer in time", statuses=("DEADLINE_EXCEEDED",))
    # Request elsewhere. Do not use the endpoint for a fraction of a second.
    BUSY = _Entry(text="it has too many requests", is_refusal=True, statuses=("RESOURCE_EXHAUSTED",))
    # Request elsewhere. Prepare the endpoint again.
    UNPREPARED = _Entry(text="it has not built the data set", is_refusal=True, statuses=("NOT_FOUND",))
    # Request elsewhere. Never use this incarnation again.
    FOREIGN = _Entry(text="it is not the intended endpoint", statuses=("FAILED_PRECONDITION",))
    # Raise ProtocolError. No endpoint would understand the request.
    MALFORMED = _Entry(
        text="it does not understand the request", is_refusal=True, statuses=("INVALID_ARGUMENT", "UNIMPLEMENTED")
    )
    # Do nothing, because the reader itself gave up the call.
    CANCELLED = _Entry(text="the call was cancelled")
    # Request again, up to three times. Prefer other endpoints for a second.
    BROKEN = _Entry(text="it failed internally", is_refusal=True, statuses=("INTERNAL",))

    @property
    def is_loss(self) -> bool:
        """Whether the endpoint could not be reached or was lost."""
        return self in (Fault.UNREACHABLE, Fault.UNSENT, Fault.CUT_OFF)


_FAULT_OF_STATUS = {status: fault for fault in Fault for status in fault.value.statuses}


def fault_of_status(name: str) -> Fault:
    """Return the fault for the name of a gRPC status. A status that endpoints do not send is `Fault.BROKEN`."""
    return _FAULT_OF_STATUS.get(name, Fault.BROKEN)


class CallFailedError(Exception):
    """A failed call to one endpoint. The fleet decides what the failure means."""

    def __init__(self, fault: Fault, details: str) -> None:
        super().__init__(fault, details)
        self.fault = fault
        self.details = details

    def __str__(self) -> str:
        return f"{self.fault.value.text}: {self.details}" if self.details else self.fault.value.text
