"""The endpoints that were lost with one request, and whether it is to blame. No threads, no network.

One that ended while its host stayed may have ended of the request: after three such deaths the request fails by name.
One that was lost with its host says nothing of what it had: cables are cut, and spot instances taken away. What bounds
those losses is time, and the endpoints that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero.dataplane.reader.connection import EndpointConnection
from hetero.dataplane.reader.failures import MAX_ATTEMPTS, Fault
from hetero.spec import DatasetSpec

__all__ = ["Losses"]


@dataclass(slots=True)
class Losses:
    """What one request was lost with."""

    endpoints: list[EndpointConnection] = field(default_factory=list)
    """Those that could not be reached any more while they had it, and may have died of it."""
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
        is_repeated = connection in self.endpoints  # it served again meanwhile: it can die only once
        if not is_repeated:
            self.endpoints.append(connection)
        self.is_suspect = was_first or is_repeated or len(self.endpoints) > 1

    def may_be_deaths(self, spec: DatasetSpec) -> bool:
        """Tell whether one loss more could be one death too many: forget what by now is known to be none.

        An endpoint has not died that serves again, or that left the directory with its host.

        Args:
            spec: The request's data set.
        """
        self.endpoints = [
            lost for lost in self.endpoints if not lost.serves(spec) and (lost.has_died or not lost.is_retired)
        ]
        return len(self.endpoints) >= MAX_ATTEMPTS

    @property
    def are_deaths(self) -> bool:
        """Whether so many of them are deaths that the request has to fail."""
        return sum(lost.has_died for lost in self.endpoints) >= MAX_ATTEMPTS

    def too_long_s(self, now_s: float, *, data_timeout_s: float) -> float | None:
        """Return for how long endpoints have been lost with it, if that is too long; None if not.

        It bounds what no count of deaths does: endpoints that come back whenever they are called, but through whose
        connections no batch comes, or of which nobody can say whether they died; and hosts that are lost one by one.
        """
        lost_s = now_s - self.first_s
        return lost_s if self.num_calls >= MAX_ATTEMPTS and lost_s > data_timeout_s else None
