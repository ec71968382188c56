"""Tells whether two passes over a user's sampler had the same order, in a few bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from hetero.batches.indices import Indices

__all__ = ["OrderDigest"]


class OrderDigest:
    """A digest of the indices of a pass, and whether they ascend.

    A batch of 256 integers costs 3 us, and one of 256 tuples 50 us. The draws of a batch cost more.
    """

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=16)
        self._last: Any = None
        self.is_ascending = True
        """Whether no index is smaller than the one before. False if they cannot be compared."""

    def add(self, indices: Indices) -> None:
        """Add the indices of the next batch."""
        if isinstance(indices, np.ndarray):
            self._hash.update(indices.tobytes())
            ascends = self.is_ascending and bool((indices[1:] >= indices[:-1]).all())
        else:
            # An index may be a file name with bytes that are not UTF-8, which Python keeps as lone surrogates.
            self._hash.update(repr(indices).encode("utf-8", "surrogatepass"))
            ascends = self.is_ascending and _ascend(indices)
        if ascends and len(indices):
            ascends = self._last is None or _ascend((self._last, indices[0]))
            self._last = indices[-1]
        self.is_ascending = ascends

    def value(self) -> bytes:
        """Return the digest."""
        return self._hash.digest()


def _ascend(indices: Sequence[Any]) -> bool:
    try:
        return all(one <= other for one, other in itertools.pairwise(indices))
    except TypeError:
        return False
