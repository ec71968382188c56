"""The plots of a run's page, and of the page that compares two runs. Drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.metrics.steps import StepSummary
from hetero.pages.drawing import PALETTE, Plot, new_figure, svg_of
from hetero.report.compare import Comparison
from hetero.report.model import Report
from hetero.system.quantities import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["ShownRun", "break_even_plot", "cpu_plot", "parts_plot", "steps_plot"]

_WIDTH_IN = 11.0
_WINDOW = 0.3
"""Length of the moving mean, as a share of a run's history. A step waits for data or does not, so single steps jump."""
_MAX_EVENT_TEXTS = 12
"""Events of a run that the plot of steps names. More would cover each other; the page lists all."""
_PARTS = {"accelerator": PALETTE[0], "compute": PALETTE[0], "real work that shows": PALETTE[4], "data wait": PALETTE[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One run of the page."""

    name: str
    """``homogeneous`` or ``heterogeneous``, if that tells the runs apart, else ``first run`` or ``second run``."""
    report: Report
    colour: str
    steps: StepSummary
    """The loader that the report is about, on the rank with the longest steps."""


def steps_plot(runs: Sequence[ShownRun]) -> Plot:
    """Return step times over the time of the runs, with the events of the runs."""
    figure = new_figure(_WIDTH_IN, 3.6)
    axes = figure.subplots()
    for run in runs:
        _draw_steps(axes, run)
    waits_s = sorted({run.steps.step_wait_s for run in runs if run.steps.step_wait_s is not None})
    for wait_s in waits_s:
        axes.axhline(1000 * wait_s, color="0.5", linewidth=1, linestyle=":")
        axes.text(1.0, 1000 * wait_s, " accelerator", transform=axes.get_yaxis_transform(), va="center", color="0.5")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time since the first step [s]")
    axes.set_ylabel("step time [ms]")
    _finish(axes)
    first_steps = runs[0].steps.history.num_steps
    dot = "A dot is one step." if set(first_steps) <= {1} else f"A dot is the mean of {first_steps[0]} steps."
    caption = f"{dot} The line is the moving mean. A vertical line is an event."
    return Plot(title="Step time over time", caption=caption, svg=svg_of(figure))


def _draw_steps(axes: Axes, run: ShownRun) -> None:
    history = run.steps.history
    if not history.begin_s:
        return
    first_s, last_s = history.begin_s[0], history.end_s[-1]
    times_s = [(begin + end) / 2 - first_s for begin, end in zip(history.begin_s, history.end_s, strict=True)]
    steps_ms = [1000 * (a + b) for a, b in zip(history.compute_s, history.data_wait_s, strict=True)]
    axes.plot(times_s, steps_ms, "o", color=run.colour, alpha=0.35, markersize=4)
    axes.plot(times_s, _moving_mean(steps_ms), color=run.colour, linewidth=2, label=run.name)
    for number, event in enumerate(event for event in run.report.run.timeline if first_s <= event.at_s <= last_s):
        axes.axvline(event.at_s - first_s, color=run.colour, linewidth=1, linestyle="--")
        if number < _MAX_EVENT_TEXTS:
            text = f"{event.host}: {event.what} "
            drawn = axes.text(event.at_s - first_s, 0.98, text, color=run.colour, rotation=90, va="top", ha="right")
            drawn.set(transform=axes.get_xaxis_transform(), fontsize="small")


def _moving_mean(values: Sequence[float]) -> list[float]:
    half = max(1, round(_WINDOW * len(values) / 2))
    windows = (values[max(0, at - half) : at + half + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def step_parts_s(steps: StepSummary) -> dict[str, float]:
    """Return the parts of a mean step in seconds, by name."""
    number = max(1, steps.num_steps_measured)
    compute_s, wait_s = steps.compute_total_s / number, steps.data_wait_total_s / number
    if steps.step_wait_s is None:
        return {"compute": compute_s, "data wait": wait_s}
    shown_s = max(0.0, compute_s - steps.step_wait_s)
    return {"accelerator": compute_s - shown_s, "real work that shows": shown_s, "data wait": wait_s}


def parts_plot(runs: Sequence[ShownRun]) -> Plot:
    """Return where each millisecond of a step goes, as one stacked bar for each run."""
    figure = new_figure(_WIDTH_IN, 1.0 + 0.6 * len(runs))
    axes = figure.subplots()
    labelled: set[str] = set()
    for row, run in enumerate(runs):
        left = 0.0
        for name, seconds in step_parts_s(run.steps).items():
            label = None if name in labelled or not seconds else name
            axes.barh(row, 1000 * seconds, left=left, height=0.6, color=_PARTS[name], label=label)
            labelled |= {name} if label else set()
            left += 1000 * seconds
        axes.text(left, row, f" {seconds_text(left / 1000)}", va="center")
    axes.set_yticks(range(len(runs)), [run.name for run in runs])
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("milliseconds of a mean step")
    _finish(axes, has_legend=False)
    figure.legend(loc="outside upper right", frameon=False, ncols=3, fontsize="small")
    has_real_work = any(run.steps.step_wait_s is not None for run in runs)
    caption = "Data wait is the time that the rank with the longest steps was blocked in next()."
    if has_real_work:
        caption += " Real work that shows is compute of this machine beyond the emulated step."
    return Plot(title="Where the time of a step goes", caption=caption, svg=svg_of(figure))


def cpu_plot(run: ShownRun) -> Plot | None:
    """Return the CPU use of every host of a run over time. None if no host has a history."""
    hosts = [usage for usage in run.report.run.hosts if usage.series.begin_s]
    if not hosts:
        return None
    figure = new_figure(_WIDTH_IN / 2, 2.8)
    axes = figure.subplots()
    for usage, colour in zip(hosts, PALETTE, strict=False):
        times_s = [(begin + end) / 2 for begin, end in zip(usage.series.begin_s, usage.series.end_s, strict=True)]
        axes.plot(times_s, [value / 100 for value in usage.series.cpu_percent], color=colour, label=usage.host)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time since the host's start [s]")
    axes.set_ylabel("CPUs busy")
    _finish(axes)
    caption = f"The first {len(PALETTE)} of {len(hosts)} hosts." if len(hosts) > len(PALETTE) else ""
    if any(usage.scope == "tree" for usage in hosts):
        caption = f"Real CPUs of the one machine that all hosts share. {caption}".strip()
    return Plot(title=f"CPU use of the hosts, {run.name}", caption=caption, svg=svg_of(figure))


def break_even_plot(comparison: Comparison) -> Plot | None:
    """Return the saving against the speed-up, with the break-even and the runs. None without a saving."""
    saving, speedup, even = comparison.saving, comparison.speedup, comparison.break_even_speedup
    if saving is None or speedup is None or even is None:
        return None
    figure = new_figure(_WIDTH_IN / 2, 2.8)
    axes = figure.subplots()

    def draw_curve(start: float, end: float, **style: Any) -> None:
        paces = [start + (end - start) * at / 100 for at in range(101)]
        axes.plot(paces, [100 * (1 - even.value / pace) for pace in paces], **style)

    draw_curve(0.8 * min(speedup.low, even.value), 1.25 * max(speedup.high, even.value), color="0.5", linewidth=1.5)
    axes.axhline(0, color="0.5", linewidth=1)
    axes.axvline(even.value, color="0.5", linewidth=1, linestyle=":")
    axes.text(even.value, 0.02, f" break-even {even.value:.2f}x", transform=axes.get_xaxis_transform(), color="0.5")
    draw_curve(speedup.low, speedup.high, color=PALETTE[2], linewidth=5, solid_capstyle="round")
    axes.plot([speedup.low], [100 * saving.low], "o", color=PALETTE[2], markersize=8, label="second run")
    axes.set_xlabel(f"pace of the second run per {comparison.per}, first run = 1")
    axes.set_ylabel("saving [%]")
    _finish(axes)
    caption = "Above the horizontal line the second run is cheaper for the same work."
    if speedup.low != speedup.high:
        caption += " The thick line has the bounds of the second run."
    return Plot(title="Saving against pace", caption=caption, svg=svg_of(figure))


def _finish(axes: Axes, *, has_legend: bool = True) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, color="0.5", alpha=0.2)
    axes.set_axisbelow(True)
    if has_legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, ncols=3, fontsize="small", loc="best")
