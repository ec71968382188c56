"""Whether a consumer should receive medium batches itself.

A consumer that waits for a good part of its time should: to wake a fetcher and the consumer for each batch takes longer
than to transfer it. For another consumer, fetchers should receive them meanwhile.

While fetchers receive, they and the consumer take turns to run Python, so the same consumer is away for a larger part
of its time. Therefore there are two limits. With one limit, a reader that once used fetchers could use them for ever.
"""

from __future__ import annotations

import math

__all__ = ["ConsumerPace"]

_BEGINS_BELOW = 0.7
_ENDS_ABOVE = 0.55
"""Measured for batches of 0.2 to 2 MB: see "Who receives" in benchmarks/README.md."""
_RECENT_S = 0.25


class ConsumerPace:
    """The part of its recent time that one consumer is away, between two calls of ``next``.

    Not thread-safe: for the consumer's thread.
    """

    def __init__(self) -> None:
        self.is_hurried = False
        """Whether the consumer should receive medium batches itself."""
        self._away_share = 1.0
        self._left_s: float | None = None
        self._came_back_s = 0.0
        self._changed_s = -math.inf

    def come_back(self, now_s: float) -> None:
        """Note that the consumer wants a batch, at this monotonic time."""
        self._came_back_s = now_s
        if self._left_s is not None:
            self._away_share += (1.0 - self._away_share) * min(1.0, (now_s - self._left_s) / _RECENT_S)

    def leave(self, now_s: float) -> None:
        """Note that the consumer gets a batch, at this monotonic time."""
        self._left_s = now_s
        self._away_share -= self._away_share * min(1.0, (now_s - self._came_back_s) / _RECENT_S)
        if now_s >= self._changed_s + _RECENT_S:  # between the limits it would change with each batch
            was_hurried = self.is_hurried
            self.is_hurried = self._away_share < (_ENDS_ABOVE if was_hurried else _BEGINS_BELOW)
            if self.is_hurried is not was_hurried:
                self._changed_s = now_s
