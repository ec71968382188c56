"""With a cache on several data hosts, what does it save that each sample is kept by one of them?

Question: how long do the epochs take, and how many samples do all hosts keep together, when each sample is computed by
the host that keeps it? And when each host keeps what it happens to compute?

Method: four hosts with two endpoints each, in this machine, with a folder for the cache of each host. 1,600 samples in
batches of 32, another order in each epoch. A sample is loaded in 20 ms and augmented in 2 ms, and waits instead of
computing: the result is simulated. Each host has room for all samples. Nothing was kept before the first epoch.

    owner hosts   as users have it
    anywhere      the reader does not name the hosts that keep the samples

    python benchmarks/bench_cache_hosts.py --only "owner hosts"
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
from feeds import kept_samples, served
from harness import Column, Competitor, Trial

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.reader.reader import Reader
from hetero.reader.routing import Router

NUM_HOSTS = 4
BATCH_SIZE = 32
LOAD_S, AUGMENT_S = 0.02, 0.002
NUM_EPOCHS = 16
SHOWN_EPOCHS = (1, 2, 4, 8, 16)
FIRST_BOUND, SECOND_BOUND, KEPT_BOUND = 1.1, 0.6, 1.1

COLUMNS = harness.columns(
    *(Column(title=f"epoch {number} s", metric=f"epoch_{number}_s", form="{:.2f}") for number in SHOWN_EPOCHS),
    Column(title="samples kept, all hosts", metric="num_kept", form="{:,.0f}"),
)


class OwnerHosts(Competitor):
    """hetero's endpoints on several hosts."""

    def start(self) -> None:
        """Start the endpoints, which build the data set."""
        self._exits = contextlib.ExitStack()
        self._root = Path(self._exits.enter_context(tempfile.TemporaryDirectory()))
        folders = [self._root / f"{number}" for number in range(NUM_HOSTS)]
        variables = [{kept_samples.HOST_VARIABLE: str(folder)} for folder in folders]
        for folder in folders:
            folder.mkdir()
        options = {"script": kept_samples.__file__, "num_endpoints": 2, "variables": variables}
        server = self._exits.enter_context(harness.server("hosts", options))
        self._fleet = self._exits.enter_context(served.fleet(server.ask()))
        for spec in (self._spec("warm-up"), self._spec("measured")):
            self._fleet.describe(spec)

    def batches(self) -> Iterator[Any]:
        """Read quick batches without end, for the harness."""
        epoch = 0
        while True:
            yield from self._read("warm-up", epoch)
            epoch += 1

    def consume(self, batch: Any) -> tuple[int, int]:
        """Count it."""
        return BATCH_SIZE, batch["image"].nbytes

    def facts(self) -> dict[str, Any]:
        """Train epochs. Return how long each took, and how many samples the hosts keep then."""
        before = self._num_kept()
        took_s = {}
        for epoch in range(1, NUM_EPOCHS + 1):
            begin_s = time.perf_counter()
            num_batches = sum(1 for _ in self._read("measured", epoch))
            assert num_batches == kept_samples.NUM_SAMPLES // BATCH_SIZE
            took_s[f"epoch_{epoch}_s"] = time.perf_counter() - begin_s
        return {**took_s, "num_kept": self._num_kept() - before}

    def stop(self) -> None:
        """End the endpoints."""
        self._exits.close()

    def _spec(self, run: str) -> Any:
        times_s = {"warm-up": (0.0, 0.0), "measured": (LOAD_S, AUGMENT_S)}[run]
        return kept_samples.kept_samples(*times_s, run)

    def _num_kept(self) -> int:
        """Return the number of samples in the files of all hosts, from their slots that are not empty."""
        slots = [np.fromfile(path, "<u4").reshape(-1, 4)[:, 0] for path in self._root.rglob("index")]
        return sum(int(np.count_nonzero(each)) for each in slots)

    def _read(self, run: str, epoch: int) -> Iterator[Any]:
        order = np.random.default_rng(epoch).permutation(kept_samples.NUM_SAMPLES)
        requests = (
            BatchRequest(spec=self._spec(run), work=IndexedWork(indices), seed=0, epoch=epoch, position=step, step=step)
            for step, indices in enumerate(np.split(order, kept_samples.NUM_SAMPLES // BATCH_SIZE))
        )
        with Reader(self._fleet, requests) as reader:
            yield from reader


class Anywhere(OwnerHosts):
    """The same where any host computes a sample."""

    def start(self) -> None:
        """Name no owner hosts."""
        Router.choose_owners = lambda *_: ((), None)  # type: ignore[method-assign]  # this process runs nothing else
        super().start()


COMPETITORS = {"owner hosts": OwnerHosts, "anywhere": Anywhere}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=0.2, short_seconds=0.2)
    args = parser.parse_args(argv)
    plan = harness.plan("cache_hosts", parser, args)
    trials = [
        Trial(competitor=name, group="four hosts", config={}, basis="simulated", start_s=8.0, warmup_s=30.0)
        for name in plan.choose(args.only, full=list(COMPETITORS), short=list(COMPETITORS))
    ]
    rows = plan.compare(__file__, trials, warmup_batches=60, min_batches=4)
    title = "A cache on several hosts"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="epoch_2_s"))
    return 0


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Compare with hosts that keep what they happen to compute."""
    pairs = {
        "epoch_1_s": ("epoch 1 x anywhere", FIRST_BOUND),
        "epoch_2_s": ("epoch 2 x anywhere", SECOND_BOUND),
        "epoch_4_s": ("epoch 4 x anywhere", FIRST_BOUND),
    }
    lines = [
        harness.target(title, harness.ratio(rows, "owner hosts", "anywhere", metric), bound, at_most=True)
        for metric, (title, bound) in pairs.items()
    ]
    own = next((row for row in rows if row.trial.competitor == "owner hosts" and row.runs), None)
    kept = own.median("num_kept") / kept_samples.NUM_SAMPLES if own else float("nan")
    return [*lines, harness.target("samples kept x samples", kept, KEPT_BOUND, at_most=True)]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"hosts": served.hosts})
    sys.exit(main())
