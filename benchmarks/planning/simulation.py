"""A discrete-event simulation of a training job with data hosts: how long does a step take?

The planner is compared with it. It shares no code and no formula with `hetero.decide.planning`, and imports
nothing of hetero. Its parts follow the data plane as it is:

- A rank's window holds two batches per endpoint, of all ranks together, within its bytes. It delivers in order, grows
  while a late batch holds up others, and is refilled only while the script asks for a batch.
- A request goes to the endpoint with the fewest outstanding requests of this rank. The next batch is requested a second
  time if it is overdue, within 5 % of extra work.
- An endpoint computes one batch at a time, the lowest step first. Processes share the vCPUs of their host fairly.
- A batch occupies the NIC of its host and the NIC of the rank's host. Each direction of a NIC sends one batch after the
  other at its full speed, which has the throughput of fair sharing.
- All ranks end a step together. Each epoch begins with an empty window.
- Without endpoints each rank has loader processes, which get batches in turn, as in torch.
- A step takes longer than its accelerator needs if the threads of the rank lack CPU time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from typing import Any

from planning.draws import NUM_DRAWS, draw
from planning.hosts import BusyHost
from planning.readers import Attempt, Endpoint, Reader, endpoints_of_rank, window_capacity
from planning.workload import Cluster, Result, Workload

__all__ = ["simulate", "step_times"]

_DONE, _ARRIVED, _SEND, _OVERDUE, _STEP = range(5)
_RECEIVE_BIN = 0.25
"""CPUs of receiving are rounded to this. Fewer speeds have to be computed."""
_TURNS = 12
"""Least number of batches that each endpoint computes in a run."""
_MAX_STEPS = 20_000
_GOLDEN, _SILVER = (math.sqrt(5.0) - 1.0) / 2.0, math.sqrt(2.0) - 1.0
"""Multiples of these, modulo 1, fill [0, 1) evenly. Short runs then have the right share of slow batches and hosts."""


def simulate(workload: Workload, cluster: Cluster, *, num_steps: int = 300, seed: int = 0) -> Result:
    """Simulate a job from its first step.

    Short epochs are simulated whole. Of a long epoch, the begin is simulated until each endpoint has computed some
    batches. The rest of the epoch is assumed to continue at the speed of the end of the simulated part.

    Args:
        workload: The job.
        cluster: Its hosts.
        num_steps: Least number of global steps. More are simulated if there are many endpoints per rank.
        seed: Of the random numbers, which are the same for all clusters.
    """
    if cluster.lacks_memory(workload):
        return _impossible(workload)
    return _Simulation(workload, cluster, num_steps, seed).run()


def step_times(
    workload: Workload, cluster: Cluster, *, num_steps: int, seed: int = 0
) -> tuple[list[float], list[float]]:
    """Return the times of the global steps of a job from its first step, and how long each waited for data."""
    run = _Simulation(workload, cluster, num_steps, seed)
    run.run()
    return [end_s - begin_s for begin_s, end_s in itertools.pairwise(run.ends_s)], run.waits_s


def _impossible(workload: Workload) -> Result:
    return Result(
        step_s=math.inf,
        headspace_s=workload.step_s,
        data_wait_s=math.inf,
        trainer_nic_share=0.0,
        data_nic_share=0.0,
        trainer_cpu_share=0.0,
        data_cpu_share=0.0,
        num_hedges=0,
        num_steps=0,
    )


class _Simulation:
    """One run. `run` returns its result."""

    def __init__(self, workload: Workload, cluster: Cluster, num_steps: int, seed: int) -> None:
        self.workload, self.cluster = workload, cluster
        self.draws = draw(workload, seed)
        self.seed = seed
        self.events: list[tuple[float, int, int, Any, int]] = []
        self.num_events = 0
        num_ranks = workload.num_ranks
        hosts = [*cluster.trainers, *cluster.data]
        self.hosts = [
            BusyHost(host, index, workload, is_trainer=index < len(cluster.trainers))
            for index, host in enumerate(hosts)
        ]
        self.trainers = self.hosts[: len(cluster.trainers)]
        self.ranks_per_host = -(-num_ranks // len(self.trainers))
        whole_threads = max(1, math.ceil(workload.rank_cpu_cores))
        self.thread_need = workload.rank_cpu_cores / whole_threads
        self.threads_per_host = whole_threads * self.ranks_per_host if workload.rank_cpu_cores else 0
        for host in self.trainers:
            host.thread_need = self.thread_need
        self.is_local = not cluster.num_endpoints
        self.readers = self._make_readers()
        num_slots = cluster.num_endpoints or num_ranks * workload.local_processes
        self.turn = max(1.0, num_slots / num_ranks)
        self.num_steps = min(_MAX_STEPS, max(num_steps, math.ceil(_TURNS * self.turn)))
        if workload.steps_per_epoch < self.num_steps:
            self.num_steps = round(self.num_steps / workload.steps_per_epoch) * workload.steps_per_epoch
        self.batch_bytes = workload.batch_bytes
        self.receive_s = self.batch_bytes * workload.receive_cpu_s_per_gb * 1e-9
        self.has_slow = cluster.slow_batch_share > 0 or cluster.slow_host_share > 0
        self.step = 0
        self.position = 0
        """Step within the epoch."""
        self.ends_s: list[float] = [0.0]
        self.step_end_s = 0.0
        self.num_ready = 0
        self.waits_s: list[float] = []
        self.headspace_s = 0.0
        self.ideal_s = 0.0
        self.num_hedges = 0
        self.num_attempts = 0

    def _make_readers(self) -> list[Reader]:
        workload, num_ranks = self.workload, self.workload.num_ranks
        readers = []
        if self.is_local:
            for rank in range(num_ranks):
                host = self.trainers[rank // self.ranks_per_host]
                own = [Endpoint(host, index) for index in range(workload.local_processes)]
                size = 2 * workload.local_processes
                readers.append(Reader(rank, host, own, size=size, capacity=1 << 30, is_local=True))
            return readers
        endpoints = [Endpoint(host, index) for host in self.hosts for index in range(host.host.endpoints)]
        planned = max(2, -(-2 * len(endpoints) // num_ranks))
        for rank in range(num_ranks):
            host = self.trainers[rank // self.ranks_per_host]
            memory_bytes = host.host.memory_bytes / self.ranks_per_host
            capacity = window_capacity(workload.batch_bytes, memory_bytes=memory_bytes, planned=planned)
            used = endpoints_of_rank(endpoints, rank, num_ranks)
            readers.append(Reader(rank, host, used, size=max(3, planned), capacity=capacity, is_local=False))
        return readers

    # Events

    def run(self) -> Result:
        """Run all steps."""
        events = self.events
        self._ask(0.0)
        while self.step < self.num_steps:
            now_s, _, kind, subject, number = heapq.heappop(events)
            if kind == _DONE:
                if subject.version == number:
                    self._computed(subject, now_s)
            elif kind == _ARRIVED:
                if not subject.is_ended:
                    self._arrived(subject, now_s)
            elif kind == _STEP:
                self._end_step(now_s)
            elif kind == _SEND:
                if not subject.is_ended:
                    self._transfer(subject, now_s)
            else:
                subject.timer_s = math.inf
                self._watch(subject, now_s)
        return self._result()

    def _push(self, time_s: float, kind: int, subject: Any, number: int = 0) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time_s, self.num_events, kind, subject, number))

    # Steps

    def _ask(self, now_s: float) -> None:
        """Let all ranks ask for their next batch."""
        self.num_ready = 0
        self.step_end_s = now_s
        num_batches = self.workload.steps_per_epoch
        if self.position == 0:
            self._fill_windows(now_s)
        for reader in self.readers:
            reader.is_waiting = True
            if reader.next_sequence in reader.waiting:
                self._deliver(reader, now_s)
            else:
                reader.add(num_batches)
                self._request(reader, now_s)
                self._watch(reader, now_s)

    def _fill_windows(self, now_s: float) -> None:
        """Request the first batches of an epoch. The ranks do it at the same time, so their requests alternate."""
        pending = list(self.readers)
        for reader in pending:
            reader.add(self.workload.steps_per_epoch)
        while pending:
            pending = [reader for reader in pending if self._request_one(reader, now_s)]

    def _deliver(self, reader: Reader, now_s: float) -> None:
        """Give a rank its batch. It begins its step."""
        reader.deliver()
        reader.add(self.workload.steps_per_epoch)
        self._request(reader, now_s)
        own_s = self.draws.step_s[(self.step * len(self.readers) + reader.rank) % NUM_DRAWS]
        self.ideal_s = max(self.ideal_s, own_s)
        end_s = now_s + own_s * reader.host.stretch(self.threads_per_host)
        self.step_end_s = max(self.step_end_s, end_s)
        self.num_ready += 1
        if self.num_ready == len(self.readers):
            self.waits_s.append(now_s - self.ends_s[-1])
            self._push(self.step_end_s, _STEP, None)
            self._set_ranks(now_s, self.threads_per_host)

    def _end_step(self, now_s: float) -> None:
        self.headspace_s += self.ideal_s
        self.ideal_s = 0.0
        begin_s = self.ends_s[-1]
        self.ends_s.append(now_s)
        self.step += 1
        self.position += 1
        if self.position == self.workload.steps_per_epoch:
            self.position = 0
            for reader in self.readers:
                reader.begin_epoch()
        if not self.is_local:
            for host in self.trainers:
                cpus = host.received_bytes * self.workload.receive_cpu_s_per_gb * 1e-9 / max(1e-9, now_s - begin_s)
                host.taken = round(min(cpus, host.host.vcpus) / _RECEIVE_BIN) * _RECEIVE_BIN
                host.received_bytes = 0.0
        self._set_ranks(now_s, 0)
        self._ask(now_s)

    def _set_ranks(self, now_s: float, num_threads: int) -> None:
        """Change how many threads of ranks compete with the processes of the trainer hosts."""
        for host in self.trainers:
            if host.running:
                host.advance(now_s)
                host.set_ranks(num_threads, host.taken)
                self._schedule(host, now_s)
            else:
                host.set_ranks(num_threads, host.taken)

    # Requests

    def _request(self, reader: Reader, now_s: float) -> None:
        """Request the missing batches that have room."""
        while self._request_one(reader, now_s):
            pass

    def _request_one(self, reader: Reader, now_s: float) -> bool:
        """Request the first missing batch. Return False if nothing is missing or there is not enough room."""
        if not reader.has_room():
            return False
        place = reader.choose(now_s)
        sequence = reader.next_missing
        reader.next_missing += 1
        attempt = Attempt(reader, sequence, place, now_s)
        reader.attempts[sequence] = [attempt]
        self._start_attempt(attempt, now_s)
        return True

    def _start_attempt(self, attempt: Attempt, now_s: float) -> None:
        reader, place = attempt.reader, attempt.place
        reader.num_attempts += 1
        reader.occupy(place)
        endpoint = place.endpoint
        self.num_attempts += 1
        if endpoint.current is None:
            host = endpoint.host
            host.advance(now_s)
            self._compute(endpoint, attempt, now_s)
            self._schedule(host, now_s)
        else:
            heapq.heappush(endpoint.queue, (attempt.sequence, self.num_attempts, attempt))

    def _watch(self, reader: Reader, now_s: float) -> None:
        """Request the next batch of a waiting rank a second time if it is overdue, or look again when it is."""
        if reader.is_local or not reader.is_waiting:
            return
        reader.needs_endpoint = False
        attempts = reader.attempts.get(reader.next_sequence, ())
        deadline_s = reader.deadline_s
        if len(attempts) != 1 or deadline_s == math.inf:
            return
        attempt = attempts[0]
        due_s = attempt.since_s + deadline_s
        if due_s > now_s:
            if reader.timer_s > due_s:
                reader.timer_s = due_s
                self._push(due_s, _OVERDUE, reader)
            return
        if reader.credit < 20 or reader.is_over_capacity:
            return
        other = reader.choose_other(attempt.place, now_s)
        if other is None:
            reader.needs_endpoint = True
            return
        reader.credit -= 20
        self.num_hedges += 1
        hedge = Attempt(reader, attempt.sequence, other, now_s)
        hedge.is_hedge = True
        attempts.append(hedge)
        self._start_attempt(hedge, now_s)

    def _arrived(self, attempt: Attempt, now_s: float) -> None:
        reader, sequence = attempt.reader, attempt.sequence
        attempt.is_ended = True
        reader.num_attempts -= 1
        if not reader.is_local:
            reader.answered(attempt, now_s)
            reader.release(attempt.place)
            reader.host.received_bytes += self.batch_bytes
        for other in reader.attempts.pop(sequence):
            if other is not attempt:
                if attempt.is_hedge:
                    reader.avoid(other.place, now_s - other.since_s, now_s)
                self._cancel(other, now_s)
        grew = reader.arrived(sequence)
        if not reader.is_waiting:
            return
        if sequence == reader.next_sequence:
            self._deliver(reader, now_s)
        elif grew:
            reader.add(self.workload.steps_per_epoch)
            self._request(reader, now_s)
        elif reader.needs_endpoint:
            self._watch(reader, now_s)

    def _cancel(self, attempt: Attempt, now_s: float) -> None:
        """End an attempt whose batch another endpoint has delivered."""
        attempt.is_ended = True
        attempt.reader.num_attempts -= 1
        attempt.reader.release(attempt.place)
        endpoint = attempt.place.endpoint
        if endpoint.current is not attempt:
            return  # it waits in the queue or is on its way, and is ignored there
        host = endpoint.host
        host.advance(now_s)
        host.running = [entry for entry in host.running if entry[2] is not attempt]
        heapq.heapify(host.running)
        self._next(endpoint, now_s)
        self._schedule(host, now_s)

    # Hosts

    def _compute(self, endpoint: Endpoint, attempt: Attempt, now_s: float) -> None:
        """Let an endpoint begin a batch. The caller advances its host before and schedules it afterwards."""
        endpoint.current = attempt
        host, draws = endpoint.host, self.draws
        epoch_begin = self.step - self.position
        number = ((epoch_begin + attempt.sequence) * len(self.readers) + attempt.reader.rank) % NUM_DRAWS
        work_s = draws.batch_cpu_s[number] / host.host.speed + draws.batch_wait_s[number]
        if self.has_slow:
            work_s *= self._slowness(host, now_s)
        self.num_events += 1
        heapq.heappush(host.running, (host.progressed + work_s, self.num_events, attempt))

    def _slowness(self, host: BusyHost, now_s: float) -> float:
        """Return how many times longer a batch takes that begins now."""
        cluster, factor = self.cluster, 1.0
        if cluster.slow_batch_share and self.num_attempts * _GOLDEN % 1.0 < cluster.slow_batch_share:
            factor = cluster.slow_batch_factor
        if cluster.slow_host_share and not host.is_trainer:
            episode = int(now_s / cluster.slow_episode_s)
            if (host.index * _SILVER + episode * _GOLDEN) % 1.0 < cluster.slow_host_share:
                factor *= cluster.slow_host_factor
        return factor

    def _next(self, endpoint: Endpoint, now_s: float) -> None:
        """Let an endpoint begin with the lowest step in its queue, if there is any."""
        endpoint.current = None
        while endpoint.queue:
            attempt = heapq.heappop(endpoint.queue)[2]
            if not attempt.is_ended:
                self._compute(endpoint, attempt, now_s)
                return

    def _schedule(self, host: BusyHost, now_s: float) -> None:
        """Predict when the first process of a host ends. Called after every change."""
        if not host.running:
            host.version += 1
            host.next_s = math.inf
            return
        host.rate = host.current_rate()
        next_s = now_s + max(0.0, host.running[0][0] - host.progressed) / host.rate
        if abs(next_s - host.next_s) > 1e-12 * next_s:
            host.next_s = next_s
            host.version += 1
            self._push(next_s, _DONE, host, host.version)

    def _computed(self, host: BusyHost, now_s: float) -> None:
        """End the first process of a host, send its batch, and let its endpoint begin with the next."""
        host.advance(now_s)
        finished, _, attempt = heapq.heappop(host.running)
        host.progressed = finished
        host.next_s = math.inf
        endpoint = attempt.place.endpoint
        self._next(endpoint, now_s)
        attempt.load = endpoint.load
        self._schedule(host, now_s)
        reader = attempt.reader
        if reader.is_local:
            self._arrived(attempt, now_s)
        elif reader.host is host:
            self._push(now_s + self.receive_s / host.host.speed + self.cluster.latency_s, _ARRIVED, attempt)
        elif host.out_free_s > now_s:
            begin_s = host.out_free_s
            host.out_free_s += self._occupy_out(host)
            self._push(begin_s, _SEND, attempt)
        else:
            host.out_free_s = now_s + self._occupy_out(host)
            self._transfer(attempt, now_s)

    def _occupy_out(self, host: BusyHost) -> float:
        sending_s = self.batch_bytes / host.host.nic_bytes_per_s
        host.out_busy_s += sending_s
        return sending_s

    def _transfer(self, attempt: Attempt, now_s: float) -> None:
        """Send a batch that the NIC of its host begins with now."""
        source, target = attempt.place.endpoint.host, attempt.reader.host
        receiving_s = self.batch_bytes / target.host.nic_bytes_per_s
        begin_s = max(now_s, target.in_free_s)
        target.in_free_s = begin_s + receiving_s
        target.in_busy_s += receiving_s
        end_s = max(
            begin_s + receiving_s,
            now_s + self.batch_bytes / source.host.nic_bytes_per_s,
            now_s + self.receive_s / target.host.speed,
        )
        self._push(end_s + self.cluster.latency_s, _ARRIVED, attempt)

    # The result

    def _result(self) -> Result:
        total_s, num_steps = self.ends_s[-1], self.step
        epoch = self.workload.steps_per_epoch
        step_s, wait_s = total_s / num_steps, sum(self.waits_s)
        if num_steps < epoch:
            step_s = (total_s + (epoch - num_steps) * self._late_step_s()) / epoch
        for host in self.hosts:
            host.advance(total_s)
        trainers, data = self.trainers, self.hosts[len(self.trainers) :]
        ranks_cpu_s = self.workload.rank_cpu_cores * len(self.readers) * (total_s - wait_s)
        received_cpu_s = sum(reader.num_choices for reader in self.readers) * self.receive_s
        trainer_cpu_s = sum(host.busy_s * host.duty for host in trainers) + ranks_cpu_s + received_cpu_s
        num_data_endpoints = sum(host.host.endpoints for host in data)
        return Result(
            step_s=step_s,
            headspace_s=self.headspace_s / num_steps,
            data_wait_s=wait_s / num_steps,
            trainer_nic_share=max(host.in_busy_s for host in trainers) / total_s,
            data_nic_share=max((host.out_busy_s for host in data), default=0.0) / total_s,
            trainer_cpu_share=min(1.0, trainer_cpu_s / total_s / sum(host.host.vcpus for host in trainers)),
            data_cpu_share=sum(host.busy_s for host in data) / total_s / max(1, num_data_endpoints),
            num_hedges=self.num_hedges,
            num_steps=num_steps,
        )

    def _late_step_s(self) -> float:
        """Return the mean step time in the last part of the run.

        Endpoints that begin together deliver together, and steps come in bursts of one turn. The distance of two
        steps is therefore whole turns, and averaged over the steps of a turn.
        """
        ends_s, last = self.ends_s, len(self.ends_s) - 1
        turn = max(1, round(self.turn))
        lag = max(1, int(last / 2 / self.turn)) * self.turn
        whole_lag = max(1, round(lag))
        firsts = range(max(0, last - turn - whole_lag), last - whole_lag + 1)
        return sum(ends_s[first + whole_lag] - ends_s[first] for first in firsts) / len(firsts) / whole_lag
