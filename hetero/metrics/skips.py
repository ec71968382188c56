"""Counts the samples that a loader skipped. Only the first 32 of a loader are also logged and listed."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from hetero.batches.failures import MAX_SKIP_CHARS
from hetero.batches.skips import MAX_LISTED, Skips
from hetero.documents.records import limits
from hetero.documents.text import shortened
from hetero.epochs import epoch_text
from hetero.errors import DatasetError, SampleFailure

__all__ = ["DEFAULT_MAX_SKIPS", "SkipLog", "SkippedSample"]

DEFAULT_MAX_SKIPS = 100

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSample:
    """A sample that raised and was replaced by another sample of its batch."""

    index: str
    """The index that the sampler yielded."""
    epoch: int = field(metadata=limits(maximum=2.0**64))
    host: str
    """Host and endpoint where the sample raised. ``local`` means the trainer host of the rank."""
    exception: str
    """First line of the exception."""

    def __str__(self) -> str:
        return f"sample {self.index} in epoch {epoch_text(self.epoch)} on {self.host}: {self.exception}"


class SkipLog:
    """Counts the samples that one loader on one rank skips, and fails the loader if there are too many. Picklable.

    One thread calls `note`. Any thread may call `summary`.

    Args:
        loader: Name of the loader.
        dataset: Registered name of its data set.
        max_skips: Largest number of skipped samples that is allowed, at least 0.
    """

    def __init__(self, loader: str, dataset: str, *, max_skips: int) -> None:
        self._loader = loader
        self._dataset = dataset
        self._max_skips = max_skips
        self._count = 0
        self._listed: tuple[SkippedSample, ...] = ()

    def note(self, skips: Skips) -> None:
        """Count the samples that were skipped in a batch that is about to be delivered.

        Raises:
            DatasetError: If the total exceeds ``max_skips``. The error lists the samples.
        """
        # A batch lists only the first of its skipped samples, and `num_skipped` counts all of them.
        samples = [
            SkippedSample(index=skip.index, epoch=skips.epoch, host=skips.host, exception=skip.exception)
            for skip in skips.listed
        ]
        # Log only samples that this log lists. Thousands of bad samples would fill the host's log.
        for number, sample in enumerate(samples[: MAX_LISTED - len(self._listed)], start=self._count + 1):
            logger.warning("loader %s skipped %s (%d of at most %d)", self._loader, sample, number, self._max_skips)
        # Make a new tuple, because another thread may be reading the old one. The tuple is short, because every
        # heartbeat of the host carries it.
        self._listed = (*self._listed, *samples)[:MAX_LISTED]
        self._count += skips.num_skipped
        if self._count > self._max_skips:
            raise self._too_many(samples[-1])

    def summary(self) -> tuple[int, tuple[SkippedSample, ...]]:
        """Return the number of skipped samples, and the first of them."""
        return self._count, self._listed

    def _too_many(self, last: SkippedSample) -> DatasetError:
        """Return the error for more skipped samples than ``max_skips``. Its message lists the first samples.

        Args:
            last: The sample that exceeded the number.
        """
        lines = [str(sample) for sample in self._listed]
        if self._count > len(lines):
            lines.append(f"and {self._count - len(lines)} more")
        names = shortened(", ".join(sample.index for sample in self._listed), MAX_SKIP_CHARS)
        return DatasetError(
            SampleFailure(
                dataset=self._dataset,
                host=last.host,
                stage="sample",
                sample_index=last.index,
                exception=f"{last.exception}; loader {self._loader} skipped {self._count} samples, "
                f"max_skips={self._max_skips} allows no more: {names}",
                traceback="\n".join(lines),
            )
        )
