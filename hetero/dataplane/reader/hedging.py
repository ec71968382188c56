"""When a request is asked for a second time. Pure: times are passed in; guarded by the fleet's lock.

A hedge is a second attempt of a request that takes longer than it ought to. Three
things decide: a deadline learnt from recent requests of the same data set (`Pace`),
a budget (`Budget`), and which endpoints kept a trainer waiting lately (`Stragglers`).
The window hedges only the batch that its consumer is waiting for.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections import deque
from collections.abc import Set as AbstractSet

from hetero.batches.request import BatchRequest
from hetero.dataplane.reader.connection import EndpointConnection
from hetero.spec import DatasetSpec

__all__ = ["Budget", "Hedging", "Pace", "Stragglers"]


class Pace:
    """How long requests of one data set take, and from when on one is overdue.

    Overdue is twice the 98th percentile of the last 128 requests, at least 0.5 s. Slow
    samples that come regularly are therefore in the deadline (with 5 % of all batches slow,
    128 requests hold fewer than three of them in 4 % of cases), and one hiccup is not. The
    floor is above what a busy machine's scheduler, a collector or a page cache cost.
    """

    MIN_OBSERVATIONS = 16
    """Nothing is overdue before so many requests were observed."""
    NUM_OBSERVATIONS = 128
    QUANTILE = 0.98
    MULTIPLE = 2.0
    MIN_DEADLINE_S = 0.5

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def observe(self, time_s: float) -> None:
        """Take in how long a request took that was answered."""
        if len(self._recent) == self.NUM_OBSERVATIONS:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(time_s)
        bisect.insort(self._sorted, time_s)

    @property
    def deadline_s(self) -> float:
        """How long a request may take before it is overdue; infinite until that is known."""
        count = len(self._sorted)
        if count < self.MIN_OBSERVATIONS:
            return math.inf
        usual_s = self._sorted[math.ceil(self.QUANTILE * count) - 1]
        return max(self.MIN_DEADLINE_S, self.MULTIPLE * usual_s)


class Budget:
    """What hedging may cost: after n requests at most 2 + n / 20 hedges have been issued, at any time.

    Two are free, so that a short job can hedge; each request earns a twentieth. At most
    32 are saved, so that any stretch of n requests has at most 32 + n / 20 hedges, however
    quiet the job was before.
    """

    FREE = 2
    REQUESTS_PER_HEDGE = 20
    MAX_SAVED = 32

    def __init__(self) -> None:
        self._credit = self.FREE * self.REQUESTS_PER_HEDGE  # in twentieths: integers do not drift

    def earn(self) -> None:
        """A request came: once each, however often it is refused or lost, and has to be asked for again."""
        self._credit = min(self._credit + 1, self.MAX_SAVED * self.REQUESTS_PER_HEDGE)

    @property
    def allows(self) -> bool:
        """Tell whether a hedge may be issued."""
        return self._credit >= self.REQUESTS_PER_HEDGE

    def spend(self) -> None:
        """A hedge is issued; only if it is allowed."""
        assert self.allows
        self._credit -= self.REQUESTS_PER_HEDGE


class Stragglers:
    """Endpoints that a hedge overtook, or that were late or answered nonsense, and have not given a batch since.

    They are ready, but others come first for a while: else the place that the cancelled
    request left would draw the next request to an endpoint that stands still. The while
    is as long as it kept the request, doubled each time that it happens again, at most
    10 s; then it gets one request at a time until it answers.
    """

    MAX_AVOIDED_S = 10.0

    def __init__(self) -> None:
        self._until_s: weakref.WeakKeyDictionary[EndpointConnection, tuple[int, float]] = weakref.WeakKeyDictionary()

    def avoid(self, connection: EndpointConnection, *, kept_s: float, now_s: float) -> None:
        """``connection`` kept a request for ``kept_s`` seconds, in vain."""
        times, _ = self._until_s.get(connection, (0, 0.0))
        avoided_s = min(self.MAX_AVOIDED_S, kept_s * 2.0 ** min(times, 16))
        self._until_s[connection] = times + 1, now_s + avoided_s

    def answered(self, connection: EndpointConnection) -> None:
        """It delivers."""
        if self._until_s:
            self._until_s.pop(connection, None)

    def avoided(self, now_s: float) -> AbstractSet[EndpointConnection]:
        """Return those that get a request only if there is no other endpoint."""
        if not self._until_s:
            return frozenset()
        return {
            connection
            for connection, (_, until_s) in self._until_s.items()
            if now_s < until_s or connection.num_outstanding
        }


class Hedging:
    """What one process knows for its hedges: all readers share the budget."""

    def __init__(self) -> None:
        self.budget = Budget()
        self.stragglers = Stragglers()
        self._paces: dict[DatasetSpec, Pace] = {}

    def observe(self, request: BatchRequest, time_s: float) -> None:
        """Take in how long an answered request took. A purity check takes about twice as long and says nothing."""
        if not request.verify:
            self._paces.setdefault(request.spec, Pace()).observe(time_s)

    def deadline_s(self, request: BatchRequest) -> float:
        """Return how long a request without purity check may take until it is overdue; infinite if not known."""
        pace = self._paces.get(request.spec)
        return math.inf if pace is None else pace.deadline_s
