"""The counters of both ends of the data plane."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EndpointStatistics", "FleetStatistics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatistics:
    """Counters of one endpoint process since its start."""

    num_batches: int = 0
    num_overruns: int = 0
    """Emulated batches whose real work took longer than the emulated time."""
    auth_failures: int = 0


@dataclass(slots=True, kw_only=True)
class FleetStatistics:
    """Counters of one fleet since its creation."""

    batches: int = 0
    received_bytes: int = 0
    """Bytes of batches on the network: after compression, with headers."""
    saved_bytes: int = 0
    """Bytes that compression kept off the network."""
    uncompressed: int = 0
    """Batches whose request asked for compression, from endpoints that lack the package for it."""
    retries: int = 0
    """Requests sent again, for any reason."""
    failovers: int = 0
    """Requests sent again, to the same or another endpoint, because their endpoint could not be reached or was lost."""
    checksum_errors: int = 0
    """Batches that arrived damaged."""
    endpoint_losses: int = 0
    """Times that the reader lost an endpoint that it was using."""
    hedges: int = 0
    """Requests sent a second time because their first attempt, still in progress, was overdue."""
    hedges_won: int = 0
    """Batches that came from the second attempt."""
