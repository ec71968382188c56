"""What a loader skipped: counted without end, listed and logged within bounds."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.batches.skips import MAX_LISTED, Skips
from hetero.errors import DatasetError, SampleFailure
from hetero.metrics.records import encode, limits

__all__ = ["DEFAULT_MAX_SKIPS", "Listing", "SkipLog", "SkippedSample"]

DEFAULT_MAX_SKIPS = 100
_MAX_REPORTED_BYTES = 16 * 1024  # of all loaders of a rank: summaries travel with every heartbeat of its host
_LOG_LINES = 10
_LOG_INTERVAL_S = 10.0
_MAX_NAMES_CHARS = 300

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSample:
    """A sample that raised, so that another one of its batch stood in for it."""

    index: str
    """What the sampler yielded."""
    epoch: int = field(metadata=limits(maximum=2.0**64))
    host: str
    """Where it raised: host and endpoint; ``local``: on the trainer host of the rank itself."""
    exception: str
    """Its first line."""

    def __str__(self) -> str:
        return f"sample {self.index} in epoch {self.epoch} on {self.host}: {self.exception}"


class Listing:
    """What the loaders of one process may list in reports, all together."""

    def __init__(self, *, max_samples: int = MAX_LISTED, max_bytes: int = _MAX_REPORTED_BYTES) -> None:
        self._num_samples = max_samples
        self._num_bytes = max_bytes

    def takes(self, sample: SkippedSample) -> bool:
        """Tell whether there is room for one more, and use it."""
        nbytes = len(json.dumps(encode(sample))) + 2
        if not self._num_samples or nbytes > self._num_bytes:
            self._num_samples = 0  # a list with holes would look complete
            return False
        self._num_samples -= 1
        self._num_bytes -= nbytes
        return True


_listing = Listing()


class SkipLog:
    """Counts what one loader on one rank skips over its life, and ends it when that becomes too much. Picklable.

    One thread calls `note`; `summary` may be called from any.

    Args:
        loader: Its name.
        dataset: Registered name of its data set.
        max_skips: Skipped samples that are borne, at least 0.
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
        """Take in what was skipped in a batch that is about to be delivered.

        Raises:
            DatasetError: If there are more than ``max_skips`` now: it lists them.
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
                    self._reported = (*self._reported, sample)
            self._log(sample)
        num_unnamed = skips.num_skipped - len(samples)
        self._count += num_unnamed
        self._num_unlogged += num_unnamed
        if self._count > self._max_skips:
            raise self._too_many(samples[-1])

    def summary(self) -> tuple[int, tuple[SkippedSample, ...]]:
        """Return how many were skipped, and the first of them."""
        return self._count, self._reported

    def _log(self, sample: SkippedSample) -> None:
        now_s = self._clock()
        if now_s >= self._logging_until_s:
            if self._num_unlogged:
                logger.warning("loader %s skipped %d more samples", self._loader, self._num_unlogged)
            self._logging_until_s = now_s + _LOG_INTERVAL_S
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
