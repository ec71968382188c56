"""What a peer may make us allocate, and the protocol's version."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hetero.batches.limits import StructureLimits
from hetero.errors import ConfigError

__all__ = ["BLOCK_BYTES", "MAX_FETCH_BYTES", "MAX_KEYED_FETCH_BYTES", "MAX_SKIPS_BYTES", "PROTOCOL", "Limits"]

PROTOCOL = 6
"""Version of the data plane's messages; both sides must have the same."""
BLOCK_BYTES = 2**20
"""Of a leaf that travels compressed, but for its last block; part of the protocol.

Larger ones compress no better (measured with photographs: 64 KiB, 256 KiB and 1 MiB differ by less than 3 %), smaller
ones take the interpreter's lock more often, and a receiver needs one of them as extra memory.
"""
MAX_FETCH_BYTES = 16 * 2**20
"""Of a request for a batch: 8 bytes for each index that is an integer of 64 bits, and up to 5 for its occurrences."""
MAX_KEYED_FETCH_BYTES = 2**20
"""Of a request with other indices, which take many times their bytes as messages."""
MAX_SKIPS_BYTES = 96 * 2**10
"""Of a batch's list of skipped samples: 100 times 64 and 160 characters, of up to 4 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(StructureLimits):
    """Bounds of requests and batches. Receivers check them before they allocate."""

    max_header_bytes: int = 2**20
    """Structure of a batch: its tree, and dtypes and shapes of its leaves."""
    max_failure_bytes: int = 64 * 2**10
    """An exception with its traceback."""
    max_indices: int = 2**20
    """Samples per batch."""
    max_index_bytes: int = 4096
    """Of a str, in UTF-8, or of bytes in an index."""
    max_index_integer_bytes: int = 1024
    """Of an integer in an index. Python does not write one of over 4,300 digits, 1,786 bytes, into an error message."""
    max_index_parts: int = 65_536
    """All indices of a request, and what those that are tuples and lists hold."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{field.name} is {value!r}, expected an integer of at least 1")

    @property
    def max_answer_bytes(self) -> int:
        """One message from an endpoint, payload excluded."""
        # Besides the structure a header has up to 4 bytes per block, whole ones and one more of each leaf.
        num_blocks = self.max_batch_bytes // BLOCK_BYTES + self.max_leaves
        return max(self.max_header_bytes, self.max_failure_bytes) + 4 * num_blocks + MAX_SKIPS_BYTES + 1024

    def within(self, max_batch_bytes: int) -> Limits:
        """Return these limits with batches no larger than a request asks for; 0 asks for nothing."""
        if not 0 < max_batch_bytes < self.max_batch_bytes:
            return self
        return dataclasses.replace(self, max_batch_bytes=max_batch_bytes)
