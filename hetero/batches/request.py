"""Everything that a batch depends on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from hetero.batches.indices import plain_index
from hetero.errors import ConfigError
from hetero.spec import DatasetSpec, Index

__all__ = ["SAMPLE_ERROR_POLICIES", "BatchRequest", "Indices", "SampleErrorPolicy", "as_indices", "plain_indices"]

Indices: TypeAlias = npt.NDArray[np.int64] | tuple[Index, ...]
"""An array if all indices are integers, because 10^9 indices need a compact form, else a tuple."""
SampleErrorPolicy: TypeAlias = Literal["raise", "skip"]
"""Handling of a sample that raises: raise an error, or skip the sample as `hetero.batches.skips` describes."""
SAMPLE_ERROR_POLICIES: tuple[str, ...] = get_args(SampleErrorPolicy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRequest:
    """Everything that a batch depends on, and options for computing and sending it.

    Raises:
        ConfigError: If the fields contradict each other.
    """

    spec: DatasetSpec
    """Spec of the data set."""
    indices: Indices
    """Indices that the sampler yielded: an int64 array, or a tuple if some are not integers. See `as_indices`."""
    occurrences: npt.NDArray[np.uint32] | None = None
    """For each index, how often it came before in the epoch's global order. None means that all are 0."""
    seed: int
    """Seed of the loader, signed 64-bit."""
    epoch: int
    """Number of the epoch, at least 0."""
    position: int
    """Position of this batch in the epoch's global order, at least 0."""
    collate: bool = True
    """Whether to collate. If not, there is exactly one index, as with torch's ``batch_size=None``."""
    as_is: bool = False
    """Whether to return the sample itself, without torch's ``default_convert``.

    Ignored with collation or with a ``collate_fn``.
    """
    contiguous: bool = False
    """Whether torch's own collation makes contiguous tensors. torch itself does so only in its workers."""
    step: int = 0
    """Step of the rank that sends the request. Lower steps are served first. The batch does not depend on it."""
    verify: bool = False
    """Whether to compute the batch twice and compare the results (the purity check)."""
    on_sample_error: SampleErrorPolicy = "raise"
    """With ``"skip"``, another sample of the batch replaces a sample that raises."""
    compression: str | None = None
    """Compression for sending the payload, see `hetero.wire.compression`. The batch does not depend on it."""

    def __post_init__(self) -> None:
        if self.occurrences is not None and len(self.occurrences) != len(self.indices):
            raise ConfigError(f"{len(self.indices)} indices but {len(self.occurrences)} occurrences; expected as many")
        if not self.collate and len(self.indices) != 1:
            raise ConfigError(f"a request without collation has {len(self.indices)} indices, expected exactly 1")
        if self.on_sample_error not in SAMPLE_ERROR_POLICIES:
            raise ConfigError(f"on_sample_error is {self.on_sample_error!r}, expected 'raise' or 'skip'")
        if self.on_sample_error == "skip" and not self.collate:
            raise ConfigError("a request without collation has no other sample that could stand in: no 'skip' for it")


def as_indices(indices: Iterable[Any]) -> Indices:
    """Return a sampler's indices in the form that `BatchRequest` takes.

    Args:
        indices: Indices of the types that `hetero.batches.indices.plain_index` accepts.

    Returns:
        A new int64 array if all indices are integers of 64 bits, else a tuple. Lists in the tuple are copies.

    Raises:
        ConfigError: If an index has another type.
    """
    if isinstance(indices, np.ndarray) and indices.dtype.kind in "iu" and indices.ndim == 1:
        if indices.dtype.kind == "u" and indices.size and int(indices.max()) >= 2**63:
            return tuple(indices.tolist())
        return indices.astype(np.int64)  # a copy, because a sampler may reuse its array
    plain: list[Any] = list(indices)
    # Nearly all samplers yield Python's integers. They need no conversion, which takes 3 us instead of 12 for 64 of
    # them.
    if set(map(type, plain)) != {int}:
        plain = [plain_index(index) for index in plain]
        if any(type(index) is not int for index in plain):
            return tuple(plain)
    try:
        return np.array(plain, dtype=np.int64)
    except OverflowError:
        return tuple(plain)


def plain_indices(indices: Indices) -> Sequence[Index]:
    """Return the indices in Python's own types, which is the form that data sets receive."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices
