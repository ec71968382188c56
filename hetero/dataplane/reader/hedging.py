"""Decides when a request is sent a second time. Pure: times are passed in. Guarded by the fleet's lock.

A hedge is a second attempt of a request that takes too long. Three things decide about it: a deadline learnt from
recent requests of the same data set (`Pace`), a budget (`Budget`), and the endpoints that recently kept a trainer
waiting (`Stragglers`). The window hedges only the batch that its consumer waits for.
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
    """How long requests of one data set take, and when one is overdue.

    A request is overdue after twice the 98th percentile of the last 128 requests, at least 0.5 s. Therefore the
    deadline covers slow samples that come regularly, and ignores a single hiccup. If 5 % of all batches are slow, 128
    requests hold fewer than three of them in 4 % of cases. The minimum is more than a delay by a busy machine's
    scheduler, a garbage collector or a page cache.
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
        """Seconds until a request is overdue, infinite before enough requests were observed."""
        count = len(self._sorted)
        if count < self.MIN_OBSERVATIONS:
            return math.inf
        usual_s = self._sorted[math.ceil(self.QUANTILE * count) - 1]
        return max(self.MIN_DEADLINE_S, self.MULTIPLE * usual_s)


class Budget:
    """Bound of the number of hedges. After n requests at most 2 + n / 20 hedges have been sent, at any time.

    Two hedges are free, so a short job can hedge. Each request earns a twentieth of a hedge. The budget saves at most
    32 hedges. Therefore any stretch of n requests has at most 32 + n / 20 hedges, even after a quiet time.
    """

    FREE = 2
    REQUESTS_PER_HEDGE = 20
    MAX_SAVED = 32

    def __init__(self) -> None:
        self._credit = self.FREE * self.REQUESTS_PER_HEDGE  # in twentieths: integers do not drift

    def earn(self) -> None:
        """Record a new request. Called once per request, however often it is refused, lost and asked for again."""
        self._credit = min(self._credit + 1, self.MAX_SAVED * self.REQUESTS_PER_HEDGE)

    @property
    def allows(self) -> bool:
        """Whether a hedge may be sent."""
        return self._credit >= self.REQUESTS_PER_HEDGE

    def spend(self) -> None:
        """Record that a hedge is sent. Called only if `allows` is true."""
        assert self.allows
        self._credit -= self.REQUESTS_PER_HEDGE


class Stragglers:
    """Endpoints that were overtaken by a hedge, late, or answered nonsense, and that have sent no batch since.

    They are ready, but other endpoints are preferred for a while. Otherwise the place that the cancelled request freed
    would attract the next request to an endpoint that is stuck. An endpoint is avoided for the time that it kept the
    request. This time doubles with each repetition, up to 10 s. After it the endpoint gets one request at a time until
    it answers.
    """

    MAX_AVOIDED_S = 10.0

    def __init__(self) -> None:
        self._until_s: weakref.WeakKeyDictionary[EndpointConnection, tuple[int, float]] = weakref.WeakKeyDictionary()

    def avoid(self, connection: EndpointConnection, *, kept_s: float, now_s: float) -> None:
        """Record that ``connection`` kept a request for ``kept_s`` seconds without a result."""
        times, _ = self._until_s.get(connection, (0, 0.0))
        avoided_s = min(self.MAX_AVOIDED_S, kept_s * 2.0 ** min(times, 16))
        self._until_s[connection] = times + 1, now_s + avoided_s

    def answered(self, connection: EndpointConnection) -> None:
        """Record that ``connection`` delivered a batch."""
        if self._until_s:
            self._until_s.pop(connection, None)

    def avoided(self, now_s: float) -> AbstractSet[EndpointConnection]:
        """Return the endpoints that get a request only if no other endpoint can take it."""
        if not self._until_s:
            return frozenset()
        return {
            connection
            for connection, (_, until_s) in self._until_s.items()
            if now_s < until_s or connection.num_outstanding
        }


class Hedging:
    """The hedging state of one process. All its readers share the budget."""

    def __init__(self) -> None:
        self.budget = Budget()
        self.stragglers = Stragglers()
        self._paces: dict[DatasetSpec, Pace] = {}

    def observe(self, request: BatchRequest, time_s: float) -> None:
        """Record how long an answered request took. Ignore purity checks, because they take about twice as long."""
        if not request.verify:
            self._paces.setdefault(request.spec, Pace()).observe(time_s)

    def deadline_s(self, request: BatchRequest) -> float:
        """Return the seconds until a request without purity check is overdue, infinite if not known."""
        pace = self._paces.get(request.spec)
        return math.inf if pace is None else pace.deadline_s
