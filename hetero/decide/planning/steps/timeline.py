"""The steps of a job on a cluster, computed one event after the other.

The arithmetic of model.py says which part of a cluster limits the steps. It does not say how much longer steps take
because the parts wait for each other. For example, batches arrive in order, so a slow endpoint holds up the batches
of the fast ones. A `Timeline` follows each batch through the data plane. This takes milliseconds, so a plan makes
timelines of its best candidates only. Deterministic: equal arguments give equal times.

The rules are those of the readers and endpoints (hetero/reader, hetero/endpoint):

- A rank asks for the batches of its window in advance: two per endpoint that serves it, within a limit of bytes.
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

from hetero.reader.window_size import WindowGrowth

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
"""Places that a window has at least, see `hetero.reader.window.Window.size`."""
_LEAST_USED = 8
"""Endpoints that a rank of a large job uses at least, see `hetero.reader.routing`."""
_LATENCY_S = 0.0005
"""Seconds from the end of a transfer until the rank has the batch."""
_FIRST_PART = 3
"""The first third of a timeline is left out: its steps depend on how the timeline begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineHost:
    """One host."""

    num_endpoints: int
    batch_s: float
    """Seconds of a mean batch in a process that is alone on the host."""
    pace: Callable[[int, int, float], tuple[float, float]]
    """Returns the speed of each busy process, relative to one that is alone on the host, and how many times longer a
    step takes. Its arguments are the numbers of busy processes, of busy threads of ranks, and of CPUs that receive."""
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
    """The processes of a host. All processes that make a batch progress equally fast."""

    def __init__(self, host: TimelineHost, paces: dict[tuple[int, int, float], tuple[float, float]]) -> None:
        self.host = host
        self.paces = paces
        """Results of the host's ``pace`` by its arguments. Equal hosts share them."""
        self.busy: list[tuple[float, int, _Attempt]] = []
        """Heap of the batches in the making, each with the value of `work_s` at which it is ready."""
        self.work_s = self.updated_s = 0.0
        """Seconds of work that each busy process has done, and the time of the last update of this number."""
        self.speed = 1.0
        """Seconds of work that each busy process does per second."""
        self.num_load_changes = 0
        """Changes of the load so far. Each change plans a new event with this number. Older events are skipped."""
        self.in_free_s = self.out_free_s = 0.0
        """Times from which the network interface can receive and send the next batch."""
        self.num_threads, self.receiving_cpus = 0, 0.0
        """Busy threads of ranks, and CPUs that receive batches."""

    def advance(self, now_s: float) -> None:
        """Add the work that each busy process has done until now."""
        self.work_s += (now_s - self.updated_s) * self.speed
        self.updated_s = now_s

    def pace(self, num_threads: int) -> tuple[float, float]:
        """Return what the host's ``pace`` returns for the processes that are busy now."""
        key = len(self.busy), num_threads, self.receiving_cpus
        found = self.paces.get(key)
        if found is None:
            found = self.paces[key] = self.host.pace(*key)
        return found


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request of a rank for a batch."""

    rank: _Rank
    batch: int
    """Number of the batch within the rank's epoch."""
    endpoint: int
    host: _Host
    """Host of the endpoint."""
    endpoint_load: int
    """Requests that the endpoint had left when the batch was ready. The batch reports this number."""


class _Rank:
    """A reader: the endpoints that it may ask, what it knows of them, and its window before any growth, in batches."""

    def __init__(self, number: int, host: _Host, endpoints: list[int], window: int) -> None:
        self.number, self.host, self.endpoints, self.window = number, host, endpoints, window
        self.outstanding = dict.fromkeys(endpoints, 0)
        """Number of requests to each endpoint whose batches have not arrived."""
        self.reported_loads = dict.fromkeys(endpoints, 0)
        """Requests of all ranks that each endpoint last reported."""
        # Below 0, because endpoints that were never chosen come first, in this order.
        self.last_choices = {endpoint: order - len(endpoints) for order, endpoint in enumerate(endpoints)}
        self.num_choices = 0
        self.least_busy = [(0, 0, self.last_choices[endpoint], endpoint) for endpoint in endpoints]
        """Heap of endpoints by outstanding requests, reported loads and last choices. Old values are out of date."""
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Empty the window."""
        self.next_batch = self.end_of_plan = self.num_requested = 0
        """Batches of the epoch that were delivered, planned and requested so far. Batches are numbered from 0."""
        self.growth = WindowGrowth()
        self.arrived: set[int] = set()
        """Batches that have arrived and wait for their turn."""
        self.is_waiting = False
        """Whether the script waits for `next_batch`."""

    def choose(self) -> int:
        """Return the endpoint for the next request, and count the request."""
        while True:
            outstanding, load, last_choice, endpoint = heapq.heappop(self.least_busy)
            # Skip an entry that is out of date, because a heap cannot change its entries.
            if (
                outstanding == self.outstanding[endpoint]
                and last_choice == self.last_choices[endpoint]
                and load == self.reported_loads[endpoint]
            ):
                self.num_choices += 1
                self.last_choices[endpoint] = self.num_choices
                self.change_outstanding(endpoint, 1)
                return endpoint

    def change_outstanding(self, endpoint: int, change: int) -> None:
        """Change the number of outstanding requests to an endpoint, and put its present values into the heap."""
        self.outstanding[endpoint] += change
        entry = self.outstanding[endpoint], self.reported_loads[endpoint], self.last_choices[endpoint], endpoint
        heapq.heappush(self.least_busy, entry)


class Timeline:
    """The steps of a job on a cluster. Used once.

    Args:
        job: The job.
        hosts: The trainer hosts, then the data hosts. At least one has an endpoint.
        is_long: Whether to follow more steps, which takes longer and is more exact.
    """

    def __init__(self, job: TimelineJob, hosts: Sequence[TimelineHost], *, is_long: bool = False) -> None:
        self.job = job
        # Plans take a fifth less time since equal hosts share their paces.
        paces: dict[TimelineHost, dict[tuple[int, int, float], tuple[float, float]]] = {}
        self.hosts = [_Host(host, paces.setdefault(host, {})) for host in hosts]
        self.num_ranks = job.num_trainers * job.ranks_per_host
        self.endpoints = [(host, index) for host in self.hosts for index in range(host.host.num_endpoints)]
        """Host of each endpoint, and the number of the endpoint on this host."""
        self.queues: list[list[tuple[int, int, _Attempt]]] = [[] for _ in self.endpoints]
        self.current: list[_Attempt | None] = [None] * len(self.endpoints)
        """Request that each endpoint works on. `queues` has the requests that wait, as heaps by number of the batch."""
        self.ranks = self._make_ranks()
        # In a turn, each endpoint makes a batch. A step takes one per rank, so a turn lasts endpoints / ranks steps.
        steps_per_turn = max(1.0, len(self.endpoints) / self.num_ranks)
        wanted_steps = max(_LEAST_STEPS, _LEAST_BATCHES / self.num_ranks, _TURNS * steps_per_turn)
        max_batches = _MAX_BATCHES
        if is_long:
            wanted_steps, max_batches = max(wanted_steps, _LONG_STEPS), _LONG_BATCHES
        self.num_steps = max(_LEAST_STEPS, math.ceil(min(wanted_steps, max_batches / self.num_ranks)))
        # A job without epochs has one epoch, which is longer than any timeline.
        self.epoch_steps = job.steps_per_epoch or 10**9
        if self.epoch_steps < self.num_steps:
            # Take whole epochs, because a part of an epoch would have the wait at its start, but not all of its steps.
            self.num_steps = round(self.num_steps / self.epoch_steps) * self.epoch_steps
        # One more block is for the batches of later steps, which ranks request in advance.
        self.relative_s = _blocks(job.relative_s, self.num_steps * self.num_ranks + _BLOCK)
        self.events: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        """Heap of events: time, order, method that handles the event, and the argument of the method."""
        self.order = itertools.count()
        """Decides between entries of a heap that are otherwise equal."""
        self.step = 0
        self.ends_s = [0.0]
        """Time of the beginning, and of the end of each step."""
        self.num_made, self.made_by_step = 0, [0]
        """Batches that the endpoints have made so far, and at each of `ends_s`."""
        self.computed_s = 0.0
        """Seconds that all ranks have computed."""
        self.num_computing, self.end_s = 0, 0.0
        """Ranks that have begun to compute the present step, and when the last of them ends."""
        self.num_received = [0] * job.num_trainers
        """Batches that each trainer host has received during the present step."""
        # In a long epoch, each endpoint begins with a part of a batch, see `_begin_batch`.
        self.begins_with_part = [self.epoch_steps > 3 * self.num_steps] * len(self.endpoints)

    def _make_ranks(self) -> list[_Rank]:
        """Return the ranks, each with its trainer host, the endpoints that it may ask, and its window."""
        job = self.job
        host_of = [self.hosts[number // job.ranks_per_host] for number in range(self.num_ranks)]
        if job.is_own_loader:
            # Each rank asks only its own processes, with two batches in flight for each. All trainer hosts are alike.
            num_own = host_of[0].host.num_endpoints // job.ranks_per_host
            return [
                _Rank(number, host, list(range(number * num_own, (number + 1) * num_own)), max(1, 2 * num_own))
                for number, host in enumerate(host_of)
            ]
        # List the first endpoint of each host, then the second of each. So a rank uses endpoints of many hosts.
        across = sorted(range(len(self.endpoints)), key=lambda endpoint: self.endpoints[endpoint][1])
        # A rank uses twice its share of the endpoints, and has two requests for each endpoint of its share.
        twice_share = -(-2 * len(across) // self.num_ranks)
        ranks = []
        for number, host in enumerate(host_of):
            start = number * len(across) // self.num_ranks
            used = (across[start:] + across[:start])[: max(_LEAST_USED, twice_share)]
            ranks.append(_Rank(number, host, used, max(_LEAST_WINDOW, twice_share)))
        return ranks

    @property
    def num_batches(self) -> int:
        """Batches of all ranks that `mean_step_s` computes."""
        return self.num_steps * self.num_ranks

    def mean_step_s(self) -> float:
        """Return the mean step time in seconds. Handles the events in the order of their times until all steps end."""
        self._begin_step(0.0)
        while self.step < self.num_steps:
            now_s, _, handle, subject = heapq.heappop(self.events)
            handle(subject, now_s)
        return self._mean_of_epoch_s()

    @property
    def longest_step_s(self) -> float:
        """The longest step that `mean_step_s` counted."""
        ends_s = self.ends_s[self.num_steps // _FIRST_PART :]
        return max(end_s - begin_s for begin_s, end_s in itertools.pairwise(ends_s))

    def _push(self, at_s: float, handle: Callable[[Any, float], None], subject: object) -> None:
        """Plan an event: call ``handle(subject, at_s)`` at this time of the job."""
        heapq.heappush(self.events, (at_s, next(self.order), handle, subject))

    # Ranks

    def _begin_step(self, now_s: float) -> None:
        """Let the training script of each rank wait for the batch of the next step."""
        self.num_computing, self.end_s = 0, now_s
        if self.step % self.epoch_steps == 0:
            for rank in self.ranks:
                rank.begin_epoch()
                self._extend_plan(rank)
            # The ranks begin at the same time. So each requests one batch, then each requests its next batch.
            requesting = list(self.ranks)
            while requesting:
                requesting = [rank for rank in requesting if self._request(rank, now_s)]
        for rank in self.ranks:
            rank.is_waiting = True
            self._take_or_request(rank, now_s)

    def _take_or_request(self, rank: _Rank, now_s: float) -> None:
        """Give a waiting rank its next batch if the batch has arrived. Otherwise let the rank fill its window."""
        if rank.next_batch in rank.arrived:
            self._deliver(rank, now_s)
        else:
            self._fill_window(rank, now_s)

    def _extend_plan(self, rank: _Rank) -> None:
        """Let a rank plan batches up to the end of its window, which may have grown, but not beyond the epoch."""
        num_places = rank.growth.limit(num_waiting=len(rank.arrived), size=rank.window)
        rank.end_of_plan = max(rank.end_of_plan, min(rank.next_batch + num_places, self.epoch_steps))

    def _fill_window(self, rank: _Rank, now_s: float) -> None:
        """Let a rank request batches until its window is full."""
        self._extend_plan(rank)
        while self._request(rank, now_s):
            pass

    def _request(self, rank: _Rank, now_s: float) -> bool:
        """Send the next request of a rank. Return False if all planned batches are requested, or its memory is full."""
        batch, is_torch_loader = rank.num_requested, self.job.is_own_loader
        # torch's loader does not bound its memory.
        is_memory_full = batch - rank.next_batch >= self.job.window_batches and not is_torch_loader
        if batch >= rank.end_of_plan or is_memory_full:
            return False
        rank.num_requested += 1
        # torch's loader gives its batches to its processes in turn.
        endpoint = rank.endpoints[batch % len(rank.endpoints)] if is_torch_loader else rank.choose()
        attempt = _Attempt(rank, batch, endpoint, host=self.endpoints[endpoint][0], endpoint_load=0)
        if self.current[endpoint] is None:
            # One more process is busy from now on. So count the work of the others first, and then plan their next end.
            attempt.host.advance(now_s)
            self._begin_batch(attempt)
            self._schedule(attempt.host, now_s)
        else:
            heapq.heappush(self.queues[endpoint], (batch, next(self.order), attempt))
        return True

    def _deliver(self, rank: _Rank, now_s: float) -> None:
        """Give a rank its next batch. The rank then computes. If all ranks compute, plan the end of the step."""
        rank.arrived.remove(rank.next_batch)
        rank.next_batch += 1
        rank.is_waiting = False
        # A window that has grown loses a part of its additional places with each delivery.
        rank.growth.delivered()
        self._fill_window(rank, now_s)
        job, host = self.job, rank.host
        num_threads = job.rank_threads * job.ranks_per_host
        step_s = job.steps_s[self.step % len(job.steps_s)]
        # Processes that preprocess on the same host make the step longer, by the second number that `pace` returns.
        if host.busy:
            step_s *= host.pace(num_threads)[1]
        self.computed_s += step_s
        self.end_s = max(self.end_s, now_s + step_s)
        self.num_computing += 1
        if self.num_computing == self.num_ranks:
            self._push(self.end_s, self._end_step, None)
            # As an approximation, the threads of ranks slow down the processes only while all ranks compute.
            self._set_rank_threads(now_s, num_threads)

    def _end_step(self, _: None, now_s: float) -> None:
        """Record the end of a step, set how many CPUs of each trainer host receive batches, and begin the next step."""
        elapsed_s = max(now_s - self.ends_s[-1], 1e-9)
        self.ends_s.append(now_s)
        self.made_by_step.append(self.num_made)
        self.step += 1
        # Processes of torch's own loader share memory with their rank, so no CPU receives their batches.
        if not self.job.is_own_loader:
            for index, host in enumerate(self.hosts[: self.job.num_trainers]):
                receiving_cpus = self.num_received[index] * self.job.receive_s / elapsed_s
                # Round to quarters. A pace is computed once for each value, so fewer values take less time.
                host.receiving_cpus = round(4 * receiving_cpus) / 4
                self.num_received[index] = 0
        self._set_rank_threads(now_s, num_threads=0)
        self._begin_step(now_s)

    def _set_rank_threads(self, now_s: float, num_threads: int) -> None:
        """Set the number of the ranks' busy threads on each trainer host, which changes the host's pace."""
        for host in self.hosts[: self.job.num_trainers]:
            host.num_threads = num_threads
            if host.busy:
                host.advance(now_s)
                self._schedule(host, now_s)

    # Endpoints

    def _begin_batch(self, attempt: _Attempt) -> None:
        """Let an endpoint begin with a batch."""
        self.current[attempt.endpoint] = attempt
        # Number of the batch among all batches of the job, so each batch has its own time.
        first_step_of_epoch = self.step - self.step % self.epoch_steps
        number = (first_step_of_epoch + attempt.batch) * self.num_ranks + attempt.rank.number
        batch_s = attempt.host.host.batch_s * self.relative_s[number % len(self.relative_s)]
        if self.begins_with_part[attempt.endpoint]:
            self.begins_with_part[attempt.endpoint] = False
            # Begin as if the endpoint had made a part before. Otherwise all would deliver together for many turns. The
            # parts that are left are multiples of the golden ratio, modulo 1, which are spread evenly.
            batch_s *= attempt.endpoint * 0.6180339887498949 % 1
        heapq.heappush(attempt.host.busy, (attempt.host.work_s + batch_s, next(self.order), attempt))

    def _schedule(self, host: _Host, now_s: float) -> None:
        """Plan the event when the first busy process of a host is ready. Called after each change of the load."""
        host.num_load_changes += 1
        if host.busy:
            # The first number of a pace is the speed of each busy process.
            host.speed = host.pace(host.num_threads)[0]
            at_s = now_s + max(0.0, host.busy[0][0] - host.work_s) / host.speed
            self._push(at_s, self._send_made_batch, (host, host.num_load_changes))

    def _send_made_batch(self, planned: tuple[_Host, int], now_s: float) -> None:
        """Send the batch that is ready first on a host, and let its endpoint begin with the next one in its queue."""
        host, load_change = planned
        # Skip an event that is out of date. A later change of the load has planned a new event.
        if host.num_load_changes != load_change:
            return
        self.num_made += 1
        host.advance(now_s)
        # Replace `work_s` by the value at which the batch is ready, which has no rounding errors of `advance`.
        host.work_s, _, attempt = heapq.heappop(host.busy)
        queue = self.queues[attempt.endpoint]
        self.current[attempt.endpoint] = None
        if queue:
            self._begin_batch(heapq.heappop(queue)[2])
        attempt.endpoint_load = len(queue) + (self.current[attempt.endpoint] is not None)
        self._schedule(host, now_s)
        if self.job.is_own_loader:
            self._arrive(attempt, now_s)
        elif attempt.rank.host is host:
            # A batch from the rank's own host does not use the network interface.
            self._push(now_s + self.job.receive_s + _LATENCY_S, self._arrive, attempt)
        else:
            begin_s = max(now_s, host.out_free_s)
            host.out_free_s = begin_s + host.host.sending_s
            # If the interface still sends another batch, this batch comes to the receiver later.
            if begin_s > now_s:
                self._push(begin_s, self._receive, attempt)
            else:
                self._receive(attempt, now_s)

    def _receive(self, attempt: _Attempt, now_s: float) -> None:
        """Let the interface of the rank's host receive a batch, after the batches that it began to receive before."""
        job, target = self.job, attempt.rank.host
        begin_s = max(now_s, target.in_free_s)
        target.in_free_s = begin_s + job.network_s
        # Sending, the network and receiving overlap, so the slowest of them decides.
        end_s = max(target.in_free_s, now_s + attempt.host.host.sending_s, now_s + job.receive_s)
        self._push(end_s + _LATENCY_S, self._arrive, attempt)

    def _arrive(self, attempt: _Attempt, now_s: float) -> None:
        """Record that a batch has arrived at its rank. Only a rank whose script waits takes or requests batches."""
        rank = attempt.rank
        rank.arrived.add(attempt.batch)
        # torch's own loader takes its processes in turn, gets batches by shared memory, and its window does not grow.
        if not self.job.is_own_loader:
            rank.reported_loads[attempt.endpoint] = attempt.endpoint_load
            rank.change_outstanding(attempt.endpoint, -1)
            self.num_received[rank.number // self.job.ranks_per_host] += 1
            # This call lets the window grow if many batches wait for an earlier one. Its answer does not matter here.
            rank.growth.is_held_up(num_waiting=len(rank.arrived), size=rank.window)
        if rank.is_waiting:
            self._take_or_request(rank, now_s)

    def _mean_of_epoch_s(self) -> float:
        """Return the mean step time of an epoch. Steps that are not simulated are assumed to be like the last ones.

        In a part of an epoch, steps may end faster than batches are made, because they use the batches in the window.
        In the long run, a step takes the time in which one batch for each rank is made, but at least its computation.
        """
        ends_s, last = np.array(self.ends_s), self.num_steps
        # Whole epochs begin and end with an empty window, so the mean of their steps is right.
        if last >= self.epoch_steps:
            return float(ends_s[-1] / last)
        # In a part of an epoch, leave out the first steps, because they depend on how the timeline begins.
        first = last // _FIRST_PART
        # Batches that were made since then, as a number of steps. Count at least one, because this number divides.
        steps_made = max(1, self.made_by_step[-1] - self.made_by_step[first]) / self.num_ranks
        made_step_s = float((ends_s[-1] - ends_s[first]) / steps_made)
        computed_step_s = self.computed_s / self.num_ranks / last
        later_step_s = max(computed_step_s, made_step_s)
        # Without epochs, the wait at the beginning happens once and does not count.
        if self.job.steps_per_epoch is None:
            return later_step_s
        return float((ends_s[-1] + (self.epoch_steps - last) * later_step_s) / self.epoch_steps)


def _blocks(relative_s: Sequence[float], count: int) -> list[float]:
    """Return at least ``count`` relative batch times in blocks of `_BLOCK`. Each block has the mean 1.

    The ascending ``relative_s`` is divided into `_BLOCK` equal parts, and a block has the middle value of each part.
    All blocks have the same values in different random orders, so long and short timelines have equally slow batches.
    """
    values = np.asarray(relative_s)
    values = values[((np.arange(_BLOCK) + 0.5) / _BLOCK * len(values)).astype(int)]
    values = values / values.mean() if values.mean() > 0 else np.ones(_BLOCK)
    random = np.random.default_rng(0)
    num_blocks = -(-count // _BLOCK)
    blocks: list[float] = np.concatenate([random.permutation(values) for _ in range(num_blocks)]).tolist()
    return blocks
