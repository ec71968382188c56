"""Draw results: ``results/NAME.json`` to ``results/NAME.png``. ``--results`` names another folder.

Points and bars are medians, the thin lines reach from the lowest to the highest run, or ratio within a round.

    python benchmarks/plots.py
    python benchmarks/plots.py --results benchmarks/results/short
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from harness import RESULTS, Row, Run, Trial
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_BLUE, _ORANGE, _PEACH, _GREY, _BLACK = "#0b5fa5", "#c8500a", "#e8a070", "#999999", "#444444"
_GREEN, _MINT, _PURPLE, _OCHRE = "#2e8b57", "#8fc8a6", "#7a4fa3", "#b58900"
_COLOURS = {
    "hetero": _BLUE,
    "torch": _ORANGE,
    "torch-worker": _ORANGE,  # what results called torch before
    "torch-spawn": _PEACH,
    "raw-tcp": _GREY,
    "grpc-raw": _GREEN,
    "grpc-raw-malloc": _MINT,
    "grpc-protobuf": _PURPLE,
    "tf.data-service": _OCHRE,
    "tf": _OCHRE,
    "ray": _PURPLE,
    "rpc": _GREEN,
    "sample": _GREY,
    "tf-local": _ORANGE,
    "tf-by-hand": _OCHRE,
    "tf-launcher": _GREEN,
    "from_dataset": _BLUE,
    "none": _BLACK,
    "lz4": _BLUE,
    "zstd": _ORANGE,
}
_DPI = 110
_UNLIMITED_X = 2.0
"""Where a network without a limit stands, in multiples of the fastest that has one."""


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a result file that have runs."""
    return [
        Row(
            trial=Trial(
                competitor=row["competitor"],
                config=row["config"],
                group=row["group"],
                title=row["name"],
                basis=row["basis"],
            ),
            runs=tuple(Run(**run) for run in row["runs"]),
        )
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
        if row["runs"]
    ]


def by_competitor(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each competitor, in the order of the file."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.trial.competitor, []).append(row)
    return found


def relative(rows: Sequence[Row], reference: str, metric: str) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return median, lowest and highest of each row's ratios to its group's reference.

    Returns:
        By group and competitor. Groups without the reference are left out.
    """
    bases = {row.trial.group: row for row in rows if row.trial.competitor == reference}
    found = {}
    for row in rows:
        if row.trial.group in bases:
            ratios = row.ratios(bases[row.trial.group], metric)
            found[row.trial.group, row.trial.competitor] = (statistics.median(ratios), min(ratios), max(ratios))
    return found


def _line(axes: Axes, places: Sequence[float], rows: Sequence[Row], metric: str, name: str) -> None:
    medians = [row.median(metric) for row in rows]
    below = [middle - min(row.values(metric)) for middle, row in zip(medians, rows, strict=True)]
    above = [max(row.values(metric)) - middle for middle, row in zip(medians, rows, strict=True)]
    axes.errorbar(
        places,
        medians,
        yerr=[below, above],
        label=name,
        color=_COLOURS.get(name),
        marker="o",
        markersize=4,
        linewidth=2.0 if name == "hetero" else 1.2,
        elinewidth=0.8,
    )


def draw_transport(rows: Sequence[Row]) -> Figure:
    """Draw throughput and CPU over the size of a batch, one endpoint."""
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.8))
    single = [row for row in rows if row.trial.config["num_endpoints"] == 1]
    for axes, metric, label in (
        (panels[0], "gb_per_s", "GB/s"),
        (panels[1], "trainer_cpu_s_per_gb", "CPU-s per GB, trainer process"),
    ):
        for name, members in by_competitor(single).items():
            _line(axes, [row.trial.config["nbytes"] / 1e6 for row in members], members, metric, name)
        axes.set(xscale="log", yscale="log", xlabel="MB per batch", ylabel=label)
        axes.grid(alpha=0.3)
    panels[1].legend(fontsize=7)
    figure.suptitle("Ready-made batches from one endpoint", fontsize=10)
    return figure


def draw_pipelines(rows: Sequence[Row]) -> Figure:
    """Draw samples per second over those of the local loader, a group of bars per pipeline.

    ``alone`` is left out, because its batches reach no trainer.
    """
    found = relative([row for row in rows if row.trial.competitor != "alone"], "torch", "samples_per_s")
    groups = list(dict.fromkeys(group for group, _ in found))
    names = [name for name in by_competitor(rows) if any((group, name) in found for group in groups)]
    names.sort(key=lambda name: name != "hetero")
    figure, axes = plt.subplots(figsize=(9.5, 3.8))
    present = {group: [name for name in names if (group, name) in found] for group in groups}
    width = 0.85 / max(map(len, present.values()))
    for name in names:
        members = [group for group in groups if name in present[group]]
        places = [
            groups.index(group) + width * (present[group].index(name) - (len(present[group]) - 1) / 2)
            for group in members
        ]
        values = [found[group, name] for group in members]
        error = [[middle - low for middle, low, _ in values], [high - middle for middle, _, high in values]]
        heights = [middle for middle, _, _ in values]
        axes.bar(
            places, heights, width * 0.92, yerr=error, label=name, color=_COLOURS.get(name), error_kw={"linewidth": 0.8}
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set(ylabel="samples/s over local torch's", title="Six pipelines, two preprocessing processes each")
    axes.title.set_fontsize(10)
    axes.legend(fontsize=7, ncols=len(names), loc="upper center", bbox_to_anchor=(0.5, -0.1), frameon=False)
    return figure


def draw_scaling(rows: Sequence[Row]) -> Figure:
    """Draw the share of ideal supply that is delivered, a bar per shape."""
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for index, row in enumerate(rows):
        values = row.values("share")
        middle = row.median("share")
        error = [[middle - min(values)], [max(values) - middle]]
        axes.bar(index, middle, 0.6, yerr=error, color=_COLOURS["hetero"], error_kw={"linewidth": 0.8})
    shapes = [f"{row.trial.config['num_hosts']} x {row.trial.config['num_ranks']}" for row in rows]
    axes.set_xticks(range(len(rows)), shapes)
    axes.axhline(0.95, color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="data hosts x ranks", ylabel="delivered / ideal supply", ylim=(0, 1.2))
    axes.set_title("Scaling, emulated samples (dashed: 0.95 wanted)", fontsize=10)
    return figure


def draw_interference(rows: Sequence[Row]) -> Figure:
    """Draw the step's time over that of the step alone, a panel per kind of step."""
    steps = list(dict.fromkeys(row.trial.config["step"] for row in rows))
    figure, panels = plt.subplots(1, len(steps), figsize=(4.6 * len(steps), 3.4), squeeze=False, sharey=True)
    for axes, step in zip(panels[0], steps, strict=True):
        members = [row for row in rows if row.trial.config["step"] == step]
        found = relative(members, "cached", "step_time_s")
        rates = {row.trial.group: row.trial.config["rate_mb_s"] for row in members}
        for name in dict.fromkeys(name for _, name in found if name != "cached"):
            points = [(rates[group], *value) for (group, other), value in found.items() if other == name]
            axes.errorbar(
                [rate for rate, *_ in points],
                [middle for _, middle, _, _ in points],
                yerr=[[middle - low for _, middle, low, _ in points], [high - middle for _, middle, _, high in points]],
                label=name,
                color=_COLOURS[name],
                marker="o",
                markersize=4,
                elinewidth=0.8,
            )
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xscale="log", xlabel="MB/s asked for", title=f"{step}-bound step")
        axes.set_xticks(sorted(set(rates.values())), [f"{rate:,}" for rate in sorted(set(rates.values()))])
        axes.minorticks_off()
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("step time / step alone")
    panels[0][0].legend(fontsize=8)
    return figure


def draw_compression(rows: Sequence[Row]) -> Figure:
    """Draw batches per second over the network's bandwidth, a panel per kind of data."""
    kinds = list(dict.fromkeys(row.trial.config["kind"] for row in rows))
    figure, panels = plt.subplots(1, len(kinds), figsize=(4.6 * len(kinds), 3.4), squeeze=False)
    rates = sorted({row.trial.config["rate_mb_s"] for row in rows} - {0})
    free = _UNLIMITED_X * max(rates, default=1)
    ticks = [*rates, *([free] if any(row.trial.config["rate_mb_s"] == 0 for row in rows) else [])]
    for axes, kind in zip(panels[0], kinds, strict=True):
        for name, members in by_competitor(row for row in rows if row.trial.config["kind"] == kind).items():
            places = [row.trial.config["rate_mb_s"] or free for row in members]
            _line(axes, places, members, "batches_per_s", name)
        axes.set(xscale="log", yscale="log", xlabel="bandwidth, MB/s", title=kind)
        axes.set_xticks(ticks, [*(f"{rate:g}" for rate in rates), "no limit"][: len(ticks)], fontsize=7)
        axes.minorticks_off()
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("batches/s")
    panels[0][0].legend(fontsize=8)
    return figure


def draw_tf_feed(rows: Sequence[Row]) -> Figure:
    """Draw samples per second, and the CPU of both sides on top of each other, a bar per competitor."""
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.4))
    names = [row.trial.name for row in rows]
    for index, row in enumerate(rows):
        values, middle = row.values("samples_per_s"), row.median("samples_per_s")
        error = [[middle - min(values)], [max(values) - middle]]
        panels[0].bar(index, middle, 0.6, yerr=error, color=_COLOURS.get(row.trial.name), error_kw={"linewidth": 0.8})
    trainer = [row.median("trainer_cpu_s_per_gb") for row in rows]
    supply = [row.median("supply_cpu_s_per_gb") for row in rows]
    panels[1].bar(range(len(rows)), trainer, 0.6, color=_BLACK, label="trainer process")
    panels[1].bar(range(len(rows)), supply, 0.6, bottom=trainer, color=_GREY, label="supply")
    panels[1].legend(fontsize=8)
    for axes, label in zip(panels, ("samples/s", "CPU-s per GB"), strict=True):
        axes.set_xticks(range(len(rows)), names, fontsize=8)
        axes.set(ylabel=label)
    figure.suptitle("A TensorFlow trainer fed with photographs, two preprocessing threads or processes", fontsize=10)
    return figure


CHARTS: Mapping[str, Callable[[Sequence[Row]], Figure]] = {
    "transport": draw_transport,
    "pipelines": draw_pipelines,
    "scaling": draw_scaling,
    "interference": draw_interference,
    "interference-pinned": draw_interference,
    "compression": draw_compression,
    "tf_feed": draw_tf_feed,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what there are results for."""
    parser = argparse.ArgumentParser(description="Draw results.", allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder (results/)")
    folder: Any = parser.parse_args(argv).results
    for name, draw in CHARTS.items():
        for path in (folder / f"{name}.json", folder / f"{name}-partial.json"):
            rows = read_rows(path) if path.is_file() else []
            if rows:
                figure = draw(rows)
                figure.savefig(path.with_suffix(".png"), dpi=_DPI, bbox_inches="tight")
                plt.close(figure)
                print(path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
