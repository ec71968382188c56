"""What the batches of a loader took on their way from endpoints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Bytes of the batches that one loader received on one rank. One thread calls `add`; any may read. Picklable."""

    compression: str | None
    """As which they are asked for; None: as they are."""
    batch_bytes: int = 0
    """Before compression, headers included."""
    saved_bytes: int = 0
    """Of them, those that compression kept off the network."""

    def add(self, batch_bytes: int, saved_bytes: int) -> None:
        """Take in a batch that is about to be delivered."""
        self.batch_bytes += batch_bytes
        self.saved_bytes += saved_bytes
