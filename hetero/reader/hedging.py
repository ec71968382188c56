"""Decides when a request is sent a second time. Pure: times are passed in. Guarded by the fleet's lock.

A hedge is a second attempt of a request that takes too long. The deadline is learnt from recent requests of the same
data set (`Pace`). After the deadline, the hedge is sent if the `Budget` allows it. Only the batch that a consumer waits
for is hedged.
"""

from __future__ import annotations

import bisect
import math
from collections import deque

from hetero.batches.request import BatchRequest
from hetero.spec import DatasetSpec

__all__ = ["Budget", "Hedging", "Pace"]


class Pace:
    """How long requests of one data set take, and when one is overdue.

    A request is overdue after twice the 98th percentile of the times of the last 128 requests, but not before 0.5 s.
    This percentile of 128 times is the third longest. Therefore one or two slow batches do not raise the deadline, but
    regular slow batches do. If 5 % of all batches are slow, fewer than three of 128 are slow in only 4 % of cases. The
    minimum is longer than delays by a busy machine's scheduler, a garbage collector or a page cache.
    """

    MIN_OBSERVATIONS = 16
    """Observed requests before any request can be overdue."""
    NUM_OBSERVATIONS = 128
    QUANTILE = 0.98
    MULTIPLE = 2.0
    MIN_DEADLINE_S = 0.5

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, time_s: float) -> None:
        """Record how many seconds an answered request took."""
        if len(self._recent) == self.NUM_OBSERVATIONS:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(time_s)
        bisect.insort(self._sorted, time_s)

    @property
    def deadline_s(self) -> float:
        """Seconds until a request is overdue. Infinite until `MIN_OBSERVATIONS` requests have been observed."""
        count = len(self._sorted)
        if count < self.MIN_OBSERVATIONS:
            return math.inf
        usual_s = self._sorted[math.ceil(self.QUANTILE * count) - 1]
        return max(self.MIN_DEADLINE_S, self.MULTIPLE * usual_s)


class Budget:
    """Limits the number of hedges. After n requests, at most 1 + n / 20 hedges have been sent.

    One hedge is free, and each request earns a twentieth of a hedge. The budget saves at most 32 hedges. Therefore any
    n requests in a row have at most 32 + n / 20 hedges, even after a quiet time.
    """

    REQUESTS_PER_HEDGE = 20
    MAX_SAVED = 32

    def __init__(self) -> None:
        # The credit counts twentieths of a hedge, because sums of integers are exact.
        self._credit = self.REQUESTS_PER_HEDGE

    def earn(self) -> None:
        """Record a new request. Called once per request, however often it is sent."""
        self._credit = min(self._credit + 1, self.MAX_SAVED * self.REQUESTS_PER_HEDGE)

    @property
    def allows(self) -> bool:
        """Whether a hedge may be sent."""
        return self._credit >= self.REQUESTS_PER_HEDGE

    def spend(self) -> None:
        """Record that a hedge is sent. Called only if `allows` is true."""
        assert self.allows
        self._credit -= self.REQUESTS_PER_HEDGE


class Hedging:
    """The hedging state of one process. All its readers share the budget."""

    def __init__(self) -> None:
        self.budget = Budget()
        self._paces: dict[DatasetSpec, Pace] = {}

    def observe(self, request: BatchRequest, time_s: float) -> None:
        """Record how long an answered request took. Ignore purity checks, because they take about twice as long."""
        if not request.verify:
            self._paces.setdefault(request.spec, Pace()).observe(time_s)

    def deadline_s(self, request: BatchRequest) -> float:
        """Return the seconds until a request without purity check is overdue. Infinite if too few were observed."""
        pace = self._paces.get(request.spec)
        return math.inf if pace is None else pace.deadline_s
