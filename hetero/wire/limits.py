"""The protocol's constants, and bounds of the memory that a peer can make this process allocate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from hetero.batches.structure.limits import StructureLimits
from hetero.errors import ConfigError

__all__ = [
    "AT_ONCE_BYTES",
    "BLOCK_BYTES",
    "GREETING",
    "MAX_FETCH_BYTES",
    "MAX_HELPERS",
    "MAX_PARSED_BYTES",
    "MAX_SKIPS_BYTES",
    "PROTOCOL",
    "SERVICE",
    "SESSION_TOKEN_BYTES",
    "Limits",
]

PROTOCOL = 11
"""Version of the data plane's messages. Both sides must have the same version."""
SERVICE = "hetero.v1.Data"
"""Name of the data plane's gRPC service."""
GREETING = b"hetero"
"""First bytes of a connection for batches. The session token follows."""
SESSION_TOKEN_BYTES = 32
"""Length of the token that an endpoint issues to a reader. The reader sends it on each of its connections."""
BLOCK_BYTES = 2**20
"""Size of the blocks of a compressed leaf. Only the last block may be smaller. The size is part of the protocol.

Larger blocks do not compress better: with photographs, 64 KiB, 256 KiB and 1 MiB differ by less than 3 %. With smaller
blocks, threads need the interpreter's lock more often. A receiver needs the memory of one block in addition.
"""
MAX_FETCH_BYTES = 16 * 2**20
"""Largest request for a batch. A sample takes 8 bytes for a 64-bit index, 4 for its occurrences and 1 for its owner. A
batch of lanes has their states."""
MAX_PARSED_BYTES = 2**20
"""Largest size of a request's keys, helpers, and lanes. After parsing, they take many times this size in memory."""
AT_ONCE_BYTES = 2 * 2**20
"""Largest batch that an endpoint's compute thread sends itself, and that the training loop may receive itself."""
MAX_EXPECTED = 8
"""Largest number of data sets that a reader announces."""
MAX_EXPECTED_BYTES = 4096
"""Largest size of the arguments of an announced data set."""
MAX_HELPERS = 63
"""Largest number of other hosts that may compute samples of one batch."""
MAX_SKIPS_BYTES = 96 * 2**10
"""Largest list of a batch's skipped samples: 32 entries of 2 * 160 characters take less, with 4 bytes for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(StructureLimits):
    """Bounds of requests and batches. Receivers check them before they allocate."""

    max_header_bytes: int = 2**20
    """Bytes of a batch's structure: its tree, and the dtypes and shapes of the leaves."""
    max_failure_bytes: int = 64 * 2**10
    """Bytes of an exception with its traceback."""
    max_indices: int = 2**20
    """Samples per batch."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{field.name} is {value!r}, expected an integer of at least 1")

    @property
    def max_answer_bytes(self) -> int:
        """Bytes of one message from an endpoint, without payload."""
        # A header also has up to 4 bytes for each block. Each leaf may have one block that is not full, so there are at
        # most this many blocks. 1,024 bytes are for the other fields.
        num_blocks = self.max_batch_bytes // BLOCK_BYTES + self.max_leaves
        return max(self.max_header_bytes, self.max_failure_bytes) + 4 * num_blocks + MAX_SKIPS_BYTES + 1024

    def within(self, max_batch_bytes: int) -> Limits:
        """Return these limits with a smaller ``max_batch_bytes``. A larger number, or 0, changes nothing."""
        if not 0 < max_batch_bytes < self.max_batch_bytes:
            return self
        return dataclasses.replace(self, max_batch_bytes=max_batch_bytes)
