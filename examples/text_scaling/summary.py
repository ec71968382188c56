"""Print the quality of a study's runs as a table, with 95 % intervals.

    python examples/text_scaling/summary.py studies/text-scaling/runs.csv

A row is a way to train, a column is a number of samples. An interval covers the differences between replicates, which
have other weights, another order and other dropout. All runs of a size have the same reviews, so the intervals do not
cover what other reviews would change. The columns "minus 1 rank" have the differences of pairs: each run is paired with
the run on one rank that has the same samples, seed and base learning rate. Sizes are not taken together, because a
change may raise the metric at one size and lower it at another.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.decide.studies.statistics import interval_of

Row = Mapping[str, str]
Setting = tuple[int, int, float, int]
"""Ranks, batch per rank, learning rate, steps."""
COLUMNS = ("state", "ranks", "batch_per_device", "learning_rate", "steps", "samples", "seed", "wall_s")
"""Columns of a study's runs.csv that the table needs, besides the metric."""


def read_runs(path: Path, metric: str) -> list[Row]:
    """Return the finished runs of a study that logged a metric.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a column is missing, or the run does not exist.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}, expected the runs.csv of a study of train.py")
        found = [row for row in rows if row["state"] == "finished" and row.get(metric)]
    if not found:
        raise ValueError(f"{path} has no finished run with {metric}, expected the runs.csv of a study of train.py")
    return found


def setting_of(row: Row) -> Setting:
    """Return the way to train of a run."""
    return int(row["ranks"]), int(row["batch_per_device"]), float(row["learning_rate"]), int(row["steps"])


def baseline_key(row: Row) -> tuple[str, str, float]:
    """Return what a run shares with its run on one rank."""
    return row["samples"], row["seed"], float(row.get("base_learning_rate") or row["learning_rate"])


def differences(runs: Sequence[Row], metric: str) -> dict[tuple[Setting, int], list[float]]:
    """Return metric minus metric on one rank, by setting and samples, of each run that has such a run on one rank.

    Raises:
        ValueError: If a run could be paired with two runs on one rank.
    """
    on_one_rank: dict[tuple[str, str, float], float] = {}
    for row in runs:
        key = baseline_key(row)
        if row["ranks"] == "1" and key in on_one_rank:
            samples, seed, rate = key
            raise ValueError(
                f"two runs on one rank have {samples} samples, seed {seed} and base learning rate {rate:g}, expected "
                "one, because other runs are compared with it; remove one of them from the file"
            )
        if row["ranks"] == "1":
            on_one_rank[key] = float(row[metric])
    found: dict[tuple[Setting, int], list[float]] = {}
    for row in runs:
        baseline = on_one_rank.get(baseline_key(row))
        if row["ranks"] != "1" and baseline is not None:
            found.setdefault((setting_of(row), int(row["samples"])), []).append(float(row[metric]) - baseline)
    return found


def interval_text(values: Sequence[float], *, signed: bool = False) -> str:
    """Return mean and half width of the 95 % interval, such as ``0.823 ± 0.012``. Without the width for one value."""
    interval = interval_of(values)
    if interval is None:
        return ""
    mean = f"{interval.mean:+.3f}" if signed else f"{interval.mean:.3f}"
    return mean if interval.high is None else f"{mean} ± {interval.high - interval.mean:.3f}"


def table(runs: Sequence[Row], metric: str) -> str:
    """Return the table as Markdown."""
    sizes = sorted({int(row["samples"]) for row in runs})
    header = ["ranks x batch", "global batch", "learning rate", "steps"]
    header += [f"{metric}, {size:,} samples" for size in sizes]
    header += [f"minus 1 rank, {size:,}" for size in sizes]
    lines = [header, ["---:"] * len(header)]
    compared = differences(runs, metric)
    # First those with the smallest global batch, however many ranks share it.
    for setting in sorted({setting_of(row) for row in runs}, key=lambda each: (each[0] * each[1], each)):
        ranks, batch, rate, steps = setting
        cells = [f"{ranks} x {batch}", str(ranks * batch), f"{rate:.2g}", str(steps)]
        for size in sizes:
            of_size = [row for row in runs if setting_of(row) == setting and int(row["samples"]) == size]
            cells.append(interval_text([float(row[metric]) for row in of_size]))
        cells += [interval_text(compared.get((setting, size), []), signed=True) for size in sizes]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description="Print the quality of a study's runs.", allow_abbrev=False)
    parser.add_argument("runs", type=Path, metavar="RUNS.csv", help="result of hetero study")
    parser.add_argument("--metric", default="f1", help="metric that the script logged (%(default)s)")
    args = parser.parse_args(argv)
    try:
        runs = read_runs(args.runs, args.metric)
        text = table(runs, args.metric)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(text)
    wall_s = math.fsum(float(row["wall_s"]) for row in runs)
    print(f"\n{len(runs)} runs, {wall_s / 60:.0f} minutes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
