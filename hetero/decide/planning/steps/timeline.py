"""The steps of a job on a cluster, computed one event after the other.

The arithmetic of model.py says which part of a cluster limits the steps. It does not say how much longer steps take
because the parts wait for each other. For example, batches arrive in order, so a slow endpoint holds up the batches
of the fast ones. A `Timeline` follows each batch through the data plane. This takes milliseconds, so a plan makes
timelines of its best candidates only. Deterministic: equal arguments give equal times.

The rules are those of the readers and endpoints (hetero/reader, hetero/endpoint):

- A rank asks for the batches of its window in advance: two per endpoint that serves it, within its bytes.
- A request goes to the endpoint with the fewest requests of this rank. If several have equally few, it goes to the
  endpoint that reported the fewest requests of all ranks.
- An endpoint makes one batch at a time, and the batch of the lowest step first. The processes of a host share its CPUs.
- A network interface carries one batch after another in each direction.
- A rank takes batches in order. All ranks end a step together. An epoch begins with an empty window.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Timeline", "TimelineHost", "TimelineJob"]

_LEAST_STEPS = 48
_LEAST_BATCHES = 800
"""Batches of all ranks that are computed at least."""
_TURNS = 8
"""How often each endpoint makes a batch, at least."""
_MAX_BATCHES = 4000
_LONG_STEPS = 2000
"""Steps of a long timeline. A window that grew shrinks slowly."""
_LONG_BATCHES = 16000
"""Limits of the batches of a timeline, and of a long one."""
_BLOCK = 1024
"""Number of relative times of batches. Later blocks have the same times in another order."""
_LEAST_WINDOW = 3
_MAX_GROWTH = 8
"""A window has at least `_LEAST_WINDOW` places. It grows to at most `_MAX_GROWTH` times its size, as the reader's
window."""
_LEAST_USED = 8
"""Endpoints that a rank of a large job uses at least."""
_LATENCY_S = 0.0005
_FIRST_PART = 3
"""The first third of a timeline is left out: its steps depend on how the timeline begins."""

_MADE, _SENT, _ARRIVED, _STEP = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineHost:
    """One host."""

    num_endpoints: int
    batch_s: float
    """Seconds of a mean batch in a process that is alone on the host."""
    pace: Callable[[int, int, float], tuple[float, float]]
    """Function of the load of the host. It returns the speed of each busy process, relative to a process that is alone
    on the host, and how many times longer a step takes. Its arguments are the number of busy processes, the number of
    the ranks' busy threads, and the CPUs that receiving batches takes."""
    sending_s: float
    """Seconds that the network interface needs to send a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineJob:
    """What all hosts have in common."""

    num_trainers: int
    ranks_per_host: int
    steps_s: Sequence[float]
    """Step times with batches always ready, which repeat."""
    relative_s: Sequence[float]
    """Times of random batches relative to their mean, in ascending order."""
    steps_per_epoch: int | None
    window_batches: int
    """Batches that a rank's window holds by its bytes."""
    receive_s: float
    """CPU seconds that a rank needs to receive a batch."""
    network_s: float
    """Seconds that the network interface of a trainer host needs to receive a batch."""
    rank_threads: int
    """Threads that one rank has busy during a step."""
    is_own_loader: bool = False
    """Whether each rank has processes of its own that make its batches in turn, as with torch's loader."""


class _Host:
    """The processes of a host. Those that are busy progress equally fast."""

    __slots__ = (
        "busy",
        "done",
        "host",
        "in_free_s",
        "num_threads",
        "out_free_s",
        "paces",
        "receiving",
        "since_s",
        "speed",
        "turn",
    )

    def __init__(self, host: TimelineHost, paces: dict[tuple[int, int, float], tuple[float, float]]) -> None:
        self.host = host
        self.paces = paces
        """Results of the host's ``pace``. Equal hosts share them."""
        self.busy: list[tuple[float, int, _Attempt]] = []
        """Heap of the batches that are made, with the value of `done` when each is ready."""
        self.done = 0.0
        """Seconds of work that each process has done since the beginning."""
        self.speed = 1.0
        self.since_s = 0.0
        self.turn = 0
        """Number of the last change of the load. Events that were planned before this change are ignored."""
        self.in_free_s = self.out_free_s = 0.0
        self.num_threads, self.receiving = 0, 0.0

    def advance(self, now_s: float) -> None:
        """Count the work that each process has done until now."""
        self.done += (now_s - self.since_s) * self.speed
        self.since_s = now_s

    def pace(self, num_threads: int) -> tuple[float, float]:
        """Return what the host's ``pace`` returns for the processes that are busy now."""
        key = len(self.busy), num_threads, self.receiving
        found = self.paces.get(key)
        if found is None:
            found = self.paces[key] = self.host.pace(*key)
        return found


class _Attempt:
    """A request of a rank for a batch."""

    __slots__ = ("endpoint", "host", "load", "rank", "sequence")

    def __init__(self, rank: _Rank, sequence: int, endpoint: int, host: _Host) -> None:
        self.rank, self.sequence, self.endpoint, self.host = rank, sequence, endpoint, host
        self.load = 0


class _Rank:
    """A reader: its window, and what it knows of the endpoints."""

    __slots__ = (
        "added",
        "arrived",
        "choices",
        "chosen",
        "extra",
        "free",
        "host",
        "is_asking",
        "loads",
        "next",
        "number",
        "outstanding",
        "requested",
        "used",
        "window",
    )  # fmt: skip

    def __init__(self, number: int, host: _Host, used: list[int], window: int) -> None:
        self.number, self.host, self.used, self.window = number, host, used, window
        self.outstanding = dict.fromkeys(used, 0)
        self.loads = dict.fromkeys(used, 0)
        # Below 0, because endpoints that were never chosen come first, in this order.
        self.chosen = {endpoint: order - len(used) for order, endpoint in enumerate(used)}
        self.free = [(0, 0, self.chosen[endpoint], endpoint) for endpoint in used]
        self.choices = 0
        self.begin()

    def begin(self) -> None:
        self.next = self.added = self.requested = 0
        self.extra = 0.0
        self.arrived: set[int] = set()
        self.is_asking = False

    def choose(self) -> int:
        """Return the endpoint for the next request."""
        free = self.free
        while True:
            # A heap cannot change its entries. One that differs from the present counts is out of date.
            outstanding, load, chosen, endpoint = heapq.heappop(free)
            if (
                outstanding == self.outstanding[endpoint]
                and chosen == self.chosen[endpoint]
                and load == self.loads[endpoint]
            ):
                self.choices += 1
                self.chosen[endpoint] = self.choices
                self.count(endpoint, 1)
                return endpoint

    def count(self, endpoint: int, change: int) -> None:
        self.outstanding[endpoint] += change
        heapq.heappush(self.free, (self.outstanding[endpoint], self.loads[endpoint], self.chosen[endpoint], endpoint))


class Timeline:
    """The steps of a job on a cluster. Used once.

    Args:
        job: The job.
        hosts: The trainer hosts, then the data hosts. At least one has an endpoint.
    """

    def __init__(self, job: TimelineJob, hosts: Sequence[TimelineHost], *, is_long: bool = False) -> None:
        self.job = job
        # Plans take a fifth less time since equal hosts share their paces.
        paces: dict[TimelineHost, dict[tuple[int, int, float], tuple[float, float]]] = {}
        self.hosts = [_Host(host, paces.setdefault(host, {})) for host in hosts]
        self.num_ranks = job.num_trainers * job.ranks_per_host
        self.place = [(host, index) for host in self.hosts for index in range(host.host.num_endpoints)]
        self.queues: list[list[tuple[int, int, _Attempt]]] = [[] for _ in self.place]
        self.current: list[_Attempt | None] = [None] * len(self.place)
        self.ranks = self._make_ranks()
        self.turn = max(1.0, len(self.place) / self.num_ranks)
        wanted = max(_LEAST_STEPS, _LEAST_BATCHES / self.num_ranks, _TURNS * self.turn)
        most = _MAX_BATCHES
        if is_long:
            wanted, most = max(wanted, _LONG_STEPS), _LONG_BATCHES
        self.num_steps = max(_LEAST_STEPS, math.ceil(min(wanted, most / self.num_ranks)))
        self.epoch = job.steps_per_epoch or 10**9
        if self.epoch < self.num_steps:
            # A part of an epoch would count its start, but not all of its steps.
            self.num_steps = round(self.num_steps / self.epoch) * self.epoch
        self.shape = _blocks(job.relative_s, self.num_steps * self.num_ranks + _BLOCK)
        self.events: list[tuple[float, int, int, Any, int]] = []
        self.count = itertools.count()
        self.ends_s = [0.0]
        self.num_made = 0
        self.computed_s = 0.0
        self.made = [0]
        self.step = 0
        self.num_ready = 0
        self.end_s = 0.0
        self.num_received = [0] * job.num_trainers
        # In a long epoch, endpoints begin with a part of a batch, as if they had worked before. Otherwise all of them
        # would deliver at the same time for many turns.
        self.is_fresh = [self.epoch > 3 * self.num_steps] * len(self.place)

    def _make_ranks(self) -> list[_Rank]:
        """Return the ranks, each with its trainer host, the endpoints that it may ask, and its window."""
        job = self.job
        if job.is_own_loader:
            first = 0
            ranks = []
            for number in range(self.num_ranks):
                host = self.hosts[number // job.ranks_per_host]
                own = host.host.num_endpoints // job.ranks_per_host
                ranks.append(_Rank(number, host, list(range(first, first + own)), max(1, 2 * own)))
                first += own
            return ranks
        # List the first endpoint of each host, then the second of each. So a rank uses endpoints of many hosts.
        across = sorted(range(len(self.place)), key=lambda endpoint: self.place[endpoint][1])
        size = max(_LEAST_USED, -(-2 * len(across) // self.num_ranks))
        window = max(_LEAST_WINDOW, -(-2 * len(across) // self.num_ranks))
        ranks = []
        for number in range(self.num_ranks):
            start = number * len(across) // self.num_ranks
            used = (across[start:] + across[:start])[:size]
            ranks.append(_Rank(number, self.hosts[number // job.ranks_per_host], used, window))
        return ranks

    @property
    def num_batches(self) -> int:
        """Batches of all ranks that `mean_step_s` computes."""
        return self.num_steps * self.num_ranks

    def mean_step_s(self) -> float:
        """Return the mean step time in seconds."""
        self._ask(0.0)
        events = self.events
        while self.step < self.num_steps:
            now_s, _, kind, subject, turn = heapq.heappop(events)
            if kind == _MADE:
                if subject.turn == turn:
                    self._made(subject, now_s)
            elif kind == _ARRIVED:
                self._arrive(subject, now_s)
            elif kind == _SENT:
                self._receive(subject, now_s)
            else:
                self._end_step(now_s)
        return self._mean_of_epoch_s()

    @property
    def longest_step_s(self) -> float:
        """The longest step that `mean_step_s` counted."""
        ends_s = self.ends_s[self.num_steps // _FIRST_PART :]
        return max(end_s - begin_s for begin_s, end_s in itertools.pairwise(ends_s))

    def _push(self, at_s: float, kind: int, subject: object, turn: int = 0) -> None:
        heapq.heappush(self.events, (at_s, next(self.count), kind, subject, turn))

    # Ranks

    def _ask(self, now_s: float) -> None:
        """Let all ranks ask for the batch of the next step."""
        self.num_ready, self.end_s = 0, now_s
        if self.step % self.epoch == 0:
            for rank in self.ranks:
                rank.begin()
                self._plan(rank)
            waiting = list(self.ranks)
            # The ranks ask at the same time. So each asks for one batch, then each asks for its next batch.
            while waiting:
                waiting = [rank for rank in waiting if self._request(rank, now_s)]
        for rank in self.ranks:
            rank.is_asking = True
            if rank.next in rank.arrived:
                self._deliver(rank, now_s)
            else:
                self._refill(rank, now_s)

    def _plan(self, rank: _Rank) -> None:
        """Set how far ahead a rank may ask: to the end of its window, which may have grown, and of the epoch."""
        limit = rank.next + rank.window + min(len(rank.arrived), int(rank.extra))
        rank.added = max(rank.added, min(limit, self.epoch))

    def _refill(self, rank: _Rank, now_s: float) -> None:
        """Let a rank ask for batches until its window is full."""
        self._plan(rank)
        while self._request(rank, now_s):
            pass

    def _request(self, rank: _Rank, now_s: float) -> bool:
        """Ask an endpoint for the next batch of the window. Return False if the window is full."""
        if rank.requested >= rank.added:
            return False
        sequence = rank.requested
        # The memory of a window is bounded. torch's loader has no such bound.
        if sequence - rank.next >= self.job.window_batches and not self.job.is_own_loader:
            return False
        rank.requested += 1
        # torch's loader gives its batches to the workers in turn.
        endpoint = rank.used[sequence % len(rank.used)] if self.job.is_own_loader else rank.choose()
        attempt = _Attempt(rank, sequence, endpoint, self.place[endpoint][0])
        if self.current[endpoint] is None:
            host = attempt.host
            host.advance(now_s)
            self._begin(attempt)
            self._schedule(host, now_s)
        else:
            heapq.heappush(self.queues[endpoint], (sequence, next(self.count), attempt))
        return True

    def _deliver(self, rank: _Rank, now_s: float) -> None:
        """Give a rank its batch. If all ranks have theirs, plan the end of the step."""
        rank.arrived.remove(rank.next)
        rank.next += 1
        rank.is_asking = False
        # The rules of `WindowGrowth` in the reader: one place back with every sixteenth delivery, and more places when
        # half of the window waits.
        rank.extra = max(0.0, rank.extra - 1 / 16)
        self._refill(rank, now_s)
        job, host = self.job, rank.host
        step_s = job.steps_s[self.step % len(job.steps_s)]
        if host.busy:
            step_s *= host.pace(job.rank_threads * job.ranks_per_host)[1]
        self.computed_s += step_s
        self.end_s = max(self.end_s, now_s + step_s)
        self.num_ready += 1
        if self.num_ready == self.num_ranks:
            self._push(self.end_s, _STEP, None)
            self._set_ranks(now_s, job.rank_threads * job.ranks_per_host)

    def _end_step(self, now_s: float) -> None:
        """Record that all ranks have ended a step, and begin the next one."""
        elapsed_s = max(now_s - self.ends_s[-1], 1e-9)
        self.ends_s.append(now_s)
        self.made.append(self.num_made)
        self.step += 1
        if not self.job.is_own_loader:
            for index, host in enumerate(self.hosts[: self.job.num_trainers]):
                # CPUs that receive. Rounded to quarters, because a pace is computed once for each value.
                host.receiving = round(4 * self.num_received[index] * self.job.receive_s / elapsed_s) / 4
                self.num_received[index] = 0
        self._set_ranks(now_s, num_threads=0)
        self._ask(now_s)

    def _set_ranks(self, now_s: float, num_threads: int) -> None:
        """Set the number of the ranks' busy threads, which changes the pace of all trainer hosts."""
        for host in self.hosts[: self.job.num_trainers]:
            host.num_threads = num_threads
            if host.busy:
                host.advance(now_s)
                self._schedule(host, now_s)

    # Endpoints

    def _begin(self, attempt: _Attempt) -> None:
        """Let an endpoint begin with a batch."""
        self.current[attempt.endpoint] = attempt
        number = (self.step - self.step % self.epoch + attempt.sequence) * self.num_ranks + attempt.rank.number
        work_s = attempt.host.host.batch_s * self.shape[number % len(self.shape)]
        if self.is_fresh[attempt.endpoint]:
            self.is_fresh[attempt.endpoint] = False
            # Multiples of the golden ratio, modulo 1, are spread evenly, and need no random numbers.
            work_s *= attempt.endpoint * 0.6180339887498949 % 1
        heapq.heappush(attempt.host.busy, (attempt.host.done + work_s, next(self.count), attempt))

    def _schedule(self, host: _Host, now_s: float) -> None:
        """Compute when the first process of a host is ready. Called after each change."""
        host.turn += 1
        if host.busy:
            host.speed = host.pace(host.num_threads)[0]
            at_s = now_s + max(0.0, host.busy[0][0] - host.done) / host.speed
            self._push(at_s, _MADE, host, host.turn)

    def _made(self, host: _Host, now_s: float) -> None:
        """Send the batch that is ready, and let its endpoint begin with the next one in its queue."""
        self.num_made += 1
        host.advance(now_s)
        host.done, _, attempt = heapq.heappop(host.busy)
        queue = self.queues[attempt.endpoint]
        self.current[attempt.endpoint] = None
        if queue:
            self._begin(heapq.heappop(queue)[2])
        attempt.load = len(queue) + (self.current[attempt.endpoint] is not None)
        self._schedule(host, now_s)
        rank = attempt.rank
        if self.job.is_own_loader:
            self._arrive(attempt, now_s)
        elif rank.host is host:
            self._push(now_s + self.job.receive_s + _LATENCY_S, _ARRIVED, attempt)
        else:
            begin_s = max(now_s, host.out_free_s)
            host.out_free_s = begin_s + host.host.sending_s
            if begin_s > now_s:
                self._push(begin_s, _SENT, attempt)
            else:
                self._receive(attempt, now_s)

    def _receive(self, attempt: _Attempt, now_s: float) -> None:
        """Let the interface of the rank's host receive a batch, after the batches that it began to receive before."""
        job, target = self.job, attempt.rank.host
        begin_s = max(now_s, target.in_free_s)
        target.in_free_s = begin_s + job.network_s
        # Sending, the network and receiving overlap, so the slowest of them decides.
        at_s = max(target.in_free_s, now_s + attempt.host.host.sending_s, now_s + job.receive_s)
        self._push(at_s + _LATENCY_S, _ARRIVED, attempt)

    def _arrive(self, attempt: _Attempt, now_s: float) -> None:
        """Record that a rank has received a batch. The rank then takes the batch, or asks for more."""
        rank = attempt.rank
        rank.arrived.add(attempt.sequence)
        if not self.job.is_own_loader:
            rank.loads[attempt.endpoint] = attempt.load
            rank.count(attempt.endpoint, -1)
            self.num_received[rank.number // self.job.ranks_per_host] += 1
            # As the reader does: if half of the window waits, an earlier batch is late, and more batches are requested.
            waiting = len(rank.arrived)
            if 2 * waiting >= rank.window:
                rank.extra = max(rank.extra, min(waiting, (_MAX_GROWTH - 1) * rank.window))
        if rank.is_asking:
            if rank.next in rank.arrived:
                self._deliver(rank, now_s)
            else:
                self._refill(rank, now_s)

    def _mean_of_epoch_s(self) -> float:
        """Return the mean step time of an epoch. Steps that are not simulated are assumed to be like the last ones.

        While a window fills or empties, steps end sooner or later than batches are made. So the mean is computed from
        the batches that were made and not from the steps that ended. No step is shorter than its computation.
        """
        ends_s, last = np.array(self.ends_s), self.num_steps
        if last >= self.epoch:
            return float(ends_s[-1] / last)
        first = last // _FIRST_PART
        steps = max(1, self.made[-1] - self.made[first]) / self.num_ranks
        late_s = max(self.computed_s / self.num_ranks / last, float((ends_s[-1] - ends_s[first]) / steps))
        if self.job.steps_per_epoch is None:
            return late_s
        return float((ends_s[-1] + (self.epoch - last) * late_s) / self.epoch)


def _blocks(shape: Sequence[float], count: int) -> list[float]:
    """Return relative batch times whose mean is 1 in each block."""
    values = np.asarray(shape)
    values = values[((np.arange(_BLOCK) + 0.5) / _BLOCK * len(values)).astype(int)]
    values = values / values.mean() if values.mean() > 0 else np.ones(_BLOCK)
    random = np.random.default_rng(0)
    blocks: list[float] = np.concatenate([random.permutation(values) for _ in range(-(-count // _BLOCK))]).tolist()
    return blocks
