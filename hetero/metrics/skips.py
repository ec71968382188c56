"""Samples that a loader skipped. All are counted, but only a limited number is listed and logged."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.batches.skips import MAX_LISTED, Skips
from hetero.documents.records import encode, limits
from hetero.epochs import epoch_text
from hetero.errors import DatasetError, SampleFailure
from hetero.system.waits import LOG_INTERVAL_S

__all__ = ["DEFAULT_MAX_SKIPS", "Listing", "SkipLog", "SkippedSample"]

DEFAULT_MAX_SKIPS = 100
_MAX_REPORTED_BYTES = 16 * 1024  # limit per rank, because every heartbeat of its host carries the summaries
_LOG_LINES = 10
_MAX_NAMES_CHARS = 300

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


class Listing:
    """Limit on the skipped samples that all loaders of one process together list in reports."""

    def __init__(self, *, max_samples: int = MAX_LISTED, max_bytes: int = _MAX_REPORTED_BYTES) -> None:
        self._num_samples = max_samples
        self._num_bytes = max_bytes

    def takes(self, sample: SkippedSample) -> bool:
        """Reserve room for one more sample. Return False if no room is left."""
        nbytes = len(json.dumps(encode(sample))) + 2
        if not self._num_samples or nbytes > self._num_bytes:
            # List no later sample either, because a list with gaps would look complete.
            self._num_samples = 0
            return False
        self._num_samples -= 1
        self._num_bytes -= nbytes
        return True


_listing = Listing()


class SkipLog:
    """Counts the samples that one loader on one rank skips, and fails the loader if there are too many. Picklable.

    One thread calls `note`. Any thread may call `summary`.

    Args:
        loader: Name of the loader.
        dataset: Registered name of its data set.
        max_skips: Largest number of skipped samples that is allowed, at least 0.
        clock: Monotonic seconds.
    """

    def __init__(
        self, loader: str, dataset: str, *, max_skips: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loader = loader
        self._dataset = dataset
        self._max_skips = max_skips
        self._clock = clock
        self._count = 0
        self._listed: list[SkippedSample] = []
        self._reported: tuple[SkippedSample, ...] = ()
        self._logging_until_s = float("-inf")
        self._num_logged = self._num_unlogged = 0

    def note(self, skips: Skips) -> None:
        """Count the samples that were skipped in a batch that is about to be delivered.

        Raises:
            DatasetError: If the total exceeds ``max_skips``. The error lists the samples.
        """
        samples = [
            SkippedSample(index=skip.index, epoch=skips.epoch, host=skips.host, exception=skip.exception)
            for skip in skips.listed
        ]
        for sample in samples:
            self._count += 1
            if len(self._listed) < MAX_LISTED:
                self._listed.append(sample)
                if len(self._reported) == len(self._listed) - 1 and _listing.takes(sample):
                    # A new tuple, because another thread may be reading the old one.
                    self._reported = (*self._reported, sample)
            self._log(sample)
        num_unnamed = skips.num_skipped - len(samples)
        self._count += num_unnamed
        self._num_unlogged += num_unnamed
        if self._count > self._max_skips:
            raise self._too_many(samples[-1])

    def summary(self) -> tuple[int, tuple[SkippedSample, ...]]:
        """Return the number of skipped samples, and the first of them."""
        return self._count, self._reported

    def _log(self, sample: SkippedSample) -> None:
        now_s = self._clock()
        if now_s >= self._logging_until_s:
            if self._num_unlogged:
                logger.warning("loader %s skipped %d more samples", self._loader, self._num_unlogged)
            self._logging_until_s = now_s + LOG_INTERVAL_S
            self._num_logged = self._num_unlogged = 0
        if self._num_logged == _LOG_LINES:
            self._num_unlogged += 1
            return
        self._num_logged += 1
        logger.warning("loader %s skipped %s (%d of at most %d)", self._loader, sample, self._count, self._max_skips)

    def _too_many(self, last: SkippedSample) -> DatasetError:
        names = ", ".join(sample.index for sample in self._listed)
        if len(names) > _MAX_NAMES_CHARS or self._count > len(self._listed):
            cut = names[:_MAX_NAMES_CHARS]
            names = f"{cut.rpartition(', ')[0] or cut}, ..."
        lines = [str(sample) for sample in self._listed]
        if self._count > len(lines):
            lines.append(f"and {self._count - len(lines)} more")
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
