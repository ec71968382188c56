"""How much memory do the endpoints of a host take whose data set is large?

Question: sixteen endpoints serve a data set of 500 MB. How much memory do all processes of the host take, when the data
set is built once and when each endpoint builds it? And torch's workers?

Method: a NumPy array, and a list of texts. Each competitor delivers 400 batches of 256 rows. Then the memory of its
processes is added up (PSS: a page that n processes share counts 1/n in each). For endpoints this includes the process
that starts them, and the one that builds the data set. For torch it includes the script, whose data set the workers
share after the fork.

    python benchmarks/bench_dataset_memory.py --only "built once"
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from feeds import large_rows, served
from harness import Column, Competitor, Trial

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.reader.reader import Reader

NUM_PROCESSES = 16
MEGABYTES = 500
BATCH_SIZE = 256
NUM_BATCHES = 400
BOUND_MB = 700

COLUMNS = harness.columns(
    "batches_per_s",
    Column(title="all processes MB", metric="all_bytes", form="{:,.0f}", scale=1e-6),
    Column(title="private of one MB", metric="private_bytes", form="{:,.1f}", scale=1e-6),
    "first_batch_s",
)


class _Reading(Competitor):
    """A mix-in that adds up the memory of the supply."""

    def consume(self, batch: Any) -> tuple[int, int]:
        """Count it."""
        return len(batch), batch.nbytes

    def family(self) -> list[int]:
        """Return the process ids of the supply."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """Return the memory."""
        sizes = [_memory(pid) for pid in self.family()]
        return {
            "all_bytes": sum(pss for pss, _ in sizes),
            "private_bytes": sorted(private for _, private in sizes)[len(sizes) // 2],
        }


class Endpoints(_Reading):
    """hetero's endpoints."""

    def start(self) -> None:
        """Start the endpoints."""
        self._exits = contextlib.ExitStack()
        options = {"script": large_rows.__file__, "num_endpoints": NUM_PROCESSES}
        server = self._exits.enter_context(harness.server("endpoints", options))
        self._fleet = self._exits.enter_context(served.fleet(server.ask()))

    def batches(self) -> Iterator[Any]:
        """Read without end."""
        factory = large_rows.shared_rows if self.config["shares"] else large_rows.own_rows
        spec = factory(MEGABYTES, self.config["kind"])
        order = np.random.default_rng(1)
        requests = (
            BatchRequest(
                spec=spec,
                work=IndexedWork(order.integers(0, large_rows.NUM_ROWS, BATCH_SIZE)),
                seed=0,
                epoch=0,
                position=step,
                step=step,
            )
            for step in itertools.count()
        )
        return self._exits.enter_context(Reader(self._fleet, requests))

    def family(self) -> list[int]:
        """Return the endpoints, the fork server and the builder."""
        return [pid for pid in _descendants() if "fork_server" in _command(pid)]

    def stop(self) -> None:
        """End the endpoints."""
        self._exits.close()


class TorchWorkers(_Reading):
    """torch's workers, forked."""

    def batches(self) -> Iterator[Any]:
        """Read without end."""
        import torch.utils.data

        rows = large_rows.Rows(MEGABYTES, self.config["kind"])
        while True:
            yield from torch.utils.data.DataLoader(
                rows, BATCH_SIZE, shuffle=True, num_workers=NUM_PROCESSES, collate_fn=np.stack
            )

    def family(self) -> list[int]:
        """Return the workers, and this process for what it shares with them."""
        return [os.getpid(), *_descendants()]


COMPETITORS = {"built once": Endpoints, "built by each": Endpoints, "torch": TorchWorkers}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=1.0, short_seconds=0.5)
    args = parser.parse_args(argv)
    plan = harness.plan("dataset_memory", parser, args)
    trials = [
        Trial(
            competitor=name,
            group=f"{MEGABYTES} MB in {'an array' if kind == 'array' else 'a list'}, {NUM_PROCESSES} processes",
            config={"kind": kind, "shares": name == "built once"},
            start_s=20.0,
            warmup_s=5.0,
        )
        for kind in plan.choose(None, full=("array", "list"), short=("array",))
        for name in plan.choose(args.only, full=list(COMPETITORS), short=["built once"])
    ]
    rows = plan.compare(__file__, trials, warmup_batches=NUM_BATCHES, min_batches=16)
    title = "The memory of a host with a large data set"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="all_bytes"))
    return 0


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether the memory is in its bound in each run, for arrays."""
    if "an array" not in rows[0].trial.group:
        return []
    values = [value for row in rows if row.trial.competitor == "built once" for value in row.values("all_bytes")]
    return [harness.target("MB of all processes", max(values, default=float("nan")) / 1e6, BOUND_MB, at_most=True)]


def _memory(pid: int) -> tuple[int, int]:
    """Return a process's proportional and private bytes."""
    sizes = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]:
        name, value = line.split(":")
        sizes[name] = int(value.split()[0]) * 1024
    return sizes["Pss"], sizes["Private_Clean"] + sizes["Private_Dirty"]


def _descendants() -> list[int]:
    return [process.pid for process in harness.descendants(os.getpid())]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
