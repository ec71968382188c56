"""Who should receive the batches of a data set that are not large: the consumer itself, or fetchers.

To wake a fetcher, and the consumer, for each batch takes longer than to transfer a small one. But what fetchers receive
while the consumer is away costs it no time. Which is better depends on how long the consumer is away between two calls
of ``next``, and on whether it keeps the interpreter's lock meanwhile. Therefore fetchers begin. If the consumer takes
batches in quick succession, it receives them itself, unless trials show that ``next`` is quicker with fetchers.
"""

from __future__ import annotations

import math
import statistics

__all__ = ["ReceiverChoice"]

_MAX_ROUND_S = 0.2
"""A longer time from batch to batch, such as a pause between two passes, counts as this."""
_MIN_BATCHES = 15
_MIN_S = 0.25
"""How many batches, and seconds, a figure needs. A shorter trial finds the worse way better now and then."""
_CAP = 10.0
"""A call of ``next`` counts at most so many times the median. One long wait must not decide."""
_CLEARLY = 0.9
"""Fetchers must take less than this part of the consumer's time, because they need more CPU time."""
_SLOW_S = 0.02
"""Time from batch to batch above which fetchers receive. The consumer would gain less than 1 ms of it."""
_MIN_AWAY = 0.4
"""Part of the time that a consumer must be away for a trial of fetchers. Otherwise they have no time to gain."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 1.0, 16.0
"""Time between two trials. It doubles, because the first seconds of a loop tell little."""
_TRIAL_SHARE = 0.05
"""Largest part of the time that later trials take."""


class ReceiverChoice:
    """The choice for one data set.

    For one consumer: loaders that take turns to read the same data set in several threads may choose badly.
    """

    def __init__(self) -> None:
        self.is_consumer = False
        """Whether the consumer should receive the batches that are requested next."""
        self._nexts_s: list[float] = []  # how long calls of next took
        self._num_rounds = 0  # from batch to batch
        self._total_s = 0.0  # of these rounds
        self._mean_s = {True: math.inf, False: math.inf}
        self._came_back_s = 0.0
        self._left_s: float | None = None
        self._trial_begin_s: float | None = None
        self._next_trial_s: float | None = None
        self._pause_s = _MIN_PAUSE_S

    def come_back(self, now_s: float) -> None:
        """Note that the consumer calls ``next``, at this monotonic time."""
        self._came_back_s = now_s

    def leave(self, now_s: float, *, was_consumer: bool) -> None:
        """Note that the consumer gets a batch, at this monotonic time.

        Args:
            now_s: The time.
            was_consumer: Whether the consumer has received the batch itself.
        """
        left_s, self._left_s = self._left_s, now_s
        # A batch that was requested before the last change says nothing about the present way.
        if left_s is None or was_consumer is not self.is_consumer:
            return
        self._nexts_s.append(now_s - self._came_back_s)
        self._num_rounds += 1
        self._total_s += min(now_s - left_s, _MAX_ROUND_S)
        # The first batches show only whether the loop is slow.
        least_s = 0.0 if self._next_trial_s is None else _MIN_S
        if self._num_rounds >= _MIN_BATCHES and self._total_s >= least_s:
            self._evaluate(now_s)

    def _evaluate(self, now_s: float) -> None:
        """Change the way, or keep it, after batches that were received in the present way."""
        nexts_s, num_rounds, total_s = self._nexts_s, self._num_rounds, self._total_s
        self._nexts_s, self._num_rounds, self._total_s = [], 0, 0.0
        # Another thread has just taken them.
        if not nexts_s or not num_rounds:
            return
        cap_s = _CAP * statistics.median(nexts_s)
        # Not a median, which hides the long waits of threads: it chose the worse way for ten seconds in one of three
        # trials.
        next_s = statistics.fmean(min(each, cap_s) for each in nexts_s)
        # Not a median either, which takes a loop that computes after several batches for a quick one.
        round_s = total_s / num_rounds
        if round_s > _SLOW_S:
            self.is_consumer, self._trial_begin_s = False, None
        elif self._next_trial_s is None:
            self.is_consumer = True
            self._next_trial_s = now_s + _MIN_PAUSE_S
        else:
            self._mean_s[self.is_consumer] = next_s
            if self._trial_begin_s is not None:
                self._end_trial(now_s, self._trial_begin_s)
            elif now_s >= self._next_trial_s and (not self.is_consumer or next_s < (1 - _MIN_AWAY) * round_s):
                self.is_consumer, self._trial_begin_s = not self.is_consumer, now_s

    def _end_trial(self, now_s: float, begin_s: float) -> None:
        self.is_consumer = self._mean_s[False] > _CLEARLY * self._mean_s[True]
        long_s = (now_s - begin_s) * (1 / _TRIAL_SHARE - 1) if self._pause_s >= _MAX_PAUSE_S else 0.0
        self._next_trial_s, self._trial_begin_s = now_s + max(self._pause_s, long_s), None
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
