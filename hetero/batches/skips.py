"""Samples that raise, and the samples of the same batch that stand in for them.

With ``on_sample_error="skip"`` a batch keeps its size. In the place of a sample that raised stands the next one of the
batch that works; after the last comes the first. Whether a sample raises is up to the data set, its index and its
draws, so the batch is the same wherever it is computed, like any other.
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

MAX_LISTED = 100
"""Samples of one batch that are named; all are counted."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """One sample that raised."""

    index: str
    """What was asked for: ``repr``, printable, at most 64 characters."""
    exception: str
    """First line: type and message, printable, at most 160 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skips:
    """The samples of one batch that raised, and that others stand in for."""

    num_skipped: int
    listed: tuple[Skip, ...]
    """The first 100, in the order of the batch."""
    epoch: int = 0
    host: str = ""
    """Where the batch was computed: host and endpoint, or ``local``. It does not travel: who receives knows it."""


class FailedSamples:
    """Those of one batch, while it is computed. False as long as there is none.

    Args:
        indices: The batch's.
        dataset: Registered name.
        host: Where it is computed.
        epoch: Of the batch.
    """

    def __init__(self, indices: Sequence[Index], *, dataset: str, host: str, epoch: int) -> None:
        self.positions: list[int] = []
        """Where in the batch they are, ascending."""
        self._indices = indices
        self._dataset = dataset
        self._host = host
        self._epoch = epoch
        self._listed: list[Skip] = []
        self._first: DatasetError | None = None
        self._working: list[int] | None = None

    def __bool__(self) -> bool:
        return bool(self.positions)

    def add(self, position: int, error: Exception) -> None:
        """Note that the sample at ``position`` raised; all of them, in ascending order, before the first stand-in."""
        index = self._indices[position]
        # As text at once: the exception itself holds the frames that hold the samples, and this record.
        if self._first is None:
            self._first = dataset_error(
                error, dataset=self._dataset, host=self._host, stage="sample", sample_index=index
            )
        if len(self._listed) < MAX_LISTED:
            self._listed.append(Skip(index=index_text(index), exception=exception_line(error)))
        self.positions.append(position)

    def stand_in(self, position: int) -> int:
        """Return where the next sample is that works; the first one follows the last.

        Raises:
            DatasetError: If none does: that of the first that raised.
        """
        if self._working is None:
            failed = set(self.positions)
            self._working = [other for other in range(len(self._indices)) if other not in failed]
        if not self._working:
            assert self._first is not None
            note = f" (and no other of the batch's {len(self._indices)} samples works: none can stand in)"
            raise with_note(self._first, note)
        return self._working[bisect.bisect(self._working, position) % len(self._working)]

    def withdraw(self, position: int) -> None:
        """Note that a sample which worked raised when it was to stand in: it is not asked for again."""
        cast("list[int]", self._working).remove(position)

    def replaced(self, items: Sequence[_T]) -> list[_T]:
        """Return the batch's ``items`` with those of failed samples replaced by those that stand in.

        Raises:
            DatasetError: As `stand_in`.
        """
        found = list(items)
        for position in self.positions:
            found[position] = items[self.stand_in(position)]
        return found

    def skips(self) -> Skips:
        """Return what is to be told of them."""
        return Skips(num_skipped=len(self.positions), listed=tuple(self._listed), epoch=self._epoch, host=self._host)
