"""A rank's reader: its window, its choice of endpoints, and when it asks a second endpoint.

The rules are those of the data plane (``hetero/reader``), written anew. Left out are failures, and the time
until a thread wakes up.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any

__all__ = ["Attempt", "Endpoint", "Reader", "endpoints_of_rank", "window_capacity"]

MAX_WINDOW_BYTES = 2.0**30
GROWTH_BYTES = 24 * 2.0**20
MAX_GROWTH = 8
_LOAD_AGE_S = 1.0


def window_capacity(batch_bytes: float, *, memory_bytes: float, planned: int) -> int:
    """Return how many batches fit into a rank's window, at least 1.

    Args:
        batch_bytes: Size of a batch.
        memory_bytes: The rank's share of its host's memory.
        planned: Two batches per endpoint, this rank's share of them.
    """
    if not batch_bytes:
        return 1 << 30
    bound = min(MAX_WINDOW_BYTES, memory_bytes / 4, planned * batch_bytes + GROWTH_BYTES)
    return max(1, int(bound / batch_bytes + 1e-9))


def endpoints_of_rank(endpoints: list[Endpoint], rank: int, num_ranks: int) -> list[Endpoint]:
    """Return the endpoints that a rank uses: twice its share, at least 8, with neighbours on different hosts."""
    across = sorted(endpoints, key=lambda endpoint: endpoint.index_on_host)
    start = rank * len(across) // num_ranks
    size = max(8, -(-2 * len(across) // num_ranks))
    return (across[start:] + across[:start])[:size]


class Endpoint:
    """A process that computes one batch at a time, the lowest step first."""

    __slots__ = ("current", "host", "index_on_host", "queue")

    def __init__(self, host: Any, index_on_host: int) -> None:
        self.host = host
        self.index_on_host = index_on_host
        self.queue: list[tuple[int, int, Attempt]] = []
        self.current: Attempt | None = None

    @property
    def load(self) -> int:
        """Batches that wait or are computed."""
        return len(self.queue) + (self.current is not None)


class Attempt:
    """One request for one batch."""

    __slots__ = ("is_ended", "is_hedge", "issued_s", "load", "place", "reader", "sequence")

    def __init__(self, reader: Reader, sequence: int, place: Place, issued_s: float) -> None:
        self.reader = reader
        self.sequence = sequence
        self.place = place
        self.issued_s = issued_s
        self.is_hedge = False
        self.is_ended = False
        self.load = 0
        """Load that the endpoint reports with the batch."""

    @property
    def since_s(self) -> float:
        """When the endpoint probably began with this batch."""
        return max(self.issued_s, self.place.answered_s)


class Place:
    """An endpoint as one rank sees it."""

    __slots__ = ("answered_s", "avoided_until_s", "chosen_at", "endpoint", "load", "num_avoided", "num_outstanding")

    def __init__(self, endpoint: Endpoint, order: int) -> None:
        self.endpoint = endpoint
        self.num_outstanding = 0
        self.load = 0
        self.chosen_at = order
        self.answered_s = 0.0
        self.num_avoided = 0
        self.avoided_until_s = 0.0


class Reader:
    """The state of one rank's reader. The simulation calls it and knows the time."""

    __slots__ = (
        "_deadline_s",
        "_heap",
        "_num_observed",
        "_stragglers",
        "attempts",
        "capacity",
        "credit",
        "growth",
        "host",
        "is_local",
        "is_waiting",
        "needs_endpoint",
        "next_missing",
        "next_sequence",
        "num_added",
        "num_attempts",
        "num_choices",
        "places",
        "rank",
        "recent_s",
        "size",
        "timer_s",
        "waiting",
    )

    def __init__(self, rank: int, host: Any, endpoints: list[Endpoint], *, size: int, capacity: int, is_local: bool):
        self.rank = rank
        self.host = host
        self.size = size
        self.capacity = capacity
        self.is_local = is_local
        self.places = [Place(endpoint, order - len(endpoints)) for order, endpoint in enumerate(endpoints)]
        self._heap = [(0, 0, place.chosen_at, place) for place in self.places]
        self.num_choices = 0
        self.credit = 40
        """Twentieths of a hedge."""
        self.recent_s: deque[float] = deque(maxlen=128)
        self.timer_s = math.inf
        """Time of the event that looks whether the next batch is overdue."""
        self._num_observed = 0
        self._deadline_s = math.inf
        self._stragglers: set[Place] = set()
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Forget the window. Each pass has a new one."""
        self.next_sequence = 0
        self.num_added = 0
        self.next_missing = 0
        self.num_attempts = 0
        self.attempts: dict[int, list[Attempt]] = {}
        self.waiting: set[int] = set()
        self.growth = 0.0
        self.is_waiting = False
        self.needs_endpoint = False

    # The window

    def add(self, num_batches: int) -> None:
        """Plan as many batches as the window has places, up to the epoch's number."""
        limit = self.next_sequence + self.size
        if self.growth:
            limit += min(len(self.waiting), int(self.growth))
        limit = min(limit, num_batches)
        if limit > self.num_added:
            self.credit = min(640, self.credit + limit - self.num_added)
            self.num_added = limit

    def has_room(self) -> bool:
        """Return whether the first missing batch may be requested now."""
        missing = self.next_missing
        if missing >= self.num_added:
            return False
        return missing == self.next_sequence or len(self.waiting) + self.num_attempts < self.capacity

    @property
    def is_over_capacity(self) -> bool:
        """Whether the batches in progress exceed the window's bytes already."""
        return len(self.waiting) + self.num_attempts > self.capacity

    def arrived(self, sequence: int) -> bool:
        """Keep a batch until its turn. Return whether the next batch holds up at least half a window."""
        self.waiting.add(sequence)
        num_waiting, size = len(self.waiting), self.size
        if self.is_local or 2 * num_waiting < size:
            return False
        self.growth = max(self.growth, min(num_waiting, (MAX_GROWTH - 1) * size))
        return True

    def deliver(self) -> None:
        """Give the next batch to the script."""
        self.waiting.remove(self.next_sequence)
        self.next_sequence += 1
        self.is_waiting = self.needs_endpoint = False
        if self.growth:
            self.growth = max(0.0, self.growth - 1 / 16)

    # The choice of an endpoint

    def choose(self, now_s: float) -> Place:
        """Return the endpoint with the fewest outstanding requests, then with the lowest load."""
        if self.is_local:  # torch gives batches to its processes in turn
            return self.places[self.next_missing % len(self.places)]
        heap, aside = self._heap, []
        while True:
            outstanding, load, chosen_at, place = heapq.heappop(heap)
            if (outstanding, load, chosen_at) != (place.num_outstanding, place.load, place.chosen_at):
                continue
            if load and place.answered_s < now_s - _LOAD_AGE_S:
                place.load = 0
                heapq.heappush(heap, (outstanding, 0, chosen_at, place))
                continue
            if self._stragglers and self._is_avoided(place, now_s):
                aside.append((outstanding, load, chosen_at, place))
                if heap:
                    continue
                place = aside.pop(0)[3]
            break
        for entry in aside:
            heapq.heappush(heap, entry)
        return place

    def choose_other(self, slow: Place, now_s: float) -> Place | None:
        """Return the endpoint for a second attempt, None if all others are as busy as the first one's."""
        others = [
            place
            for place in self.places
            if place.num_outstanding < slow.num_outstanding and not self._is_avoided(place, now_s)
        ]
        return min(
            others,
            key=lambda place: (
                place.endpoint.host is slow.endpoint.host,
                place.num_outstanding,
                place.load if place.answered_s > now_s - _LOAD_AGE_S else 0,
                place.chosen_at,
            ),
            default=None,
        )

    def occupy(self, place: Place) -> None:
        """Count a request to an endpoint."""
        if self.is_local:
            return
        self.num_choices += 1
        place.chosen_at = self.num_choices
        place.num_outstanding += 1
        heapq.heappush(self._heap, (place.num_outstanding, place.load, place.chosen_at, place))

    def release(self, place: Place) -> None:
        """Count a request as answered or given up."""
        if self.is_local:
            return
        place.num_outstanding -= 1
        heapq.heappush(self._heap, (place.num_outstanding, place.load, place.chosen_at, place))

    def answered(self, attempt: Attempt, now_s: float) -> None:
        """Learn from a batch how long batches take and how busy its endpoint is."""
        place = attempt.place
        self.recent_s.append(now_s - max(attempt.issued_s, place.answered_s))
        self._num_observed += 1
        if not self._num_observed & 15:
            self._deadline_s = _deadline_s(self.recent_s)
        place.load, place.answered_s = attempt.load, now_s
        if self._stragglers and place in self._stragglers:
            self._stragglers.discard(place)
            place.num_avoided = 0

    # Hedges

    @property
    def deadline_s(self) -> float:
        """How long a batch may take before it is requested a second time, infinite if not known yet."""
        return self._deadline_s

    def avoid(self, place: Place, kept_s: float, now_s: float) -> None:
        """Prefer other endpoints, because this one kept a batch that another endpoint delivered sooner."""
        place.avoided_until_s = now_s + min(10.0, kept_s * 2.0 ** min(place.num_avoided, 16))
        place.num_avoided += 1
        self._stragglers.add(place)

    def _is_avoided(self, place: Place, now_s: float) -> bool:
        return place in self._stragglers and (now_s < place.avoided_until_s or place.num_outstanding > 0)


def _deadline_s(recent_s: deque[float]) -> float:
    """Return twice the 98th percentile, at least 0.5 s."""
    ordered = sorted(recent_s)
    return max(0.5, 2.0 * ordered[math.ceil(0.98 * len(ordered)) - 1])
