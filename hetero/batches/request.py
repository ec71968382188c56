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
"""An array where all are integers, which is what 10^9 of them need."""
SampleErrorPolicy: TypeAlias = Literal["raise", "skip"]
"""What becomes of a batch with a sample that raises: an error, or `hetero.batches.skips`."""
SAMPLE_ERROR_POLICIES: tuple[str, ...] = get_args(SampleErrorPolicy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchRequest:
    """Everything that a batch depends on, and how to compute it.

    Raises:
        ConfigError: If the fields contradict each other.
    """

    spec: DatasetSpec
    """The data set."""
    indices: Indices
    """What the sampler yielded: int64 array, or a tuple if there are other keys; see `as_indices`."""
    occurrences: npt.NDArray[np.uint32] | None = None
    """Per index, how often it came before in the epoch's global order; None: all 0."""
    seed: int
    """The loader's, signed 64-bit."""
    epoch: int
    """At least 0."""
    position: int
    """Of this batch in the epoch's global order, at least 0."""
    collate: bool = True
    """False: exactly one index, and the sample itself, as torch's ``batch_size=None``."""
    as_is: bool = False
    """Without collation and without a ``collate_fn``: the sample itself, not torch's ``default_convert`` of it."""
    contiguous: bool = False
    """Whether torch's own collation makes contiguous tensors, as it does in torch's workers and nowhere else."""
    step: int = 0
    """Of the rank that asks; lower ones are served first. No part of the batch."""
    verify: bool = False
    """Compute twice and compare: the purity check."""
    on_sample_error: SampleErrorPolicy = "raise"
    """``"skip"``: another sample of the batch stands in for one that raises."""
    compression: str | None = None
    """Of the payload on its way, see `hetero.wire.compression`; no part of the batch."""

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
    """Return what a sampler yielded in the form that `BatchRequest` takes.

    Args:
        indices: See `hetero.batches.indices.plain_index`.

    Returns:
        A new int64 array if all are integers of 64 bits, else a tuple. Lists in it are new ones.

    Raises:
        ConfigError: If one is of another type.
    """
    if isinstance(indices, np.ndarray) and indices.dtype.kind in "iu" and indices.ndim == 1:
        if indices.dtype.kind == "u" and indices.size and int(indices.max()) >= 2**63:
            return tuple(indices.tolist())
        return indices.astype(np.int64)  # a copy: a sampler may fill one array again and again
    plain: list[Any] = list(indices)
    # Nearly all samplers yield Python's integers: nothing to convert, and 3 us instead of 12 for 64 of them.
    if set(map(type, plain)) != {int}:
        plain = [plain_index(index) for index in plain]
        if any(type(index) is not int for index in plain):
            return tuple(plain)
    try:
        return np.array(plain, dtype=np.int64)
    except OverflowError:
        return tuple(plain)


def plain_indices(indices: Indices) -> Sequence[Index]:
    """Return the indices as data sets get them: in Python's own types."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices
