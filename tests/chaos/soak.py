"""The soak: jobs of three data hosts and two ranks under a seeded random killer, compared to the byte.

    make soak DURATION_S=600 SEED=7 [EVENTS=200]

Kills, stops, slows, cuts off and restarts endpoints, data hosts and ranks, about one event in 1.2 s. After every job
the ranks must have been fed what a process alone computes, in the same order and to the byte, and nothing of the job
may be left: no process, port, shared memory or file. Prints every event with its seed, writes a summary in JSON, and
exits with 1 if anything was violated. The next event depends on the seed alone. The state of the job at that time does
not.
Whatever ends the soak ends its launchers, and so everything else.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import psutil

from tests.support.chaos import leftovers
from tests.support.chaos.hosts import TRAINER, Hosts, host_names
from tests.support.chaos.killer import NUM_RANKS, Killer, Summary
from tests.support.chaos.networks import NamespaceNetwork, Network, make_network
from tests.support.chaos.undisturbed import undisturbed

NUM_DATA_HOSTS, ENDPOINTS_PER_HOST = 3, 2
_FLAGS = (
    *("--nproc-per-node", str(NUM_RANKS), "--endpoints-per-host", str(ENDPOINTS_PER_HOST)),
    *("--endpoint-restarts", "1000000", "--data-timeout", "120", "--start-timeout", "120"),
    *("--job-restarts", "1000"),
)
_END_S = 30.0
"""For every host to be gone after the trainer host: a data host that was cut off leaves when it is an orphan."""
_HURRY_S = 10.0
"""A data host younger than this at the end has not met the trainer host, and would wait for it."""
_to_end = threading.Event()
"""Python drops what a handler raises into a finalizer: a request to end is kept, too."""
_HARMLESS_CODES = {0, 32, 143, -signal.SIGTERM, -signal.SIGKILL}


class Soak:
    """Runs jobs until its time or its events are over.

    Args:
        network: Of all jobs.
        folder: For their files.
        summary: Filled.
        steps: Of every rank and job.
        step_s: Of a job.
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
        """Run disturbed jobs, at least one."""
        self._expected = {rank: undisturbed(self._steps, rank=rank, world_size=NUM_RANKS) for rank in range(NUM_RANKS)}
        self._say(f"{self._steps} steps of {NUM_RANKS} ranks are compared with what a process alone computes")
        while not self._summary.num_jobs or (
            time.monotonic() - self._started_s < duration_s and self._summary.num_events < self._max_events
        ):
            self._summary.num_jobs += 1
            self._run_disturbed(f"job-{self._summary.num_jobs}")
        self._summary.duration_s = round(time.monotonic() - self._started_s, 1)

    def _run_disturbed(self, name: str) -> None:
        with self._job(name) as hosts:
            num_before = len(self._summary.violations)
            killer = Killer(hosts, self._chance, self._summary, self._say, self._max_events)
            bound_s = time.monotonic() + 120.0 + 10 * self._steps * self._step_s
            hosts.start()
            trainer = hosts.launcher(TRAINER)
            while not _has_ended(hosts) and time.monotonic() < bound_s:
                killer.turn()
                time.sleep(0.02)
            killer.relent()
            if trainer.poll() is None:
                self._violate(name, f"hangs: not done within its time, at step {hosts.step()}")
            else:
                self._wait_for_hosts(hosts)
                if trainer.returncode != 0:
                    self._violate(name, f"ended with {trainer.returncode}: {_failure(hosts)}")
            self._check(name, hosts)
            if len(self._summary.violations) > num_before:
                self._say(hosts.tails(60))

    def _wait_for_hosts(self, hosts: Hosts) -> None:
        """Wait until every data host is gone. Stop those that came too late to meet the trainer host."""
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
        """Compare the batches of the ranks with the expected ones, and look for leftovers."""
        found = hosts.results()
        for rank, expected in self._expected.items():
            if rank not in found:
                if hosts.launcher(TRAINER).poll() == 0:  # else its end has been told
                    self._violate(name, f"rank {rank}: left no result, and the trainer host ended with 0")
                continue
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
    def _job(self, name: str) -> Iterator[Hosts]:
        self._shared_before = leftovers.shared_memory()
        args = ["--steps", str(self._steps), "--step-s", str(self._step_s)]
        with Hosts(self._network, self._folder / name, args=args, flags=[*_FLAGS]) as hosts:
            yield hosts
        for host in hosts.network.hosts:
            self._network.heal(host)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._started_s:7.1f} s  seed {self._summary.seed}  {text}", flush=True)

    def _violate(self, name: str, what: str) -> None:
        self._summary.violations.append(f"{name}: {what}")
        self._say(f"VIOLATION {name}: {what}")


def _has_ended(hosts: Hosts) -> bool:
    if _to_end.is_set():
        raise KeyboardInterrupt
    return hosts.launcher(TRAINER).poll() is not None


def compare(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return how the batches of a rank differ from the expected ones. Empty if they do not."""
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
        return (hosts.folder / "ml" / TRAINER / "output" / "failure").read_text().splitlines()[0]
    return "no failure file"


def _age_s(pid: int) -> float:
    try:
        return time.time() - psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def _end(*_: object) -> NoReturn:
    _to_end.set()
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="random kills of a simulated job, its batches compared to the byte")
    parser.add_argument("--duration-s", type=float, default=600.0, help="no job begins later. Default: %(default)s")
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
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: what was begun is taken down
    sys.exit(main())
