"""Who does harm to a running job, by a seed: kills, stops, slows, cuts off, and starts again what it may."""

from __future__ import annotations

import collections
import dataclasses
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.support.chaos.hosts import LEASE_S, Hosts, signal_safely

NUM_RANKS = 2
MEAN_PAUSE_S = 1.2
_MAX_RANK_KILLS = 2  # of one job: each costs it a start


@dataclass
class Summary:
    """What a soak has done and found."""

    seed: int
    network: str
    duration_s: float = 0.0
    num_events: int = 0
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    num_jobs: int = 0
    num_batches: int = 0
    violations: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**dataclasses.asdict(self), "events": dict(sorted(self.events.items()))}


class Killer:
    """Does harm to one running job, and takes some of it back later.

    Args:
        hosts: The job.
        chance: Where every choice comes from.
        summary: Counts the events.
        say: Prints a line.
        max_events: Over all jobs.
    """

    def __init__(
        self, hosts: Hosts, chance: random.Random, summary: Summary, say: Callable[[str], None], max_events: int
    ) -> None:
        self._hosts, self._chance, self._summary, self._say = hosts, chance, summary, say
        self._max_events = max_events
        self._next_s = 0.0
        self._has_begun = False  # most events are to meet a job that trains, not one that starts
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._hurt: set[str] = set()  # hosts whose link is hurt
        self._dead: set[str] = set()
        self._stopped: dict[int, psutil.Process] = {}
        self._num_rank_kills = 0
        self._kinds: dict[Callable[[], str | None], int] = {
            self._kill_endpoint: 6,
            self._kill_fork_server: 1,
            self._stop_endpoint: 4,
            self._slow_endpoint: 3,
            self._cut_host: 3,
            self._cut_host_one_way: 2,
            self._slow_link: 2,
            self._take_link_down: 1,
            self._kill_host: 3,
            self._stop_host: 1,
            self._drain_host: 1,
            self._kill_rank: 2,
            self._stop_rank: 1,
        }

    def turn(self) -> None:
        """Do what is due. Call it often."""
        now_s = time.monotonic()
        for due in [due for due in self._due if due[0] <= now_s]:
            self._due.remove(due)
            due[1]()
        if not self._has_begun:
            self._has_begun = self._hosts.step() > 0
            self._next_s = now_s + 0.2
        if now_s < self._next_s or self._summary.num_events >= self._max_events:
            return
        self._next_s = now_s + self._chance.uniform(0.4, 2 * MEAN_PAUSE_S - 0.4)
        kinds, weights = list(self._kinds), list(self._kinds.values())
        for _ in range(10):  # not everything is possible at any time
            kind = self._chance.choices(kinds, weights)[0]
            if (what := kind()) is not None:
                self._count(kind.__name__.strip("_"), what)
                return

    def relent(self) -> None:
        """Take back at once what can be taken back, and start nothing again."""
        self._due.clear()
        for process in self._stopped.values():
            signal_safely(process, signal.SIGCONT)
        self._stopped.clear()
        for host in sorted(self._hurt):
            self._hosts.network.heal(host)
        self._hurt.clear()

    def _count(self, kind: str, what: str) -> None:
        self._summary.num_events += 1
        self._summary.events[kind] += 1
        self._say(f"event {self._summary.num_events} {kind} {what} at step {self._hosts.step()}")

    def _later(self, delay_s: float, work: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + delay_s, work))

    # Events: each returns what it met, None if it met nothing

    def _kill_endpoint(self) -> str | None:
        return self._kill_one(self._hosts.endpoints())

    def _kill_fork_server(self) -> str | None:
        return self._kill_one(self._hosts.fork_servers())

    def _kill_one(self, processes: list[psutil.Process]) -> str | None:
        process = self._pick(processes)
        if process is None or not signal_safely(process, signal.SIGKILL):
            return None
        return f"pid {process.pid}"

    def _stop_endpoint(self) -> str | None:
        process = self._pick(self._hosts.endpoints())
        if process is None or process.pid in self._stopped:
            return None
        return self._stop([process], self._chance.uniform(0.3, 1.5 * LEASE_S))

    def _stop(self, processes: list[psutil.Process], stopped_s: float) -> str:
        for process in processes:
            if signal_safely(process, signal.SIGSTOP):
                self._stopped[process.pid] = process

        def go_on() -> None:
            for process in processes:
                if self._stopped.pop(process.pid, None) is not None:
                    signal_safely(process, signal.SIGCONT)

        self._later(stopped_s, go_on)
        return f"pid {', '.join(str(process.pid) for process in processes)} for {stopped_s:.1f} s"

    def _slow_endpoint(self) -> str | None:
        process = self._pick(self._hosts.endpoints())
        if process is None or process.pid in self._stopped:
            return None
        num_bursts = self._chance.randrange(5, 20)
        for burst in range(num_bursts):
            self._later(0.2 * burst, lambda: signal_safely(process, signal.SIGSTOP) and None)
            self._later(0.2 * burst + 0.15, lambda: signal_safely(process, signal.SIGCONT) and None)
        self._stopped[process.pid] = process
        self._later(0.2 * num_bursts, lambda: self._stopped.pop(process.pid, None) and None)
        return f"pid {process.pid} for {0.2 * num_bursts:.1f} s"

    def _hurt_link(self, least_s: float, most_s: float, hurt: Callable[[str], None]) -> str | None:
        host = self._pick_name([host for host in self._hosts.data_hosts if host not in self._hurt])
        if host is None:
            return None
        lasts_s = self._chance.uniform(least_s, most_s)
        hurt(host)
        self._hurt.add(host)

        def heal() -> None:
            self._hosts.network.heal(host)
            self._hurt.discard(host)

        self._later(lasts_s, heal)
        return f"{host} for {lasts_s:.1f} s"

    def _cut_host(self) -> str | None:
        return self._hurt_link(0.3, 2 * LEASE_S, self._hosts.network.cut)

    def _cut_host_one_way(self) -> str | None:
        return self._hurt_link(0.3, 2 * LEASE_S, self._hosts.network.cut_one_way)

    def _take_link_down(self) -> str | None:
        return self._hurt_link(0.3, LEASE_S, self._hosts.network.down)

    def _slow_link(self) -> str | None:
        return self._hurt_link(1.0, LEASE_S, lambda host: self._hosts.network.slow(host, 20_000.0))

    def _kill_host(self) -> str | None:
        host = self._pick_name(self._living_hosts())
        if host is None:
            return None
        self._hosts.kill(host)
        self._start_again(host, self._chance.uniform(0.1, LEASE_S))
        return host

    def _drain_host(self) -> str | None:
        host = self._pick_name(self._living_hosts())
        if host is None:
            return None
        self._hosts.launcher(host).terminate()
        self._start_again(host, self._chance.uniform(0.1, LEASE_S))
        return host

    def _start_again(self, host: str, delay_s: float) -> None:
        self._dead.add(host)

        def start() -> None:
            if self._hosts.launcher(host).poll() is None:  # it takes its leave
                self._later(0.2, start)
                return
            self._hosts.start(host)
            self._dead.discard(host)
            self._count("restart_host", host)

        self._later(delay_s, start)

    def _stop_host(self) -> str | None:
        host = self._pick_name(self._living_hosts())
        if host is None:
            return None
        processes = [psutil.Process(self._hosts.launcher(host).pid)]
        processes += self._hosts.fork_servers(host) + self._hosts.endpoints(host)
        return self._stop(processes, self._chance.uniform(0.3, 2 * LEASE_S))

    def _kill_rank(self) -> str | None:
        ranks = self._hosts.ranks()
        if self._num_rank_kills >= _MAX_RANK_KILLS or len(ranks) < NUM_RANKS or self._hosts.step() < 5:
            return None
        what = self._kill_one(ranks)
        self._num_rank_kills += what is not None
        return what

    def _stop_rank(self) -> str | None:
        process = self._pick(self._hosts.ranks())
        if process is None or process.pid in self._stopped:
            return None
        return self._stop([process], self._chance.uniform(0.1, LEASE_S))

    def _living_hosts(self) -> list[str]:
        return [
            host
            for host in self._hosts.data_hosts
            if host not in self._dead and self._hosts.launcher(host).poll() is None
        ]

    def _pick(self, processes: list[psutil.Process]) -> psutil.Process | None:
        number = self._chance.random()  # drawn in any case
        return processes[int(number * len(processes))] if processes else None

    def _pick_name(self, names: list[str]) -> str | None:
        number = self._chance.random()
        return names[int(number * len(names))] if names else None
