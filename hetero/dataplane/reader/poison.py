"""The endpoints that were lost with one request, and whether the request is to blame. No threads, no network.

If an endpoint ends while its host stays, the request may have killed it. After three such deaths the request fails with
an error that names it. If an endpoint is lost with its host, that says nothing about the request, because cables are
cut and spot instances are taken away. Such losses are bounded by time and by the endpoints that are left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hetero.dataplane.reader.connection import EndpointConnection
from hetero.dataplane.reader.failures import MAX_ATTEMPTS, Fault
from hetero.spec import DatasetSpec

__all__ = ["Losses"]


@dataclass(slots=True)
class Losses:
    """The endpoints that were lost with one request."""

    endpoints: list[EndpointConnection] = field(default_factory=list)
    """Endpoints that were lost while they had the request, and that it may have killed."""
    is_suspect: bool = False
    """Whether the request may have killed its endpoint. Such a request runs alone."""
    num_calls: int = 0
    """Calls that failed because the endpoint was lost, whether or not it had the request."""
    first_s: float = 0.0
    """Monotonic time when the first of these calls failed."""

    def add(self, connection: EndpointConnection, fault: Fault, now_s: float, *, was_first: bool) -> None:
        """Record that the request's endpoint could not be reached or was lost. Blame the request only if it was sent.

        The request that the endpoint was probably computing runs alone at once. Any other request runs alone after its
        second loss. Therefore a poisonous request causes its third death alone. And if a host is lost, the requests
        that were queued there need not all run alone.
        """
        if not self.num_calls:
            self.first_s = now_s
        self.num_calls += 1
        if fault is Fault.UNSENT:
            return
        is_repeated = connection in self.endpoints  # it served again meanwhile, and can die only once
        if not is_repeated:
            self.endpoints.append(connection)
        self.is_suspect = was_first or is_repeated or len(self.endpoints) > 1

    def may_be_deaths(self, spec: DatasetSpec) -> bool:
        """Return whether one more loss could be one death too many. Forget losses that were not deaths.

        An endpoint has not died if it serves again, or if it left the directory with its host.

        Args:
            spec: The request's data set.
        """
        self.endpoints = [
            lost for lost in self.endpoints if not lost.serves(spec) and (lost.has_died or not lost.is_retired)
        ]
        return len(self.endpoints) >= MAX_ATTEMPTS

    @property
    def are_deaths(self) -> bool:
        """Whether the request has to fail, because enough of the losses are known to be deaths."""
        return sum(lost.has_died for lost in self.endpoints) >= MAX_ATTEMPTS

    def too_long_s(self, now_s: float, *, data_timeout_s: float) -> float | None:
        """Return for how many seconds calls for this request have been lost, if that is too long, else None.

        This bounds the losses that a count of deaths does not bound. Some endpoints come back whenever they are called,
        but no batch comes through their connections. Of some it never becomes known whether they died. And hosts can be
        lost one by one.
        """
        lost_s = now_s - self.first_s
        return lost_s if self.num_calls >= MAX_ATTEMPTS and lost_s > data_timeout_s else None
