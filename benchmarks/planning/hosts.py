"""A host during a simulation: its busy processes, its NIC, and how fast they are."""

from __future__ import annotations

import math

from planning.processors import progress
from planning.readers import Attempt
from planning.workload import Host, Workload

__all__ = ["BusyHost"]


class BusyHost:
    """One host. Its busy processes progress equally fast, so the one with the least work left ends first."""

    __slots__ = (
        "at_s",
        "busy_s",
        "duty",
        "host",
        "in_busy_s",
        "in_free_s",
        "index",
        "is_trainer",
        "next_s",
        "num_threads",
        "out_busy_s",
        "out_free_s",
        "progressed",
        "rate",
        "rates",
        "rates_of",
        "received_bytes",
        "running",
        "taken",
        "thread_need",
        "version",
    )

    def __init__(self, host: Host, index: int, workload: Workload, *, is_trainer: bool) -> None:
        self.host = host
        self.index = index
        self.is_trainer = is_trainer
        cpu_s = workload.batch_cpu_total_s / host.speed
        wall_s = cpu_s + workload.batch_wait_total_s
        self.duty = cpu_s / wall_s if wall_s else 1.0
        self.running: list[tuple[float, int, Attempt]] = []
        self.progressed = 0.0
        """Work in seconds that each busy process has done since the begin of the simulation."""
        self.rate = 1.0
        self.at_s = 0.0
        self.next_s = math.inf
        self.version = 0
        self.num_threads = 0
        self.thread_need = 1.0
        self.taken = 0.0
        self.rates: dict[int, float] = {}
        self.rates_of: dict[tuple[int, float], dict[int, float]] = {(0, 0.0): self.rates}
        self.in_free_s = self.out_free_s = 0.0
        self.in_busy_s = self.out_busy_s = self.busy_s = 0.0
        self.received_bytes = 0.0

    def set_ranks(self, num_threads: int, taken: float) -> None:
        """Set how many threads of ranks are busy and how many CPUs receiving takes."""
        self.num_threads, self.taken = num_threads, taken
        self.rates = self.rates_of.setdefault((num_threads, taken), {})

    def advance(self, now_s: float) -> None:
        """Let the busy processes progress until now."""
        elapsed_s = now_s - self.at_s
        self.progressed += elapsed_s * self.rate
        self.busy_s += elapsed_s * len(self.running)
        self.at_s = now_s

    def current_rate(self) -> float:
        """Return how fast each busy process progresses."""
        num_busy = len(self.running)
        rate = self.rates.get(num_busy)
        if rate is None:
            rate = self.rates[num_busy] = self._progress(num_busy, self.num_threads)[0]
        return rate

    def stretch(self, num_threads: int) -> float:
        """Return how many times longer a step takes if the host has this number of threads of ranks."""
        if not self.running or not num_threads:
            return 1.0
        return max(1.0, self.thread_need / self._progress(len(self.running), num_threads)[1])

    def _progress(self, num_busy: int, num_threads: int) -> tuple[float, float]:
        host = self.host
        return progress(host.vcpus, host.curve, self.duty, max(1, num_busy), num_threads, self.thread_need, self.taken)
