"""A small model of a job: slots that compute batches, ranks that take them in order, CPUs that both want."""

from __future__ import annotations

import heapq
import math
import random
import zlib
from collections import deque
from dataclasses import dataclass, field

from hetero.launch.auto_endpoints.controller import Controller
from hetero.launch.auto_endpoints.decisions import Conditions, Decision
from hetero.launch.auto_endpoints.windows import StepTime
from hetero.reader.window_size import WindowGrowth

REPORT_S = 0.25
"""Seconds between two reports of a rank."""
STATISTICS_S = 1.0
"""Seconds between two reports of an endpoint."""
START_S = 0.5
"""Seconds from a decision until a new endpoint takes requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pipeline on one cluster."""

    name: str
    batch_s: float
    """CPU seconds of a batch on a vCPU of a data host."""
    compute_s: float
    """Compute of a step when nothing else runs on its host."""
    remote_slots: int
    """vCPUs of all data hosts."""
    cpus: int
    """vCPUs of the trainer host."""
    num_ranks: int = 1
    local_speed: float = 1.0
    """Speed of its vCPUs, relative to those of the data hosts."""
    cpus_per_rank: float = 1.0
    """vCPUs that a rank keeps busy while it computes."""
    sensitivity: float = 1.0
    """Share of the compute that becomes longer when vCPUs are short."""
    memory: float = 0.0
    """Relative increase of the compute when every vCPU preprocesses, because they share the memory's bandwidth."""
    storage_batches_per_s: float = math.inf
    """Batches per second that the job's storage can give."""
    spread: float = 0.2
    """Coefficient of variation of a batch's time."""
    step_spread: float = 0.02
    pause_steps: int = 0
    """Steps from one pause to the next: an evaluation or a checkpoint inside of the loop, which counts as compute."""
    pause_s: float = 0.0


@dataclass
class Slot:
    """Computes one batch after the other."""

    is_local: bool
    is_leaving: bool = False
    from_s: float = 0.0
    used_at_s: float = math.inf
    """When its launcher learns that ranks use it."""
    chosen_at: int = 0
    ends_s: deque[float] = field(default_factory=deque)
    """When the batches that it has will be ready."""

    def num_outstanding(self, now_s: float) -> int:
        """Return the number of batches that are not ready."""
        while self.ends_s and self.ends_s[0] <= now_s:
            self.ends_s.popleft()
        return len(self.ends_s)


class JobModel:
    """Runs the steps of a cell with a fixed number of trainer endpoints, or with a controller."""

    def __init__(self, cell: Cell, *, local: int = 0, has_data_hosts: bool = True, seed: int = 0) -> None:
        self.cell = cell
        self.controller: Controller | None = None
        self.decisions: list[Decision] = []
        self.steps: list[StepTime] = []
        # A stream for batches and one for steps. All placements of a seed then see the same batches and steps.
        self._batch_random = random.Random(zlib.crc32(cell.name.encode()) + seed)
        self._step_random = random.Random(zlib.crc32(cell.name.encode()) - 1 - seed)
        self._now_s = 0.0
        self._slots = [Slot(False) for _ in range(cell.remote_slots * has_data_hosts)]
        self._slots += [Slot(True) for _ in range(local)]
        self._arrivals_s: dict[int, float] = {}
        self._coming_s: list[float] = []
        self._num_waiting = 0
        self._growth = WindowGrowth()
        self._num_requested = 0
        self._num_delivered = 0
        self._storage_free_s = 0.0
        self._batch_factors: list[float] = []
        self._step_factors: list[float] = []

    def run(self, num_steps: int) -> None:
        """Take steps."""
        unreported: list[StepTime] = []
        next_report_s = self._now_s + REPORT_S
        for _ in range(num_steps):
            begin_s = self._now_s
            self._request()
            last = self._num_delivered + self.cell.num_ranks
            ready_s = max(self._arrivals_s.pop(number) for number in range(self._num_delivered, last))
            self._pass_time(max(begin_s, ready_s), is_waiting=True)
            self._num_delivered = last
            self._num_waiting -= self.cell.num_ranks
            for _ in range(self.cell.num_ranks):
                self._growth.delivered()
            self._request()
            compute_s = self._compute_s(len(self.steps)) + self.pause_s(len(self.steps))
            step = StepTime(compute_s=compute_s, wait_s=self._now_s - begin_s)
            self._pass_time(self._now_s + compute_s, is_waiting=False)
            self.steps.append(step)
            unreported.append(step)
            if self._now_s >= next_report_s:
                next_report_s = self._now_s + REPORT_S
                self._report(unreported)
                unreported = []

    def pause_s(self, number: int) -> float:
        """Return the length of the pause in a step, 0 without one."""
        return self.cell.pause_s if self.cell.pause_steps and (number + 1) % self.cell.pause_steps == 0 else 0.0

    def mean_s(self, first: int) -> float:
        """Return the mean step time from a step on."""
        steps = self.steps[first:]
        return sum(step.total_s for step in steps) / len(steps)

    def _pass_time(self, until_s: float, *, is_waiting: bool) -> None:
        """Let batches arrive. A rank that waits for the next batch requests more if a late one holds up the others."""
        while self._coming_s and self._coming_s[0] <= until_s:
            self._now_s = max(self._now_s, heapq.heappop(self._coming_s))
            self._num_waiting += 1
            size = self._window_size()
            if is_waiting and self._growth.is_held_up(num_waiting=self._num_waiting, size=size):
                self._request()
        self._now_s = until_s

    def _window_size(self) -> int:
        return max(3 * self.cell.num_ranks, 2 * len(self._accepting()))

    def _accepting(self) -> list[Slot]:
        return [slot for slot in self._slots if not slot.is_leaving and slot.from_s <= self._now_s]

    def _request(self) -> None:
        accepting = self._accepting()
        limit = self._growth.limit(num_waiting=self._num_waiting, size=self._window_size())
        while self._num_requested < self._num_delivered + limit:
            slot = min(accepting, key=lambda each: (each.num_outstanding(self._now_s), each.chosen_at))
            slot.chosen_at = self._num_requested + 1
            self._storage_free_s = max(self._storage_free_s + 1 / self.cell.storage_batches_per_s, self._now_s)
            begin_s = max(self._storage_free_s, slot.ends_s[-1] if slot.ends_s else 0.0)
            end_s = begin_s + self._batch_s(slot, self._num_requested)
            slot.ends_s.append(end_s)
            slot.used_at_s = min(slot.used_at_s, math.ceil(self._now_s / STATISTICS_S) * STATISTICS_S)
            self._arrivals_s[self._num_requested] = end_s
            heapq.heappush(self._coming_s, end_s)
            self._num_requested += 1

    def _load(self) -> tuple[float, float]:
        """Return the busy local slots and the wanted vCPUs of the trainer host, both per vCPU."""
        busy = sum(slot.is_local and slot.num_outstanding(self._now_s) > 0 for slot in self._slots)
        wanted = busy + self.cell.num_ranks * self.cell.cpus_per_rank
        return busy / self.cell.cpus, wanted / self.cell.cpus

    def _batch_s(self, slot: Slot, number: int) -> float:
        while len(self._batch_factors) <= number:
            self._batch_factors.append(_factor(self._batch_random, self.cell.spread))
        batch_s = self.cell.batch_s * self._batch_factors[number]
        return batch_s / self.cell.local_speed * max(1.0, self._load()[1]) if slot.is_local else batch_s

    def _compute_s(self, number: int) -> float:
        while len(self._step_factors) <= number:
            self._step_factors.append(_factor(self._step_random, self.cell.step_spread))
        busy, wanted = self._load()
        slowdown = self.cell.sensitivity * max(0.0, wanted - 1) + self.cell.memory * busy
        return self.cell.compute_s * self._step_factors[number] * (1 + slowdown)

    def _report(self, steps: list[StepTime]) -> None:
        if self.controller is None:
            return
        local = [slot for slot in self._slots if slot.is_local]
        for slot in local:
            if slot.is_leaving and not slot.num_outstanding(self._now_s):
                self._slots.remove(slot)
        local = [slot for slot in self._slots if slot.is_local]
        serving = [slot for slot in self._slots if not slot.is_leaving and slot.from_s <= self._now_s]
        now = Conditions(
            num_used=sum(slot.used_at_s <= self._now_s and not slot.is_leaving for slot in local),
            num_running=len(local),
            num_slots=len(serving),
        )
        decision = self.controller.observe(steps, now)
        if decision is None:
            return
        self.decisions.append(decision)
        staying = [slot for slot in local if not slot.is_leaving]
        for slot in staying[decision.endpoints :]:
            slot.is_leaving = True
        for _ in range(decision.endpoints - len(staying)):
            self._slots.append(Slot(True, from_s=self._now_s + START_S))


def _factor(draw: random.Random, spread: float) -> float:
    """Return a factor with the mean 1 and a coefficient of variation."""
    sigma = math.sqrt(math.log(1 + spread**2))
    return draw.lognormvariate(-(sigma**2) / 2, sigma)


def run_fixed(cell: Cell, *, local: int, has_data_hosts: bool = True, num_steps: int = 1200, seed: int = 0) -> JobModel:
    """Return a job with a fixed number of trainer endpoints, after its last step."""
    model = JobModel(cell, local=local, has_data_hosts=has_data_hosts, seed=seed)
    model.run(num_steps)
    return model


def run_auto(cell: Cell, *, num_steps: int = 1200, seed: int = 0) -> JobModel:
    """Return a job whose number of trainer endpoints a controller chooses, after its last step."""
    model = JobModel(cell, seed=seed)
    model.controller = Controller(max_endpoints=cell.cpus, world_size=cell.num_ranks)
    model.run(num_steps)
    return model
