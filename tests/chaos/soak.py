"""The soak: jobs of three data hosts and two ranks under a seeded random killer, compared with an undisturbed run.

    make soak DURATION_S=600 SEED=7 [EVENTS=200]

Kills, stops, slows, cuts off and restarts endpoints, data hosts and ranks, about one event in 1.2 s. After every job
the ranks must have been fed what an undisturbed job feeds them, in the same order and to the byte, and nothing of the
job may be left: no process, port, shared memory or file. Prints every event with its seed, writes a summary in JSON,
and exits with 1 if anything was violated. Which event comes next depends on the seed alone; what it meets does not.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from hosts import LEASE_S, TRAINER, Hosts, host_names, signal_safely
from networks import NamespaceNetwork, Network, make_network

from hetero.config import LaunchOptions

NUM_DATA_HOSTS, NUM_RANKS, ENDPOINTS_PER_HOST = 3, 2, 2
MEAN_PAUSE_S = 1.2
_MAX_RANK_KILLS = 2  # of one job: each costs it a start
_MAY_RESTART = any(option.name == "job_restarts" for option in dataclasses.fields(LaunchOptions))
_FLAGS = (
    *("--nproc-per-node", str(NUM_RANKS), "--endpoints-per-host", str(ENDPOINTS_PER_HOST)),
    *("--endpoint-restarts", "1000000", "--data-timeout", "120", "--start-timeout", "120"),
)
_END_S = 30.0
"""For every host to be gone after the trainer host: a data host that was cut off leaves when it is an orphan."""
_HURRY_S = 10.0
"""A data host younger than this at the end has not met the trainer host, and would wait for it."""
_HARMLESS_CODES = {0, 32, 143, -signal.SIGTERM, -signal.SIGKILL}


@dataclass
class Summary:
    """What a soak has done and found."""

    seed: int
    network: str
    duration_s: float = 0.0
    num_events: int = 0
    events: collections.Counter[str] = field(default_factory=collections.Counter)
    num_jobs: int = 0
    num_job_restarts: int = 0
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
        self._has_begun, self._begin_step = False, 0  # most events are to meet a job that trains, not one that starts
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._hurt: set[str] = set()  # hosts whose link is hurt
        self._dead: set[str] = set()
        self._stopped: dict[int, psutil.Process] = {}
        self.num_killed_ranks = 0
        """Since the job was started last."""
        self._num_rank_kills = 0
        self._kinds: dict[Callable[[], str | None], int] = {
            self._kill_endpoint: 6,
            self._kill_forker: 1,
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
        """Do what is due; to be called often."""
        now_s = time.monotonic()
        for due in [due for due in self._due if due[0] <= now_s]:
            self._due.remove(due)
            due[1]()
        if not self._has_begun:
            self._has_begun = self._hosts.step() > self._begin_step
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

    def renew(self) -> None:
        """The job was started again, on all hosts."""
        self._dead.clear()
        self.num_killed_ranks = 0
        self._has_begun, self._begin_step = False, self._hosts.step()

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

    def _kill_forker(self) -> str | None:
        return self._kill_one(self._hosts.forkers())

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
        processes += self._hosts.forkers(host) + self._hosts.endpoints(host)
        return self._stop(processes, self._chance.uniform(0.3, 2 * LEASE_S))

    def _kill_rank(self) -> str | None:
        ranks = self._hosts.ranks()
        if self._num_rank_kills >= _MAX_RANK_KILLS or len(ranks) < NUM_RANKS or self._hosts.step() < 5:
            return None
        what = self._kill_one(ranks)
        self.num_killed_ranks += what is not None
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


class Soak:
    """Runs jobs until its time or its events are over.

    Args:
        network: Of all jobs.
        folder: For their files.
        summary: Filled.
        steps: Of every rank and job.
        step_s: Of a disturbed job.
        max_events: Over all jobs.
    """

    def __init__(
        self, network: Network, folder: Path, summary: Summary, *, steps: int, step_s: float, max_events: int
    ) -> None:
        self._network, self._folder, self._summary = network, folder, summary
        self._steps, self._step_s, self._max_events = steps, step_s, max_events
        self._chance = random.Random(summary.seed)
        self._started_s = time.monotonic()
        self._expected: dict[int, dict[str, Any]] = {}

    def run(self, duration_s: float) -> None:
        """Run an undisturbed job, then disturbed ones; at least one of these."""
        with self._job("undisturbed", 0.0) as hosts:
            hosts.start()
            hosts.wait_for(lambda: hosts.launcher(TRAINER).poll() is not None, 120.0, "the undisturbed job's end")
            code = hosts.launcher(TRAINER).returncode
            self._wait_for_hosts(hosts)
            self._expected = hosts.results()
            if code != 0 or len(self._expected) != NUM_RANKS:
                raise AssertionError(f"the undisturbed job ended with {code}\n{hosts.tails()}")
        self._say(f"undisturbed job: {self._steps} steps of {NUM_RANKS} ranks")
        while not self._summary.num_jobs or (
            time.monotonic() - self._started_s < duration_s and self._summary.num_events < self._max_events
        ):
            self._summary.num_jobs += 1
            self._run_disturbed(f"job-{self._summary.num_jobs}")
        self._summary.duration_s = round(time.monotonic() - self._started_s, 1)

    def _run_disturbed(self, name: str) -> None:
        with self._job(name, self._step_s) as hosts:
            num_before = len(self._summary.violations)
            killer = Killer(hosts, self._chance, self._summary, self._say, self._max_events)
            bound_s = time.monotonic() + 120.0 + 10 * self._steps * self._step_s
            hosts.start()
            while True:
                trainer = hosts.launcher(TRAINER)
                while trainer.poll() is None and time.monotonic() < bound_s:
                    killer.turn()
                    time.sleep(0.02)
                killer.relent()
                if trainer.poll() is None:
                    self._violate(name, f"hangs: not done within its time, at step {hosts.step()}")
                    break
                self._wait_for_hosts(hosts)
                if trainer.returncode == 0:
                    break
                if self._is_unexpected(hosts, killer):
                    self._violate(name, f"ended with {trainer.returncode}: {_failure(hosts)}")
                    break
                self._summary.num_job_restarts += 1
                self._say(f"{name} starts again from step {hosts.step()}: {_failure(hosts)}")
                _failure_file(hosts).unlink(missing_ok=True)
                killer.renew()
                hosts.start()
            self._check(name, hosts)
            if len(self._summary.violations) > num_before:
                self._say(hosts.tails(60))

    def _is_unexpected(self, hosts: Hosts, killer: Killer) -> bool:
        """Return whether a job failed though no rank of it was killed, or though it restarts ranks by itself."""
        return _MAY_RESTART or not killer.num_killed_ranks or "SIGKILL" not in _failure(hosts)

    def _wait_for_hosts(self, hosts: Hosts) -> None:
        """See every data host gone; those that came too late to meet the trainer host are told to go."""
        deadline_s = time.monotonic() + _END_S
        for host in hosts.data_hosts:
            process = hosts.launcher(host)
            if process.poll() is None and _age_s(process.pid) < _HURRY_S:
                process.terminate()
        for host in hosts.data_hosts:
            process = hosts.launcher(host)
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            if process.poll() is None:
                self._violate(host, f"still runs {_END_S:.0f} s after the trainer host has ended")
                process.kill()
                process.wait()

    def _check(self, name: str, hosts: Hosts) -> None:
        """Compare what the ranks were fed with what they should have been; look for leftovers."""
        found = hosts.results()
        for rank, expected in self._expected.items():
            if rank not in found:
                continue  # the job's end has been told
            self._summary.num_batches += len(found[rank]["indices"])
            for problem in compare(expected, found[rank]):
                self._violate(name, f"rank {rank}: {problem}")
        if hosts.launcher(TRAINER).poll() is not None:
            for left in hosts.leftovers(self._shared_before):
                self._violate(name, f"left: {left}")
            for host in hosts.data_hosts:
                code = hosts.launcher(host).returncode
                if code not in _HARMLESS_CODES and hosts.launcher(TRAINER).returncode == 0:
                    self._violate(name, f"{host} ended with {code}")

    @contextlib.contextmanager
    def _job(self, name: str, step_s: float) -> Iterator[Hosts]:
        self._shared_before = set(Path("/dev/shm").iterdir())
        args = ["--steps", str(self._steps), "--step-s", str(step_s)]
        flags = [*_FLAGS, "--job-restarts", "1000"] if _MAY_RESTART else [*_FLAGS]
        with Hosts(self._network, self._folder / name, args=args, flags=flags) as hosts:
            yield hosts
        for host in hosts.network.hosts:
            self._network.heal(host)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:7.1f} s  seed {self._summary.seed}  {text}", flush=True)

    def _violate(self, name: str, what: str) -> None:
        self._summary.violations.append(f"{name}: {what}")
        self._say(f"VIOLATION {name}: {what}")


def compare(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Say how what a rank was fed differs from what it should have been; empty if it does not."""
    if found == expected:
        return []
    wanted, got = [tuple(batch) for batch in expected["indices"]], [tuple(batch) for batch in found["indices"]]
    if wanted == got:
        return ["the bytes of batches differ, their indices do not"]
    lost = collections.Counter(wanted) - collections.Counter(got)
    surplus = collections.Counter(got) - collections.Counter(wanted)
    if not lost and not surplus:
        return ["batches are reordered"]
    return [f"{lost.total()} batches are lost, {surplus.total()} are there twice or are others"]


def _failure(hosts: Hosts) -> str:
    with contextlib.suppress(OSError):
        return _failure_file(hosts).read_text().splitlines()[0]
    return "no failure file"


def _failure_file(hosts: Hosts) -> Path:
    return hosts.folder / "ml" / TRAINER / "output" / "failure"


def _age_s(pid: int) -> float:
    try:
        return time.time() - psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(description="random kills of a simulated job, its batches compared to the byte")
    parser.add_argument("--duration-s", type=float, default=600.0, help="no job begins later; default: %(default)s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=10**9, help="how many at most")
    parser.add_argument("--network", choices=("auto", "namespaces", "proxies"), default="auto")
    parser.add_argument("--steps", type=int, default=1000, help="of every job, default: %(default)s")
    parser.add_argument("--step-s", type=float, default=0.05, help="default: %(default)s")
    parser.add_argument("--summary", type=Path, help="where the summary goes, besides the output")
    args = parser.parse_args(argv)
    network = make_network(args.network, host_names(NUM_DATA_HOSTS))
    kind = "namespaces" if isinstance(network, NamespaceNetwork) else "proxies"
    summary = Summary(seed=args.seed, network=kind)
    with network, tempfile.TemporaryDirectory(prefix="hetero-soak-") as folder:
        soak = Soak(network, Path(folder), summary, steps=args.steps, step_s=args.step_s, max_events=args.events)
        soak.run(args.duration_s)
    text = json.dumps(summary.to_json(), indent=1)
    print(text, flush=True)
    if args.summary is not None:
        args.summary.write_text(text + "\n")
    return 1 if summary.violations else 0


if __name__ == "__main__":
    sys.exit(main())
