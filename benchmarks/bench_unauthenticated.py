"""What do 500 connections of unauthenticated peers cost a reader?

Question: which share of its throughput does a legitimate loader keep while 500 other connections to its endpoint are
open? Some are silent, send half a greeting or HTTP/2 preface, make no calls, or make calls that are refused. A few
dozen are readers of the same job that requested a batch and do not read it.

Method: an endpoint and a reader, in two processes, once undisturbed and once with the peers. The peers are another
process, which counts as supply. Batches of 1 MB are drawn at random to give the endpoint work. All peers
connect when a run begins and leave when it ends. The endpoint closes most of them after five seconds. The ratio is the
median over the rounds of the ratio within a round.

    python benchmarks/bench_unauthenticated.py --short
    python benchmarks/bench_unauthenticated.py --number 2000
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import psutil
from feeds import noise_batches, served
from harness import Column, Competitor, Trial

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.control.security import Token, call_metadata, write_token
from hetero.endpoint.link import EndpointLink
from hetero.reader.reader import Reader
from hetero.wire.limits import Limits
from hetero.wire.requests import to_proto

NUMBER = 500
BOUND = 0.8
_PEERS = "tests.support.attacks.unauthenticated_peers"

COLUMNS = harness.columns(
    *("batches_per_s", "gb_per_s", "trainer_cpu_s_per_gb", "supply_cpu_s_per_gb"),
    Column(title="peers let in", metric="connections", form="{:,.0f}"),
    Column(title="descriptors more, a process", metric="descriptors_more", form="{:,.0f}"),
    Column(title="threads more, a process", metric="threads_more", form="{:,.0f}"),
)


class Undisturbed(Competitor):
    """An endpoint with a token, and its reader."""

    min_warmup_s = 1.0

    def start(self) -> None:
        self._exits = contextlib.ExitStack()
        token_path = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) / "token"
        self._token = Token.generate()
        write_token(str(token_path), self._token)
        options = {"script": noise_batches.__file__, "num_endpoints": 1, "token_path": str(token_path)}
        paths = self._exits.enter_context(harness.server("endpoints", options)).ask()
        (self._record,) = served.directory(paths).records()
        self._fleet = self._exits.enter_context(served.fleet(paths, token=self._token))

    def requests(self) -> Iterator[BatchRequest]:
        """Ask for batches without an end."""
        spec, size = noise_batches.noise(), noise_batches.BATCH_SIZE
        for position in itertools.count():
            indices = (np.arange(size, dtype=np.int64) + size * position) % noise_batches.LENGTH
            yield BatchRequest(spec=spec, work=IndexedWork(indices), seed=1, epoch=0, position=position, step=position)

    def batches(self) -> Iterator[Any]:
        return self._exits.enter_context(Reader(self._fleet, self.requests(), prefetch_factor=served.PREFETCH_FACTOR))

    def consume(self, batch: Any) -> tuple[int, int]:
        batch[::4096].any()  # a byte of every page
        return noise_batches.BATCH_SIZE, batch.nbytes

    def facts(self) -> dict[str, Any]:
        return {"connections": 0, "descriptors_more": 0, "threads_more": 0}

    def stop(self) -> None:
        self._exits.close()


class Beset(Undisturbed):
    """The same with ``number`` peers at the endpoint."""

    def start(self) -> None:
        super().start()
        metadata = call_metadata(self._token, served.JOB, incarnation=self._record.incarnation)
        insider = EndpointLink(self._record, metadata, Limits())
        self._exits.callback(insider.close)
        insider.attend()  # its session token is the one of those who never read
        message = to_proto(next(self.requests())).SerializeToString()
        asking = insider._hello + struct.pack("<I", len(message)) + message
        self._peers = UnauthenticatedPeers(self._record.address, insider._port, self.config["number"], asking)
        self._exits.callback(self._peers.end)

    def begin_run(self) -> None:
        before = self._supply()
        connections = self._peers.tell("open")
        growth = [
            (descriptors - before[pid][0], threads - before[pid][1])
            for pid, (descriptors, threads) in self._supply().items()
            if pid in before
        ]
        self._facts = {
            "connections": connections,
            "descriptors_more": max(descriptors for descriptors, _ in growth),
            "threads_more": max(threads for _, threads in growth),
        }

    def facts(self) -> dict[str, Any]:
        self._peers.tell("close")
        return self._facts

    def _supply(self) -> dict[int, tuple[int, int]]:
        """Return descriptors and threads of each process that serves."""
        found = {}
        for process in harness.descendants(os.getpid()):
            if process.pid != self._peers.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found[process.pid] = process.num_fds(), process.num_threads()
        return found


class UnauthenticatedPeers:
    """The process that is them.

    Args:
        calls: ``address:port`` where calls are answered.
        batches_port: Where batches are, at the same address.
        number: Of connections.
        asking: What a holder of a session token says to be sent a batch.
    """

    def __init__(self, calls: str, batches_port: int, number: int, asking: bytes) -> None:
        host, _, port = calls.rpartition(":")
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PEERS, host, port, str(batches_port), str(number), asking.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(harness.HERE.parent)},
        )
        self.pid = self._process.pid

    def tell(self, word: str) -> int:
        """Make the peers open or close their connections. Return the number of connections."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


COMPETITORS = {"hetero": Undisturbed, "hetero-beset": Beset}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=10.0, short_seconds=3.0)
    parser.add_argument("--number", type=int, default=NUMBER, help="of peers (%(default)s)")
    args = parser.parse_args(argv)
    plan = harness.plan("unauthenticated", parser, args)
    rows = plan.compare(__file__, make_trials({"number": args.number}, args.only), warmup_batches=24, fresh=False)
    plan.write(
        rows,
        harness.report("A reader among unauthenticated peers", rows, COLUMNS, figures, ratio_metric="batches_per_s"),
    )
    return 0


def make_trials(config: Mapping[str, Any], only: Sequence[str] | None = None) -> list[Trial]:
    """Return the rows to be."""
    return [Trial(competitor=name, config=config, start_s=4.0, warmup_s=1.5) for name in only or COMPETITORS]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say which share of its throughput the reader keeps."""
    kept = harness.ratio(rows, "hetero-beset", "hetero", "batches_per_s")
    return [harness.target("batches/s beset / undisturbed", kept, BOUND)]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
