"""Who should receive the batches of a data set that are not large: the consumer itself, or fetchers.

To wake a fetcher, and the consumer, for each batch takes longer than to transfer a small one. But what fetchers receive
while the consumer is away costs it no time. Which is better depends on how long the consumer is away between two calls
of ``next``, and on whether it keeps the interpreter's lock meanwhile. Therefore fetchers begin. If batches are taken in
quick succession, the other way is tried now and then, and the one is used with which ``next`` takes less time.
"""

from __future__ import annotations

import math
import statistics

__all__ = ["ReceiverChoice"]

_NUM_BATCHES = 15
"""Batches whose median time counts."""
_CLEARLY = 0.9
"""A trial must take less than this share of the time."""
_SLOW_S = 0.02
"""Time from batch to batch above which fetchers receive. The consumer would gain less than 1 ms of it."""
_INTERVAL_S = 10.0
_TRIAL_SHARE = 0.05
"""Largest part of the time that is spent on trials."""


class ReceiverChoice:
    """The choice for one data set.

    For one consumer: loaders that take turns to read the same data set in several threads may choose badly.
    """

    def __init__(self) -> None:
        self.is_consumer = False
        """Whether the consumer should receive the batches that are requested next."""
        self._times_s: list[float] = []
        self._begin_s: float | None = None
        self._num_calls = 0  # since then
        self._median_s = {True: math.inf, False: math.inf}
        self._came_back_s = 0.0
        self._trial_begin_s: float | None = None
        self._next_trial_s = -math.inf

    def come_back(self, now_s: float) -> None:
        """Note that the consumer calls ``next``, at this monotonic time."""
        self._came_back_s = now_s
        if self._begin_s is None:
            self._begin_s = now_s

    def leave(self, now_s: float, *, was_consumer: bool) -> None:
        """Note that the consumer gets a batch, at this monotonic time.

        Args:
            now_s: The time.
            was_consumer: Whether the consumer has received the batch itself.
        """
        self._num_calls += 1
        if was_consumer is not self.is_consumer:  # it was requested before the last change
            return
        self._times_s.append(now_s - self._came_back_s)
        if len(self._times_s) < _NUM_BATCHES:
            return
        median_s = self._median_s[self.is_consumer] = statistics.median(self._times_s)
        is_slow = now_s - (self._begin_s or 0.0) > _SLOW_S * self._num_calls
        self._times_s.clear()
        self._begin_s, self._num_calls = None, 0
        if is_slow:
            self.is_consumer, self._trial_begin_s = False, None
        elif self._trial_begin_s is not None:
            if median_s > _CLEARLY * self._median_s[not self.is_consumer]:
                self.is_consumer = not self.is_consumer
            pause_s = (now_s - self._trial_begin_s) * (1 / _TRIAL_SHARE - 1)
            self._next_trial_s, self._trial_begin_s = now_s + max(_INTERVAL_S, pause_s), None
        elif now_s >= self._next_trial_s:
            self.is_consumer, self._trial_begin_s = not self.is_consumer, now_s
