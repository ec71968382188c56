"""Does `--trainer-endpoints auto` cost no more than the better of two placements, and does it settle soon?

Question: on a given cluster, what does a step cost with the number of trainer endpoints that hetero chooses? It is
compared with all preprocessing on the trainer hosts, and with all of it on the data hosts.

Method: six clusters run as `hetero simulate` runs them, with the real launcher, ranks, endpoints and data plane. vCPUs
are emulated, and the compute of a step is a wait. In the cell *contention* the wait grows with the endpoints on the
host. In each round every cell runs three times: all-local (no data group, every vCPU of the trainer host preprocesses),
all-remote (`--trainer-endpoints 0`) and auto. The cluster is given. USD per step are its whole price per hour times the
step time, whichever hosts preprocess, so their ratio is that of the step times. The table has USD if the prices are
known. The first 200 steps of auto and the first 40 of the others are left out. The table shows medians over the rounds,
and the last step that changed the number of endpoints.

    python benchmarks/bench_auto_hybrid.py
    python benchmarks/bench_auto_hybrid.py --price ml.c5.2xlarge=USD --price ml.c5.xlarge=USD --price ml.c5.4xlarge=USD
    python benchmarks/bench_auto_hybrid.py --runs 1 --only small-group mix

Results, with hardware and versions, go to ``benchmarks/results/``.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import HERE, RESULTS, call, environment, save, say, target

from hetero.pricing import cost
from hetero.report import load_report

BATCH_SIZE = 8
SETTLED_STEPS = 200
NUM_STEPS = 300
"""Measured steps of each run."""
WARMUP_STEPS = 40
"""Of the fixed placements."""
MODES = ("all-local", "all-remote", "auto")
RATIO = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One pipeline on one cluster."""

    name: str
    data_group: str
    batch_s: float
    """Seconds that a batch costs one vCPU."""
    best: str
    """Which placement arithmetic calls the best one."""
    trainer_group: str = "ml.p3.2xlarge:1"
    step_s: float = 0.05
    slowdown: float = 0.0
    """How much longer a step takes if every vCPU of its host preprocesses."""


CELLS = (
    Cell(name="accelerator-bound", data_group="ml.c5.4xlarge:1", batch_s=0.4, best="all-remote"),
    Cell(name="small-group", data_group="ml.c5.xlarge:1", batch_s=0.36, best="all-local"),
    Cell(name="mix", data_group="ml.c5.2xlarge:1", batch_s=0.8, best="a mix"),
    Cell(name="needs-every-vcpu", data_group="ml.c5.xlarge:1", batch_s=1.0, best="a mix"),
    Cell(name="contention", data_group="ml.c5.2xlarge:1", batch_s=0.44, best="all-remote", slowdown=2.0),
    Cell(
        name="two-trainer-hosts",
        data_group="ml.c5.2xlarge:1",
        trainer_group="ml.p3.2xlarge:2",
        batch_s=0.48,
        best="a mix",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run showed."""

    step_s: float
    hourly_usd: float | None
    last_change: int
    """Step of the last change of the number of endpoints, 0 without one."""
    decisions: tuple[str, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells and print their table."""
    args = parse_arguments(argv)
    cells = [cell for cell in CELLS if cell.name in (args.only or [cell.name])]
    facts = environment()
    found: dict[str, dict[str, list[Outcome]]] = {cell.name: {mode: [] for mode in MODES} for cell in cells}
    for run_index in range(args.runs):
        for cell in cells:
            for mode in MODES:
                say(f"run {run_index + 1}/{args.runs}: {cell.name}, {mode}")
                outcome = run(cell, mode, args.price)
                say("\n  ".join([f"  {1000 * outcome.step_s:.1f} ms", *outcome.decisions]))
                found[cell.name][mode].append(outcome)
    text = render(cells, found)
    print(text)
    content = {
        "cells": [dataclasses.asdict(cell) for cell in cells],
        "runs": {
            name: {mode: [dataclasses.asdict(each) for each in runs] for mode, runs in modes.items()}
            for name, modes in found.items()
        },
        "basis": "simulated",
        **facts,
    }
    save(args.results / ("auto_hybrid-partial" if args.only or args.runs < 3 else "auto_hybrid"), content, text)
    return 0


def command(cell: Cell, mode: str, folder: str, prices: Sequence[str] = ()) -> list[str]:
    """Return the arguments of `hetero` for one job. Its report goes to ``folder``."""
    warmup = SETTLED_STEPS if mode == "auto" else WARMUP_STEPS
    groups = [f"dnn_group={cell.trainer_group}"]
    if mode != "all-local":
        groups.insert(0, f"data_group={cell.data_group}")
    return [
        *("simulate", "--output-dir", folder, "--price-profile", "seed-2022", "--nproc-per-node", "1"),
        *(flag for group in groups for flag in ("--group", group)),
        *(flag for price in prices for flag in ("--price", price)),
        *("--trainer-endpoints", "auto" if mode == "auto" else "0", "--purity-checks", "0"),
        *("--emulate-sample-seconds", repr(cell.batch_s / BATCH_SIZE), "--warmup-steps", str(warmup)),
        *(str(HERE / "scripts" / "train_hybrid.py"), "--"),
        # One more step: a step ends with the delivery of the next batch.
        *("--batch-size", str(BATCH_SIZE), "--steps", str(warmup + NUM_STEPS + 1)),
        *("--step-s", repr(cell.step_s), "--slowdown", repr(cell.slowdown)),
    ]


def run(cell: Cell, mode: str, prices: Sequence[str] = ()) -> Outcome:
    """Run one job."""
    with tempfile.TemporaryDirectory(prefix="auto-hybrid-") as folder:
        call([sys.executable, "-m", "hetero.cli", *command(cell, mode, folder, prices)], f"{cell.name}, {mode}")
        report: Any = load_report(folder)
    changes = [match for text in report.run.decisions if (match := re.match(r"step (\d+): from ", text))]
    return Outcome(
        step_s=report.headline.step_time_mean.value,
        hourly_usd=None if report.cost.hourly is None else report.cost.hourly.value,
        last_change=max((int(match[1]) for match in changes), default=0),
        decisions=report.run.decisions,
    )


def render(cells: Sequence[Cell], found: dict[str, dict[str, list[Outcome]]]) -> str:
    """Return the table, and each figure with its bound."""
    lines = [
        "# The number of endpoints on trainer hosts, chosen by hetero",
        "",
        "Medians of the step time in ms and, in brackets, of USD per 1,000 steps on the cluster.",
        "",
        "| cell | hosts | best by arithmetic | all-local | all-remote | auto | auto / better | last change at step |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    figures = []
    for cell in cells:
        steps_s = {mode: statistics.median(each.step_s for each in found[cell.name][mode]) for mode in MODES}
        hourly_usd = found[cell.name]["auto"][0].hourly_usd
        ratio = steps_s["auto"] / min(steps_s["all-local"], steps_s["all-remote"])
        last_change = max(each.last_change for each in found[cell.name]["auto"])
        shown = [describe(steps_s[mode], hourly_usd) for mode in MODES]
        hosts = f"{cell.trainer_group} + {cell.data_group}"
        lines.append(f"| {cell.name} | {hosts} | {cell.best} | {' | '.join(shown)} | {ratio:.3f} | {last_change} |")
        figures.append(target(f"{cell.name}: USD per step, auto / the better", ratio, RATIO, at_most=True))
        figures.append(target(f"{cell.name}: last change at step", float(last_change), SETTLED_STEPS, at_most=True))
    decided = [f"- {cell.name}: {text}" for cell in cells for text in found[cell.name]["auto"][0].decisions]
    return "\n".join([*lines, "", *figures, "", "Decisions of the first run:", "", *decided, ""])


def describe(step_s: float, hourly_usd: float | None) -> str:
    """Return the step time, and the cost of 1,000 steps."""
    usd = "-" if hourly_usd is None else f"{cost.cost_per_1k_steps_usd(hourly_usd, step_s):.4f}"
    return f"{1000 * step_s:.1f} ({usd})"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compare placements by simulation.", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=3, help="rounds (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=[cell.name for cell in CELLS], help="cells to run")
    parser.add_argument("--price", action="append", default=[], metavar="TYPE=USD", help="per hour; repeat it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
