"""Bytes of a loader's batches on their way from endpoints."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Traffic"]


@dataclass(slots=True)
class Traffic:
    """Bytes of the batches that one loader received on one rank. One thread calls `add`, any may read. Picklable."""

    compression: str | None
    """Compression that the loader requests. None: uncompressed."""
    batch_bytes: int = 0
    """Bytes before compression, with headers."""
    saved_bytes: int = 0
    """Bytes that compression kept off the network, out of `batch_bytes`."""

    def add(self, batch_bytes: int, saved_bytes: int) -> None:
        """Count a batch that is about to be delivered."""
        self.batch_bytes += batch_bytes
        self.saved_bytes += saved_bytes
