"""What does receiving batches cost the training loop itself?

Question: how much longer does a training step take while batches arrive at 100, 300 and 1,000 MB/s, over the data
plane or from a local torch worker process, than with one batch that is always there?

Method: a step is fixed work of about 40 ms. It is Python bytecode or matrix products of torch in one thread. Bytecode
needs the interpreter lock, which receiving threads take too. Matrix products do not need it. The amount of work is
found once, before anything else runs, and is the same for all rows. The loop takes one batch every 50 ms, no sooner.
The size of a batch gives the stated rate, the same for every competitor: a slower step leaves a shorter pause, not
fewer bytes. If no pause is left, the MB/s column shows it. Before the step the loop reads the whole batch, as a copy to
an accelerator would. The step's time contains neither this nor the wait. The loop's time contains all three, but not
the pause, because one competitor does before the step what another does during the step. ``cached`` uses the same
batch again and again, to measure the step alone.

By default the processes share all cores of this machine, so with few cores the supply's work also costs
the step. ``--pin`` keeps the trainer process on the first core and everything else on the others, as if
the supply were on another machine. Its result is a separate file.

    python benchmarks/bench_interference.py --short
    python benchmarks/bench_interference.py --pin
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness
from feeds import ready_feeds, served
from harness import Column, Trial
from transports import look_at

RATES_MB_S = (100, 300, 1000)
SHORT_RATES_MB_S = (300,)
STEP_TIME_S = 0.04
PERIOD_S = 0.05
REACHED = 0.95
"""Share of the rate below which two competitors did not deliver the same."""

COLUMNS = harness.columns(
    Column(title="step ms, median", metric="step_time_s", scale=1e3),
    Column(title="step ms, mean", metric="step_time_mean_s", scale=1e3),
    Column(title="step ms, p95", metric="step_time_p95_s", scale=1e3),
    Column(title="wait for the batch ms, mean", metric="data_wait_mean_s", scale=1e3),
    Column(title="loop ms, median", metric="loop_time_s", scale=1e3),
    Column(title="MB/s", metric="gb_per_s", form="{:,.0f}", scale=1e3),
    Column(title="trainer CPU-s/GB, step included", metric="trainer_cpu_s_per_gb"),
    "supply_cpu_s_per_gb",
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


def calibrate(step: str) -> int:
    """Return how many units of work make a step of `STEP_TIME_S` here."""
    unit = STEPS[step]()

    def units_time_s(count: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(count):
            unit()
        return time.perf_counter() - begin_s

    units_time_s(10)
    return max(1, round(STEP_TIME_S / (min(units_time_s(10) for _ in range(20)) / 10)))


class _Loop(ready_feeds.Feed):
    """A training loop. Subclasses feed it."""

    def start(self) -> None:
        import torch  # noqa: F401 - every trainer has it: the same memory and imports for all rows

        if self.config["pin"]:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        self._unit = STEPS[self.config["step"]]()
        self._num_units: int = self.config["num_units"]
        self._step_times_s: list[float] = []
        self._wait_times_s: list[float] = []
        self._loop_times_s: list[float] = []
        self._begun_s = self._due_s = time.perf_counter()
        super().start()

    def consume(self, batch: Any) -> tuple[int, int]:
        arrived_s = time.perf_counter()
        nbytes = look_at(batch, self.config["nbytes"])
        step_s = time.perf_counter()
        for _ in range(self._num_units):
            self._unit()
        now_s = time.perf_counter()
        self._step_times_s.append(now_s - step_s)
        self._wait_times_s.append(arrived_s - self._begun_s)
        self._loop_times_s.append(now_s - self._begun_s)
        # A late batch is made up for, but not by a burst of more than one.
        self._due_s = max(self._due_s + PERIOD_S, now_s - PERIOD_S)
        time.sleep(max(0.0, self._due_s - now_s))
        self._begun_s = time.perf_counter()
        return 1, nbytes

    def begin_run(self) -> None:
        self._pin_supply()
        self._step_times_s.clear()
        self._wait_times_s.clear()
        self._loop_times_s.clear()

    def facts(self) -> dict[str, Any]:
        steps_s = sorted(self._step_times_s)
        return {
            "step_time_s": statistics.median(steps_s),
            "step_time_mean_s": statistics.mean(steps_s),
            "step_time_p95_s": steps_s[int(0.95 * len(steps_s))],
            "data_wait_mean_s": statistics.mean(self._wait_times_s),
            "loop_time_s": statistics.median(self._loop_times_s),
        }

    def _pin_supply(self) -> None:
        """Keep descendants off the trainer's core."""
        others = set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)
        if self.config["pin"] and others:
            for process in harness.descendants(os.getpid()):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, others)


class Cached(_Loop):
    def batches(self) -> Iterator[Any]:
        return itertools.repeat(self.local()[0])


class Hetero(_Loop, ready_feeds.Hetero):
    pass


class TorchWorkers(_Loop, ready_feeds.TorchWorkers):
    pass


COMPETITORS = {"cached": Cached, "hetero": Hetero, "torch": TorchWorkers}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison and write its table."""
    parser = harness.parser(__doc__, seconds=2.5, short_seconds=1.0)
    parser.add_argument("--rates", type=int, nargs="+", help="MB/s")
    parser.add_argument("--steps", nargs="+", choices=sorted(STEPS), help="default: all")
    parser.add_argument("--pin", action="store_true", help="the trainer process on one core, its supply on the others")
    args = parser.parse_args(argv)
    plan = harness.plan("interference-pinned" if args.pin else "interference", parser, args, neutral={"pin"})
    units = {step: calibrate(step) for step in args.steps or sorted(STEPS)}
    trials = [
        Trial(
            competitor=name,
            group=f"{step} step, {rate:,} MB/s",
            config={
                "step": step,
                "num_units": num_units,
                "rate_mb_s": rate,
                "nbytes": int(rate * 1e6 * PERIOD_S),
                "num_endpoints": 1,
                "pin": args.pin,
            },
            start_s=6.0 if name == "hetero" else 4.0,
        )
        for step, num_units in units.items()
        for rate in plan.choose(args.rates, full=RATES_MB_S, short=SHORT_RATES_MB_S)
        for name in args.only or COMPETITORS
    ]
    rows = plan.compare(__file__, trials, warmup_batches=6, fresh=False)
    title = "What receiving costs the training loop"
    plan.write(rows, harness.report(title, rows, COLUMNS, figures, ratio_metric="step_time_s"))
    return 0


def figures(rows: Sequence[harness.Row]) -> list[str]:
    """Return lines about the step time: relative to the step alone, and to the step beside a torch worker."""
    lines = [
        f"- step beside {name} / step alone: {harness.ratio(rows, name, 'cached', 'step_time_s'):.3f}"
        for name in ("hetero", "torch")
    ]
    step = harness.ratio(rows, "hetero", "torch", "step_time_s")
    lines.append(harness.target("step beside hetero / step beside a torch worker", step, 1.0, at_most=True))
    loop = harness.ratio(rows, "hetero", "torch", "loop_time_s")
    lines.append(f"- loop fed by hetero / loop fed by a torch worker: {loop:.3f}")
    wanted = rows[0].trial.config["rate_mb_s"] / 1e3
    lines += [
        f"- {row.trial.name} delivered {row.median('gb_per_s') / wanted:.0%} of the rate: not the same bytes"
        for row in rows
        if row.runs and row.median("gb_per_s") < REACHED * wanted
    ]
    return lines


if __name__ == "__main__":
    harness.dispatch(COMPETITORS, {"endpoints": served.endpoints})
    sys.exit(main())
