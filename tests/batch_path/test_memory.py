"""Bounded memory: a trainer that takes no batch, or is stopped, makes nothing grow, and loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from hetero.reader.reader import Reader
from hetero.reader.window_size import WindowGrowth
from tests.support.batch_path.calls import in_thread

pytestmark = pytest.mark.integration

MB = 2**20
SLACK = 16 * MB
"""For everything except batches: threads, connections, statistics, and what malloc does not get to use again."""
COMPUTING = 3
"""Batches' worth of memory that making one takes besides: its samples, a copy of the result of a `collate_fn`, and,
about once in five runs, the batch before it, which malloc keeps because it was still being sent."""
NUM_BATCHES = 28
BATCH_SIZE = 4
STABLE_POLLS = 15

TRAINER = '''
    """A rank that executes commands, one line of standard input after the other."""
    import hashlib, json, os, signal, sys, time
    from pathlib import Path

    import numpy as np
    import psutil

    from hetero.batches.indexed import IndexedWork
    from hetero.batches.request import BatchRequest
    from hetero.control.members.directory import Directory, EndpointRecord
    from hetero.control.security import load_token
    from hetero.spec import DatasetSpec
    from hetero.reader.fleet import Fleet
    from hetero.reader.reader import Reader

    given = json.loads(sys.stdin.readline())
    spec = DatasetSpec(*given["spec"])
    directory = Directory([EndpointRecord(**record) for record in given["records"]])
    requests = [
        BatchRequest(spec=spec, work=IndexedWork(np.array(indices)), seed=3, epoch=1, position=position, step=position)
        for position, indices in enumerate(given["indices"])
    ]
    fleet = Fleet(directory, load_token(given["token"]), job_id="test-job")
    fleet.describe(spec)
    process = psutil.Process()

    def facts():
        with fleet.lock:
            window = reader._window if reader else None
            return {
                "rss": process.memory_info().rss,
                "held": window._held_bytes if window else 0,
                "waiting": len(window.outcomes) if window else 0,
                "on_their_way": len(window.attempts) if window else 0,
                "batches": fleet.stats.batches,
                "trouble": fleet.stats.retries + fleet.stats.failovers + fleet.stats.endpoint_losses,
            }

    reader = None
    digests = []
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "open":
            reader = Reader(fleet, iter(requests), **json.loads(argument))
        elif command == "take":
            for _ in range(int(argument)):
                batch = next(reader)
                digest = hashlib.sha256()
                for key in sorted(batch):  # without a copy
                    digest.update(key.encode())
                    digest.update(batch[key])
                digests.append(digest.hexdigest())
                del batch
        elif command == "stop":  # while a request is in work
            next(reader)
            while not any(attempt.call for attempt in tuple(reader._window.attempts)):
                time.sleep(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        print(json.dumps({**facts(), "digests": digests}), flush=True)
    if reader:
        reader.close()
    fleet.close()
'''


class Trainer:
    """A process that reads. Its memory is that of one rank."""

    def __init__(self, job: Any, wanted: list[Any]) -> None:
        script = job.path / "trainer.py"
        script.write_text(textwrap.dedent(TRAINER))
        # Freed batches go back to the kernel at once: this measures what the reader holds. What malloc keeps of freed
        # batches (hetero.system.memory) depends on how many existed at the same moment, so on timing.
        environment = {**os.environ, "HETERO_MALLOC": "default", "MALLOC_MMAP_THRESHOLD_": str(MB)}
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._process.pid
        spec = wanted[0].spec
        job.fleet().describe(spec)  # the endpoints with the data set have other ports
        job.disconnect()
        records = [
            {name: getattr(record, name) for name in ("endpoint_id", "host", "address", "incarnation")}
            for record in job.directory.records()
        ]
        self.send(
            json.dumps(
                {
                    "spec": [spec.name, spec.arguments_json],
                    "records": records,
                    "token": str(job.token_path),
                    "indices": [request.work.indices.tolist() for request in wanted],
                }
            )
        )

    def send(self, line: str) -> None:
        """Make it do something. `hear` waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def tell(self, command: str) -> dict[str, Any]:
        """Make it do something. Return its facts afterwards."""
        self.send(command)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the trainer died"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def settle(self) -> dict[str, Any]:
        """Wait until nothing happens while it takes no batch. Return the facts.

        While a batch is on its way, no two looks are equal: on a busy machine it may take long.
        """
        return settled(
            lambda: self.tell("facts"),
            lambda facts: object() if facts["on_their_way"] else (facts["batches"], facts["rss"] // MB),
        )

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(100)
        finally:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


def settled(look: Callable[[], Any], what: Callable[[Any], object]) -> Any:
    """Look again and again until ``what`` stays the same. Return the last look."""
    found = look()
    num_same, deadline_s = 0, time.monotonic() + 60.0
    while num_same < STABLE_POLLS:
        assert time.monotonic() < deadline_s, f"it does not settle: {found}"
        time.sleep(0.02)
        before, found = found, look()
        num_same = num_same + 1 if what(found) == what(before) else 0
    return found


def rss_of(pids: tuple[int, ...]) -> int:
    return max(psutil.Process(pid).memory_info().rss for pid in pids)


@pytest.fixture
def start(job: Any, tools: Any) -> Iterator[Callable[[int], Trainer]]:
    """Start a trainer for batches of so many bytes."""
    with contextlib.ExitStack() as stack:

        def start(batch_bytes: int) -> Trainer:
            wanted = tools.requests(tools.spec(width=batch_bytes // 8 // BATCH_SIZE), NUM_BATCHES, BATCH_SIZE)
            trainer = stack.enter_context(contextlib.closing(Trainer(job, wanted)))
            trainer.tell("facts")  # it has found the endpoints
            return trainer

        yield start


def expected_digests(job: Any, tools: Any, batch_bytes: int) -> list[str]:
    import hashlib

    wanted = tools.requests(tools.spec(width=batch_bytes // 8 // BATCH_SIZE), NUM_BATCHES, BATCH_SIZE)
    return [hashlib.sha256(data).hexdigest() for data in tools.digest(tools.local(job.script, wanted))]


@pytest.mark.parametrize(
    ("batch_bytes", "window_bytes", "num_endpoints"),
    [(4 * MB, 32 * MB, 1), (4 * MB, 32 * MB, 2), (12 * MB, 8 * MB, 1)],
)
@pytest.mark.fault("F8")
def test_trainer_that_takes_nothing_holds_its_window_and_no_more(
    job: Any, tools: Any, start: Any, batch_bytes: int, window_bytes: int, num_endpoints: int
) -> None:
    pool = job.pool(num_endpoints=num_endpoints)
    trainer = start(batch_bytes)
    idle, endpoints_idle = trainer.settle(), rss_of(pool.pids)
    trainer.tell("open " + json.dumps({"window_bytes": window_bytes, "prefetch_factor": NUM_BATCHES}))
    bound = max(window_bytes, batch_bytes + 4096)  # one batch is always allowed, and headers
    for num_taken in (0, 1, 12, 3):
        trainer.tell(f"take {num_taken}")
        stalled = trainer.settle()
        assert stalled["held"] <= bound
        assert stalled["waiting"] >= max(1, window_bytes // batch_bytes - 1), "the window is not used"
        assert stalled["rss"] - idle["rss"] <= bound + SLACK
        # The batches are with the trainer: what an endpoint keeps is memory for the next ones.
        in_work = max(1, window_bytes // batch_bytes)
        assert rss_of(pool.pids) - endpoints_idle <= (in_work + COMPUTING) * batch_bytes + SLACK
    ended = trainer.tell(f"take {NUM_BATCHES - 16}")
    assert ended["digests"] == expected_digests(job, tools, batch_bytes)
    assert ended["trouble"] == 0


@pytest.mark.fault("F8")
def test_trainer_process_that_is_stopped_costs_endpoints_a_batch_per_request(job: Any, tools: Any, start: Any) -> None:
    batch_bytes, window_bytes = 16 * MB, 64 * MB  # a batch is more than the kernel's buffers take
    endpoints = job.pool().pids
    trainer = start(batch_bytes)
    idle = rss_of(endpoints)
    trainer.tell("open " + json.dumps({"window_bytes": window_bytes, "prefetch_factor": NUM_BATCHES}))
    taken = trainer.tell("take 4")["digests"]
    for _ in range(2):
        trainer.send("stop")
        tools.wait_for(lambda: psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED)
        stopped = settled(lambda: rss_of(endpoints), lambda rss: rss // MB)
        assert stopped - idle <= window_bytes + COMPUTING * batch_bytes + SLACK
        os.kill(trainer.pid, signal.SIGCONT)
        assert trainer.hear()["trouble"] == 0
    ended = trainer.tell(f"take {NUM_BATCHES - 6}")
    expected = expected_digests(job, tools, batch_bytes)
    assert taken + ended["digests"][4:] == expected[:4] + expected[6:]
    assert ended["trouble"] == 0


def test_trainer_processes_that_die_leave_nothing_on_endpoints(job: Any, tools: Any, start: Any) -> None:
    endpoint = psutil.Process(job.pool().pids[0])
    num_threads, num_fds = endpoint.num_threads(), endpoint.num_fds()
    for _ in range(4):
        trainer = start(4 * MB)
        trainer.tell("open " + json.dumps({"prefetch_factor": NUM_BATCHES}))
        trainer.tell("take 1")
        assert endpoint.num_fds() > num_fds
        os.kill(trainer.pid, signal.SIGKILL)
        # gRPC's pool of threads keeps the few that it has started.
        tools.wait_for(lambda: endpoint.num_fds() <= num_fds and endpoint.num_threads() <= num_threads + 3)


def test_window_of_small_batches_is_bounded_by_their_number(job: Any, tools: Any) -> None:
    job.pool(num_endpoints=2)
    fleet = job.fleet()
    wanted = tools.requests(tools.spec(), 60)
    num_asked = 0

    def counted() -> Iterator[Any]:
        nonlocal num_asked
        for request in wanted:
            num_asked += 1
            yield request

    fleet.describe(wanted[0].spec)
    with Reader(fleet, counted(), prefetch_factor=3) as reader:
        window = reader._window
        for num_taken in range(1, 20):
            next(reader)
            tools.wait_for(lambda num_taken=num_taken: len(window.outcomes) == num_asked - num_taken)
            assert window.size == 6
            # Beyond its size only where one batch held up others, which a busy machine causes.
            assert window.size <= len(window.outcomes) <= WindowGrowth.MAX_FACTOR * window.size
            assert not window.attempts


@pytest.mark.fault("F5")
def test_endpoint_that_is_stopped_for_good_is_done_without(
    job: Any, tools: Any, measured: Callable[[str, float], None]
) -> None:
    first = job.pool("algo-1")
    job.pool("algo-2")
    fleet = job.fleet(data_timeout_s=600.0)
    # Fewer batches than it takes to know when one is overdue: only the keepalive tells, after 15 s.
    wanted = tools.requests(tools.spec(sample_s=0.02), 12)
    with Reader(fleet, iter(wanted), prefetch_factor=2) as reader:
        batches = [next(reader)]
        tools.wait_for(
            lambda: (
                len(fleet.router.endpoints) == 2 and all(each.serves(wanted[0].spec) for each in fleet.router.endpoints)
            )
        )
        stopped_s = time.monotonic()
        os.kill(first.pids[0], signal.SIGSTOP)
        rest = in_thread(lambda: list(reader))
        tools.wait_for(lambda: fleet.stats.endpoint_losses)
        detection_s = time.monotonic() - stopped_s
        batches += rest()
    measured("detection_s", detection_s)
    assert tools.digest(batches) == tools.digest(tools.local(job.script, wanted))
    assert fleet.stats.endpoint_losses == 1
    assert fleet.stats.hedges == 0
    os.kill(first.pids[0], signal.SIGCONT)
    lost = next(connection for connection in fleet._table if connection.record.host == "algo-1")
    tools.wait_for(lambda: lost.serves(wanted[0].spec))  # and is used again
    with Reader(fleet, iter(wanted)) as reader:
        assert tools.digest(list(reader)) == tools.digest(batches)
