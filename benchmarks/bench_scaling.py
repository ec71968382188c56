"""Does delivery keep up with supply when there are many data hosts and many ranks?

Question: with 1 to 32 data hosts and 1 to 8 ranks, what share of the samples that the hosts could compute reaches the
ranks, in order?

Method: every data host is one endpoint process that emulates several vCPUs. A sample's cost is emulated by waiting, so
two cores can emulate hundreds. Ideal supply is ``hosts x vCPUs / sample time``. Everything else is real: requests,
choice of endpoint, transport, windows, order. Emulated vCPUs that began together deliver in bursts, so a count in a
window of time says little. Delivery is the time of all vCPUs together from one turn to a later one, averaged over
every batch that both have. The first turns are left out, because endpoints become ready one after the other, and the
first one gets more than its share.
Basis: simulated. The ranks and endpoints share this machine's cores. A real cluster has more of them.

    python benchmarks/bench_scaling.py --short
    python benchmarks/bench_scaling.py --shapes 1x1 8x2 32x8
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import harness
import numpy as np
import numpy.typing as npt
from feeds import served
from harness import Column, Competitor, Trial

SHAPES = ("1x1", "4x1", "8x2", "32x1", "32x8")
SHORT_SHAPES = ("32x8",)
WARMUP_TURNS = 5

COLUMNS = (
    Column(title="ideal samples/s", metric="ideal_samples_per_s", form="{:,.0f}"),
    Column(title="delivered samples/s", metric="delivered_samples_per_s", form="{:,.0f}"),
    Column(title="delivered / ideal", metric="share", form="{:.3f}"),
    Column(title="CPU-s/s of all ranks", metric="rank_cpu", form="{:.2f}"),
    Column(title="CPU-s/s of all endpoints", metric="endpoint_cpu", form="{:.2f}"),
)


class Cluster(Competitor):
    """Endpoints and ranks are this process's children. A "batch" is one measurement of the whole cluster."""

    def start(self) -> None:
        config = self.config
        options = {"script": served.READY_SCRIPT, "num_endpoints": config["num_hosts"], "spread": True}
        options |= {"num_slots": config["num_slots"], "sample_time_s": config["sample_time_s"]}
        self._pool = harness.server("endpoints", options)
        paths = self._pool.ask()
        self._ranks = [
            harness.server("rank", {**config, "rank": rank, "paths": paths}) for rank in range(config["num_ranks"])
        ]
        self._facts: dict[str, Any] = {}

    def batches(self) -> Iterator[Any]:
        yield []  # the harness's first batch: nothing to measure yet
        for rank in self._ranks:
            rank.ask()  # it has seen its warm-up
        before_s = self._cpu_s()
        begin_s = time.monotonic()
        time.sleep(self.config["turns"] * self.config["batch_size"] * self.config["sample_time_s"])
        end_s = time.monotonic()
        after_s = self._cpu_s()
        # One clock for all processes. The number of vCPUs that work for one rank changes. But in each turn every vCPU
        # makes one batch, so turns are counted in the deliveries of all ranks together.
        moments = np.sort(np.concatenate([rank.ask("report") for rank in self._ranks]))
        inside = moments[(moments >= begin_s) & (moments < end_s)]
        delivered = self.config["batch_size"] * delivery_rate(
            inside, self.config["num_hosts"] * self.config["num_slots"]
        )
        ideal = self.config["num_hosts"] * self.config["num_slots"] / self.config["sample_time_s"]
        self._facts = {
            "ideal_samples_per_s": ideal,
            "delivered_samples_per_s": delivered,
            "share": delivered / ideal,
            "rank_cpu": (after_s[1] - before_s[1]) / (end_s - begin_s),
            "endpoint_cpu": (after_s[0] - before_s[0]) / (end_s - begin_s),
        }
        yield inside

    def consume(self, batch: Any) -> tuple[int, int]:
        return len(batch) * self.config["batch_size"], 0

    def facts(self) -> dict[str, Any]:
        return self._facts

    def stop(self) -> None:
        for rank in self._ranks:
            rank.stop()
        self._pool.stop()

    def _cpu_s(self) -> tuple[float, float]:
        """Return CPU seconds of the endpoints and of the ranks."""
        return self._pool.cpu_s(), sum(rank.cpu_s() for rank in self._ranks)


def delivery_rate(moments: npt.NDArray[np.float64], per_turn: int) -> float:
    """Return deliveries per second of vCPUs that deliver ``per_turn`` batches together.

    Args:
        moments: Of the deliveries, ascending, seconds.
        per_turn: Emulated vCPUs.

    Raises:
        ValueError: There are less than two turns.
    """
    turns = len(moments) // per_turn - 1
    if turns < 1:
        raise ValueError(f"{len(moments)} deliveries are less than two turns of {per_turn}; measure longer")
    return turns * per_turn / float(np.mean(moments[turns * per_turn :] - moments[: -turns * per_turn]))


@contextlib.contextmanager
def rank(config: Mapping[str, Any]) -> Iterator[Any]:
    """Read for ever. The first reply comes after the warm-up, the second contains the times of all deliveries."""
    import threading

    from feeds import ready_batches

    from hetero.batches.indexed import IndexedWork
    from hetero.batches.request import BatchRequest
    from hetero.reader.reader import Reader

    world_size, batch_size = config["num_ranks"], config["batch_size"]
    spec = ready_batches.tiny_samples()
    moments: list[float] = []
    warm = threading.Event()

    def read() -> None:
        requests = (
            BatchRequest(
                spec=spec,
                work=IndexedWork(np.arange(position * batch_size, (position + 1) * batch_size)),
                seed=0,
                epoch=0,
                position=position,
                step=step,
            )
            for step, position in enumerate(itertools.count(config["rank"], world_size))
        )
        warmup = WARMUP_TURNS * config["num_hosts"] * config["num_slots"] // world_size
        for number, _ in enumerate(Reader(fleet, requests)):
            moments.append(time.monotonic())
            if number >= warmup:
                warm.set()

    with served.fleet(config["paths"], rank=config["rank"], world_size=world_size) as fleet:
        threading.Thread(target=read, daemon=True).start()
        if not warm.wait(120.0):
            raise TimeoutError("the warm-up took too long")
        yield lambda: moments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the shapes and write their table."""
    parser = harness.parser(__doc__, seconds=8.0, short_seconds=6.4)
    parser.add_argument("--shapes", nargs="+", help="data hosts x ranks, such as 32x8")
    parser.add_argument("--slots", type=int, default=8, help="emulated vCPUs per data host (%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="samples (%(default)s)")
    parser.add_argument("--batch-time", type=float, default=1.6, help="seconds of one vCPU per batch (%(default)s)")
    args = parser.parse_args(argv)
    plan = harness.plan("scaling", parser, args)
    turns = max(2, round(plan.seconds / args.batch_time))
    trials = [
        Trial(
            competitor="cluster",
            title=f"{hosts} data hosts, {ranks} ranks",
            config={
                "num_hosts": hosts,
                "num_ranks": ranks,
                "num_slots": args.slots,
                "batch_size": args.batch_size,
                "sample_time_s": args.batch_time / args.batch_size,
                "turns": turns,
            },
            basis="simulated",
            start_s=3.0 + 0.05 * hosts + 0.3 * ranks,
            warmup_s=(WARMUP_TURNS + turns) * args.batch_time,
        )
        for hosts, ranks in map(parse_shape, plan.choose(args.shapes, full=SHAPES, short=SHORT_SHAPES))
    ]
    # The competitor measures by itself: its one "batch" is a whole measurement.
    rows = plan.compare(__file__, trials, warmup_batches=0, min_batches=1, seconds=0.0)
    text = harness.report("Delivered against ideal supply", rows, COLUMNS, figures, ratio_metric="share")
    plan.write(rows, text)
    return 0


def parse_shape(text: str) -> tuple[int, int]:
    """Return data hosts and ranks of ``32x8``."""
    hosts, ranks = text.split("x")
    return int(hosts), int(ranks)


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether the figure is met, which is that of 32 hosts and 8 ranks."""
    return [
        harness.target(f"delivered / ideal with {row.trial.name}", row.median("share"), 0.95)
        for row in rows
        if (row.trial.config["num_hosts"], row.trial.config["num_ranks"]) == (32, 8)
    ]


if __name__ == "__main__":
    harness.dispatch({"cluster": Cluster}, {"endpoints": served.endpoints, "rank": rank})
    sys.exit(main())
