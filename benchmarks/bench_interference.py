"""What does receiving batches cost the training loop itself?

Question: how much longer does a training step take while batches arrive at 100, 300 and 1,000 MB/s, over the data
plane or from a local torch worker process, than with one batch that is always there?

Method: a step is a stretch of fixed work of about 50 ms, in Python bytecode (which needs the interpreter lock that
receiving threads take too) or in torch (one thread of matrix products, which does not). Each step takes one batch,
sized so that batches at the pace of the step alone make the stated rate. The batch is read through, as the copy to an
accelerator would. The step's time excludes the wait for its batch; the loop's time includes it. ``cached`` hands over
the same batch again and again.

By default the processes share all cores of this machine, so with few cores the supply's work also costs
the step; ``--pin`` keeps the trainer process on the first core and everything else on the others, as if
the supply were on another machine.

    python benchmarks/bench_interference.py --short
    python benchmarks/bench_interference.py --rates 1000 --pin
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import numpy as np
import served
from harness import Column, Competitor, Trial

RATES_MB_S = (100, 300, 1000)
SHORT_RATES_MB_S = (300, 1000)
STEP_TIME_S = 0.05
SCRIPT = str(Path(__file__).with_name("ready_batches.py"))

COLUMNS = (
    Column(title="step ms, median", metric="step_time_s", form="{:.2f}", scale=1e3),
    Column(title="step ms, p95", metric="step_time_p95_s", form="{:.2f}", scale=1e3),
    Column(title="step / undisturbed", metric="slowdown", form="{:.3f}"),
    Column(title="loop ms", metric="loop_time_s", form="{:.2f}", scale=1e3),
    Column(title="MB/s", metric="gb_per_s", form="{:,.0f}", scale=1e3),
    Column(title="trainer CPU-s/GB, step included", metric="trainer_cpu_s_per_gb"),
)


def python_step() -> Callable[[], object]:
    """Return work in bytecode."""

    def step() -> int:
        total = 0
        for number in range(20_000):
            total += number & 3
        return total

    return step


def torch_step() -> Callable[[], object]:
    """Return work in one thread of native code."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.rand(256, 256), torch.rand(256, 256)
    return lambda: torch.mm(left, right)


STEPS = {"python": python_step, "torch": torch_step}


class _Loop(Competitor):
    """A training loop; subclasses feed it. The number of units per step is chosen while nothing else runs."""

    def start(self) -> None:
        if self.config["pin"]:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self._unit = STEPS[self.config["step"]]()
        self._calibrate()
        self._step_times_s: list[float] = []
        self._wait_times_s: list[float] = []
        self._begun_s = 0.0
        self.start_feed()

    def _calibrate(self) -> None:
        def units_time_s(count: int) -> float:
            begin_s = time.perf_counter()
            for _ in range(count):
                self._unit()
            return time.perf_counter() - begin_s

        units_time_s(10)
        unit_time_s = min(units_time_s(10) for _ in range(20)) / 10
        self._num_units = max(1, round(STEP_TIME_S / unit_time_s))
        self._alone_s = statistics.median(units_time_s(self._num_units) for _ in range(11))

    def start_feed(self) -> None:
        """Start what delivers."""

    def consume(self, batch: Any) -> tuple[int, int]:
        array = batch.numpy() if hasattr(batch, "numpy") else batch
        if array[::4096].any():
            raise ValueError("not the batch that was sent")
        now_s = time.perf_counter()
        self._wait_times_s.append(now_s - self._begun_s)
        for _ in range(self._num_units):
            self._unit()
        self._begun_s = time.perf_counter()
        self._step_times_s.append(self._begun_s - now_s)
        return 1, len(array)

    def begin_run(self) -> None:
        self._step_times_s.clear()
        self._wait_times_s.clear()

    def facts(self) -> dict[str, Any]:
        steps_s = sorted(self._step_times_s)
        step_s, loop_s = (
            statistics.median(steps_s),
            statistics.mean(self._step_times_s) + statistics.mean(self._wait_times_s),
        )
        return {
            "step_time_s": step_s,
            "step_time_p95_s": steps_s[int(0.95 * len(steps_s))],
            "loop_time_s": loop_s,
            "alone_s": self._alone_s,
            "slowdown": step_s / self._alone_s,
            "num_units": self._num_units,
        }

    def nbytes(self) -> int:
        """Return the size of a batch."""
        return int(self.config["rate_mb_s"] * 1e6 * STEP_TIME_S)

    def pin_supply(self) -> None:
        """Keep descendants off the trainer's core."""
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        if self.config["pin"] and others:
            for process in harness.descendants(os.getpid()):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, others)


class Cached(_Loop):
    def batches(self) -> Iterator[Any]:
        return itertools.repeat(np.arange(self.nbytes(), dtype=np.uint8))


class Hetero(_Loop):
    def start_feed(self) -> None:
        self._pool = harness.Child(__file__, "server", "endpoints", {"script": SCRIPT, "num_endpoints": 1})
        self._fleet = served.fleet(self._pool.ask())
        self.pin_supply()

    def batches(self) -> Iterator[Any]:
        import ready_batches

        from hetero.batches.request import BatchRequest
        from hetero.dataplane.reader import Reader

        spec = ready_batches.ready_batches(self.nbytes())
        self._reader = Reader(
            self._fleet,
            (
                BatchRequest(
                    spec=spec, indices=np.array([step]), seed=0, epoch=0, position=step, collate=False, step=step
                )
                for step in itertools.count()
            ),
        )
        yield from self._reader

    def stop(self) -> None:
        self._reader.close()
        self._fleet.close()
        self._pool.stop()


class TorchWorker(_Loop):
    def batches(self) -> Iterator[Any]:
        import torch
        from ready_batches import ReadyBatches

        data: Any = ReadyBatches(self.nbytes())
        loader = iter(torch.utils.data.DataLoader(data, batch_size=None, num_workers=1))
        self.pin_supply()
        yield from loader


COMPETITORS = {"cached": Cached, "hetero": Hetero, "torch-worker": TorchWorker}


def main() -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__ or "")
    parser.add_argument("--rates", type=int, nargs="+", help="MB/s")
    parser.add_argument("--steps", nargs="+", choices=sorted(STEPS), default=sorted(STEPS))
    parser.add_argument("--pin", action="store_true", help="the trainer process on one core, its supply on the others")
    args = parser.parse_args()
    rates = args.rates or (SHORT_RATES_MB_S if args.short else RATES_MB_S)
    trials = [
        Trial(
            competitor=name,
            group=f"{step} step, {rate:,} MB/s",
            config={"step": step, "rate_mb_s": rate, "pin": args.pin},
        )
        for step in args.steps
        for rate in rates
        for name in args.only or COMPETITORS
    ]
    seconds = args.seconds or (1.0 if args.short else 4.0)
    rows = harness.compare(__file__, trials, runs=args.runs, seconds=seconds, warmup_batches=6)
    text = "# What receiving costs the training loop\n\n" + "\n\n".join(
        f"## {group}\n\n{harness.table(members, COLUMNS, ratio_metric='step_time_s')}\n\n{figure(members)}"
        for group in dict.fromkeys(row.trial.group for row in rows)
        for members in [[row for row in rows if row.trial.group == group]]
    )
    print(text)
    harness.write("interference", rows, text, harness.results_folder(args), runs=args.runs, seconds=seconds)
    return 0


def figure(rows: Sequence[harness.Row]) -> str:
    """Say whether the step is no slower than beside a torch worker."""
    return harness.target(
        "slowdown of the step over that beside a torch worker",
        harness.ratio(rows, "hetero", "torch-worker", "slowdown"),
        1.0,
        at_most=True,
    )


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
