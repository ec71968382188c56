"""What both ends of the data plane count."""

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
    """Counters since the fleet was made."""

    batches: int = 0
    received_bytes: int = 0
    """Batches as they travelled, headers included."""
    saved_bytes: int = 0
    """What batches would have had in addition without compression."""
    uncompressed: int = 0
    """Batches for which compression was asked, from endpoints that lack its package."""
    retries: int = 0
    """Requests sent again, for whatever reason."""
    failovers: int = 0
    """Requests given to another endpoint, or again, because theirs could not be reached, or not any more."""
    checksum_errors: int = 0
    """Batches that arrived damaged."""
    endpoint_losses: int = 0
    """Times that an endpoint in use could not be reached any more."""
    hedges: int = 0
    """Requests issued a second time while the first attempt was still in progress, because that was overdue."""
    hedges_won: int = 0
    """Batches that came from the second attempt."""
