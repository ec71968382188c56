"""Samples that raise, and the samples of the same batch that replace them.

With ``on_sample_error="skip"``, the next sample of the batch that does not raise replaces a sample that raised, so the
batch keeps its size. After the last sample, the search continues with the first. Whether a sample raises depends only
on the data set, the index and the random numbers. The batch is therefore the same in every process that computes it.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from hetero.batches.failures import dataset_error, exception_line, index_text, with_note
from hetero.errors import DatasetError
from hetero.spec import Index

__all__ = ["MAX_LISTED", "FailedSamples", "Skip", "Skips"]

MAX_LISTED = 32
"""Limit on the skipped samples that a batch lists, and that the report of a loader lists. All are counted. The
list is part of the answer for a batch, see `hetero.batches.failures.MAX_SKIP_CHARS`."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """One sample that raised."""

    index: str
    """``repr`` of the requested index, printable, at most 160 characters."""
    exception: str
    """First line of the exception with its type, printable, at most 160 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skips:
    """The samples of one batch that raised and were replaced by others."""

    num_skipped: int
    listed: tuple[Skip, ...]
    """The first 32 skipped samples, in the order of the batch."""
    epoch: int = 0
    host: str = ""
    """Host and endpoint that computed the batch, or ``local``. It is not sent, because the receiver knows it."""


class FailedSamples:
    """Record of the samples of one batch that raised, for use while the batch is computed.

    An instance is false in a condition (``if failed:``) if no sample raised.

    Args:
        indices: Indices of the batch.
        dataset: Registered name.
        host: Host that computes the batch.
        epoch: Epoch of the batch.
    """

    def __init__(self, indices: Sequence[Index], *, dataset: str, host: str, epoch: int) -> None:
        self.positions: list[int] = []
        """Positions of the failed samples in the batch, ascending."""
        self._indices = indices
        self._dataset = dataset
        self._host = host
        self._epoch = epoch
        self._listed: list[Skip] = []
        """The first `MAX_LISTED` failed samples, for the report."""
        self._first_error: DatasetError | None = None
        """Error of the first failed sample. It is raised if no sample can be the substitute."""
        self._working: list[int] | None = None
        """Positions of the samples that did not raise, ascending. None before the first call of `substitute`."""

    def __bool__(self) -> bool:
        return bool(self.positions)

    def add(self, position: int, error: BaseException) -> None:
        """Record that the sample at ``position`` raised.

        Record all failed samples, in ascending order, before the first call of `substitute`.
        """
        index = self._indices[position]
        # Keep only the text, because the exception refers to the frames that hold the samples and this record.
        if self._first_error is None:
            self._first_error = dataset_error(
                error, dataset=self._dataset, host=self._host, stage="sample", sample_index=index
            )
        if len(self._listed) < MAX_LISTED:
            self._listed.append(Skip(index=index_text(index), exception=exception_line(error)))
        self.positions.append(position)

    def substitute(self, position: int) -> int:
        """Return the position of the next sample that did not raise. After the last sample, search from the first.

        Raises:
            DatasetError: The error of the first failed sample, if all samples of the batch raised.
        """
        if self._working is None:
            failed = set(self.positions)
            self._working = [other for other in range(len(self._indices)) if other not in failed]
        if not self._working:
            assert self._first_error is not None
            note = f" (all {len(self._indices)} samples of the batch failed: there is no substitute)"
            raise with_note(self._first_error, note)
        # The modulus continues the search at the first sample.
        return self._working[bisect.bisect(self._working, position) % len(self._working)]

    def withdraw(self, position: int) -> None:
        """Record that a sample raised when it was computed again as a substitute. `substitute` skips it from now on."""
        cast("list[int]", self._working).remove(position)

    def replaced(self, items: Sequence[_T]) -> list[_T]:
        """Return a copy of ``items`` (one per sample), with the item of a failed sample replaced by its substitute's.

        Raises:
            DatasetError: If all samples raised, see `substitute`.
        """
        found = list(items)
        for position in self.positions:
            found[position] = items[self.substitute(position)]
        return found

    def skips(self) -> Skips:
        """Return the report about the skipped samples."""
        return Skips(num_skipped=len(self.positions), listed=tuple(self._listed), epoch=self._epoch, host=self._host)
