"""Draw the committed results, ``results/*.json`` to ``results/*.png``; takes no arguments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).parent / "results"

# Result, metric, axis label, factor.
CHARTS = (
    ("transport", "gb_per_s", "GB/s", 1.0),
    ("transport", "trainer_cpu_s_per_gb", "CPU-s per GB, trainer process", 1.0),
    ("pipelines", "samples_per_s", "samples/s", 1.0),
    ("scaling", "share", "delivered / ideal supply", 1.0),
    ("interference", "slowdown", "step time / undisturbed", 1.0),
    ("gpu_feed", "samples_per_s", "images/s", 1.0),
)


def draw(rows: Sequence[Mapping[str, Any]], metric: str, label: str, factor: float, path: Path) -> None:
    """Draw one panel per group, a bar per competitor: median, and a line from lowest to highest run."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure, axes = plt.subplots(1, len(groups), figsize=(1.6 + 2.6 * len(groups), 3.4), squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        members = [row for row in rows if row["group"] == group and row["runs"]]
        for position, row in enumerate(members):
            values = [factor * _value(run, metric) for run in row["runs"]]
            median = factor * row["medians"][metric]
            colour = "tab:blue" if row["competitor"] == "hetero" else "tab:gray"
            error = [[median - min(values)], [max(values) - median]]
            axis.barh(position, median, xerr=error, color=colour, height=0.7)
        axis.set_yticks(range(len(members)), [row["name"] for row in members], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(group, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.set_xlabel(label, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _value(run: Mapping[str, Any], metric: str) -> float:
    """Return a metric of one run, derived as the harness derives it."""
    if metric in run["facts"]:
        return float(run["facts"][metric])
    derived = {
        "gb_per_s": run["num_bytes"] / run["seconds"] / 1e9,
        "samples_per_s": run["num_samples"] / run["seconds"],
        "trainer_cpu_s_per_gb": run["trainer_cpu_s"] / max(1e-9, run["num_bytes"] / 1e9),
    }
    return float(derived[metric])


def main() -> int:
    """Draw what there are results for."""
    for name, metric, label, factor in CHARTS:
        path = RESULTS / f"{name}.json"
        if path.is_file():
            rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
            target = RESULTS / f"{name}-{metric}.png"
            draw(rows, metric, label, factor, target)
            print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
