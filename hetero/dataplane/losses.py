"""The endpoints that were lost with one request, and when they are too many. No threads, no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.dataplane.connection import EndpointConnection
from hetero.dataplane.failures import MAX_ATTEMPTS, Fault

__all__ = ["Losses"]


@dataclass(slots=True)
class Losses:
    """What one request was lost with."""

    endpoints: list[tuple[str, str]] = field(default_factory=list)
    """Incarnations of those that could not be reached any more while they had it."""
    is_suspect: bool = False
    """The request may be what killed its endpoint: it runs alone."""
    num_calls: int = 0
    """Calls that failed because the endpoint could not be reached, whether or not it had the request."""
    first_s: float = 0.0
    """Monotonic: when the first of them failed."""

    def add(self, connection: EndpointConnection, fault: Fault, now_s: float, *, was_first: bool) -> None:
        """Note that its endpoint could not be reached, or not any more. It is blamed only if it was sent.

        The one that the endpoint was probably computing runs alone at once; any other after its second loss. Thus a
        poisonous one dies alone the third time, and the loss of a host does not send everything that was queued there
        through a needle's eye.
        """
        if not self.num_calls:
            self.first_s = now_s
        self.num_calls += 1
        if fault is Fault.UNSENT:
            return
        self.endpoints.append(connection.identity)
        self.is_suspect = was_first or len(self.endpoints) > 1

    def forget(self, is_back: Callable[[tuple[str, str]], bool]) -> None:
        """Leave out the endpoints that serve again."""
        self.endpoints = [identity for identity in self.endpoints if not is_back(identity)]

    def too_long_s(self, now_s: float, *, data_timeout_s: float) -> float | None:
        """Return for how long endpoints have been lost with it, if that is too long; None if not.

        It bounds what no count of deaths does: endpoints that come back whenever they are called, but through whose
        connections no batch comes, or of which nobody can say whether they died.
        """
        lost_s = now_s - self.first_s
        return lost_s if self.num_calls >= MAX_ATTEMPTS and lost_s > data_timeout_s else None
