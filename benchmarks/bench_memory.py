"""How much memory does reading take, and does a reader that stalls let either side grow?

Question: by how much does the trainer process grow while it is fed, beyond the batches in its window? And if it takes
no batch for 30 seconds (a checkpoint, a validation pass), do it and the endpoints stay as they are?

Method: ready-made batches, as in `bench_transport.py`. Growth is the peak of resident memory while fed, minus the
resident memory after all imports and before any connection. The window is the default: two batches per endpoint. After
that the loop takes nothing for ``--stall`` seconds. Resident memory of the trainer process and of each process of the
supply is sampled ten times a second. The growth after the first second is the drift. The worst process counts.

    python benchmarks/bench_memory.py --short
    python benchmarks/bench_memory.py --stall 120 --only hetero
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import harness
from feeds import ready_feeds, served
from harness import Column, Trial
from transports import Transport

SHAPES = ((10_000_000, 1), (10_000_000, 4), (40_000_000, 1))
"""Bytes per batch and endpoints."""
SHORT_SHAPES = SHAPES[:1]
STALL_S, SHORT_STALL_S, PEERS_STALL_S = 30.0, 5.0, 5.0
SETTLE_S = 10.0
"""Longest wait until the buffers of the stalled transport are full."""
SAMPLE_S = 0.1
NUM_STEADY = 5
"""They are full after this number of samples in a row without growth."""
STEADY_BYTES = 2**20
ALLOWANCE_MB = 64
DRIFT_MB = 8
"""What counts as no growth: allocators and statistics take a little."""

COLUMNS = harness.columns(
    Column(title="window MB", metric="window_bytes", scale=1e-6),
    "trainer_growth_bytes",
    Column(title="trainer growth MB, stalled", metric="stalled_growth_bytes", scale=1e-6),
    Column(title="trainer drift MB in the stall", metric="trainer_drift_bytes", scale=1e-6),
    Column(title="supply drift MB in the stall", metric="supply_drift_bytes", scale=1e-6),
    Column(title="largest supply process MB", metric="supply_process_bytes", scale=1e-6),
    Column(title="stall s", metric="stall_s"),
)


class _Stalling(Transport):
    """A mix-in for competitors: takes nothing for a while after each run."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        import torch  # noqa: F401 - before memory is first looked at

        self._before_bytes = harness.resident_bytes()

    def facts(self) -> dict[str, Any]:
        """Stall, and return what grew meanwhile."""
        family = harness.descendants(os.getpid())
        self._wait_until_steady(family)
        trainer_bytes = trainer_peak = harness.resident_bytes()
        supply_bytes = [harness.resident_bytes_of(process) for process in family]
        peaks = list(supply_bytes)
        end_s = time.monotonic() + self.config["stall_s"]
        while time.monotonic() < end_s:
            time.sleep(SAMPLE_S)
            trainer_peak = max(trainer_peak, harness.resident_bytes())
            peaks = [max(peak, harness.resident_bytes_of(process)) for peak, process in zip(peaks, family, strict=True)]
        # At least two batches, and two per endpoint: torch's loader has the same default per worker.
        in_window = max(2, served.PREFETCH_FACTOR * self.config["num_endpoints"])
        return {
            "stall_s": self.config["stall_s"],
            "window_bytes": in_window * self.config["nbytes"],
            "stalled_growth_bytes": trainer_peak - self._before_bytes,
            "trainer_drift_bytes": trainer_peak - trainer_bytes,
            "supply_drift_bytes": max(map(int.__sub__, peaks, supply_bytes), default=0),
            "supply_process_bytes": max(peaks, default=0),
        }

    def _wait_until_steady(self, family: Sequence[Any]) -> None:
        """Block until the memory of this process and its children no longer grows, at most `SETTLE_S` seconds."""
        give_up_s = time.monotonic() + SETTLE_S
        before_bytes, num_steady = 0, 0
        while num_steady < NUM_STEADY and time.monotonic() < give_up_s:
            time.sleep(SAMPLE_S)
            now_bytes = harness.resident_bytes() + sum(map(harness.resident_bytes_of, family))
            num_steady = num_steady + 1 if now_bytes <= before_bytes + STEADY_BYTES else 0
            before_bytes = now_bytes


class Hetero(_Stalling, ready_feeds.Hetero):
    pass


class TorchWorkers(_Stalling, ready_feeds.TorchWorkers):
    pass


COMPETITORS = {"hetero": Hetero, "torch": TorchWorkers}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=2.0, short_seconds=1.0)
    parser.add_argument(
        "--stall", type=float, help=f"seconds without a batch ({STALL_S:g}; {SHORT_STALL_S:g} with --short)"
    )
    args = parser.parse_args(argv)
    plan = harness.plan("memory", parser, args)
    stall_s = plan.choose(args.stall, full=STALL_S, short=SHORT_STALL_S)
    shapes = plan.choose(None, full=SHAPES, short=SHORT_SHAPES)
    only = plan.choose(args.only, full=list(COMPETITORS), short=["hetero"])
    rows = plan.compare(__file__, make_trials(shapes, stall_s, only), warmup_batches=24)
    title = "Memory of a trainer that is fed, and of one that stalls"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="trainer_growth_bytes"))
    return 0


def make_trials(shapes: Sequence[tuple[int, int]], stall_s: float, only: Sequence[str]) -> list[Trial]:
    """Return the rows to measure. The peer is for comparison, and stalls for a short while only."""
    return [
        Trial(
            competitor=name,
            group=f"{nbytes / 1e6:,.0f} MB, {count} endpoint{'s' * (count > 1)}",
            config={
                "nbytes": nbytes,
                "num_endpoints": count,
                "stall_s": stall_s if name == "hetero" else min(stall_s, PEERS_STALL_S),
            },
            start_s=4.5,
            warmup_s=2.0 + (stall_s if name == "hetero" else min(stall_s, PEERS_STALL_S)),
        )
        for nbytes, count in shapes
        for name in only
    ]


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Say whether memory of hetero stays in its bounds: the highest of all runs, as a bound has to hold always."""
    row = next((row for row in rows if row.trial.competitor == "hetero"), None)
    if row is None:
        return []

    def highest(metric: str) -> float:
        return max(row.values(metric), default=float("nan")) / 1e6

    allowed = row.median("window_bytes") / 1e6 + ALLOWANCE_MB
    bounds = (
        (f"trainer MB grown while fed, window + {ALLOWANCE_MB}", "trainer_growth_bytes", allowed),
        (f"trainer MB grown when stalled, window + {ALLOWANCE_MB}", "stalled_growth_bytes", allowed),
        ("trainer MB drifted in the stall", "trainer_drift_bytes", DRIFT_MB),
        ("supply process MB drifted in the stall", "supply_drift_bytes", DRIFT_MB),
    )
    return [harness.target(what, highest(metric), bound, at_most=True) for what, metric, bound in bounds]


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
