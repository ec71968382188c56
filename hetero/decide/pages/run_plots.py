"""The plots of a run's page, and of the page that compares two runs. Drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero.decide.pages.drawing import PALETTE, QUIET, Plot, bar_axes, legend, new_axes, svg_of
from hetero.documents.quantities import seconds_text
from hetero.metrics.step_series import StepSeries
from hetero.metrics.steps import StepSummary
from hetero.report.compare import Comparison
from hetero.report.model import Report

__all__ = ["ShownRun", "cost_plot", "cpu_plot", "parts_plot", "steps_plot"]

_HOST_COLOURS = PALETTE[2:]
"""Colours of hosts, which are not those of runs."""
_PARTS = {"accelerator": PALETTE[0], "compute": PALETTE[0], "real work that shows": PALETTE[4], "data wait": PALETTE[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """One run of the page."""

    name: str
    """``homogeneous`` or ``heterogeneous``, if that tells the runs apart, else ``first run`` or ``second run``."""
    report: Report
    colour: str
    steps: StepSummary | None
    """The loader that the report is about, on the rank with the longest steps. None if no rank has a step."""
    history: StepSeries
    """Steps of that loader, on that rank or on another that has a history."""


def steps_plot(runs: Sequence[ShownRun]) -> Plot | None:
    """Return step times over the time of the runs. None if no run has a history."""
    if not any(run.history.begin_s for run in runs):
        return None
    (axes,) = new_axes(is_wide=True)
    for run in runs:
        history = run.history
        times_s = [(begin + end) / 2 for begin, end in zip(history.begin_s, history.end_s, strict=True)]
        steps_ms = [1000 * (a + b) for a, b in zip(history.compute_s, history.data_wait_s, strict=True)]
        # A run without a history gets no label.
        label = run.name if times_s else None
        axes.plot(times_s, steps_ms, "o", color=run.colour, alpha=0.5, markersize=4, label=label)
    # A dotted line shows the time of an emulated accelerator, which a step takes at least.
    steps = [run.steps for run in runs if run.steps is not None]
    for step_s in sorted({each.step_wait_s for each in steps if each.step_wait_s is not None}):
        axes.axhline(1000 * step_s, color=QUIET, linewidth=1, linestyle=":")
        axes.text(1.0, 1000 * step_s, " accelerator", transform=axes.get_yaxis_transform(), va="center", color=QUIET)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of the run [s]")
    axes.set_ylabel("step time [ms]")
    legend(axes, is_outside=True)
    num_steps = max((number for run in runs for number in run.history.num_steps), default=1)
    dot = "A dot is one step" if num_steps == 1 else f"A dot is the mean of up to {num_steps} steps"
    caption = f"{dot}. Where batches come in bursts, few steps wait long."
    return Plot(title="Step time over time", caption=caption, svg=svg_of(axes), is_wide=True)


def step_parts_s(steps: StepSummary) -> dict[str, float]:
    """Return the parts of a mean step in seconds, by name.

    An emulated step takes the time of the accelerator, which it emulates by waiting. If the real work of this machine
    takes longer, the compute is longer than this time, and the difference is a part too.
    """
    # A loader without measured steps must not divide by zero.
    num_steps = max(1, steps.num_steps_measured)
    compute_s, data_wait_s = steps.compute_total_s / num_steps, steps.data_wait_total_s / num_steps
    accelerator_s = steps.step_wait_s
    # Without an emulated accelerator, the compute is one part.
    if accelerator_s is None:
        return {"compute": compute_s, "data wait": data_wait_s}
    real_work_s = max(0.0, compute_s - accelerator_s)
    return {"accelerator": compute_s - real_work_s, "real work that shows": real_work_s, "data wait": data_wait_s}


def parts_plot(runs: Sequence[ShownRun]) -> Plot | None:
    """Return where each millisecond of a step goes, as one stacked bar for each run. None without a measured step."""
    if not any(run.steps is not None and run.steps.num_steps_measured for run in runs):
        return None
    known = {run.name: run.steps for run in runs if run.steps is not None}
    axes = bar_axes(list(known), is_wide=True)
    labelled: set[str] = set()
    for row, steps in enumerate(known.values()):
        step_s = 0.0
        for name, seconds in step_parts_s(steps).items():
            # The legend has each part once.
            label = None if name in labelled or not seconds else name
            axes.barh(row, 1000 * seconds, left=1000 * step_s, height=0.6, color=_PARTS[name], label=label)
            labelled |= {name} if label else set()
            step_s += seconds
        axes.text(1000 * step_s, row, f" {seconds_text(step_s)}", va="center")
    axes.set_xlabel("milliseconds of a mean step")
    legend(axes, is_outside=True)
    is_emulated = any(steps.step_wait_s is not None for steps in known.values())
    caption = "Data wait is the time that the rank with the longest steps was blocked in next()."
    if is_emulated:
        caption += " Real work that shows is compute of this machine beyond the emulated step."
    return Plot(title="Where the time of a step goes", caption=caption, svg=svg_of(axes), is_wide=True)


def cpu_plot(run: ShownRun) -> Plot | None:
    """Return the CPU use of every host of a run over time. None if no host has a history."""
    hosts = [usage for usage in run.report.run.hosts if usage.series.begin_s]
    if not hosts:
        return None
    (axes,) = new_axes()
    roles = run.report.run.host_roles
    # There may be more hosts than colours. The caption then says how many are shown.
    for usage, colour in zip(hosts, _HOST_COLOURS, strict=False):
        times_s = [(begin + end) / 2 for begin, end in zip(usage.series.begin_s, usage.series.end_s, strict=True)]
        label = f"{usage.host} ({roles[usage.host]})" if usage.host in roles else usage.host
        axes.plot(times_s, [value / 100 for value in usage.series.cpu_percent], color=colour, label=label)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of the run, since the start of each host [s]")
    num_cpus = max(usage.num_cpus for usage in hosts)
    axes.set_ylabel(f"CPUs busy, of {num_cpus}")
    legend(axes)
    # Simulated hosts share a machine, so each of them is measured as a tree of processes and not as a machine.
    is_simulated = any(usage.scope == "tree" for usage in hosts)
    caption = (
        f"All hosts share the {num_cpus} CPUs of one machine. Emulated vCPUs do not show here." if is_simulated else ""
    )
    if len(hosts) > len(_HOST_COLOURS):
        caption = f"{caption} The first {len(_HOST_COLOURS)} of {len(hosts)} hosts.".strip()
    return Plot(title=f"CPU use of the hosts, {run.name}", caption=caption, svg=svg_of(axes))


def cost_plot(comparison: Comparison, runs: Sequence[ShownRun]) -> Plot | None:
    """Return the cost of the same work in both runs, with their bounds. None without a saving."""
    break_even = comparison.break_even_speedup
    if comparison.saving is None or break_even is None:
        return None
    axes = bar_axes([run.name for run in runs])
    has_bounds = False
    for row, run in enumerate(runs):
        cost, headline = run.report.cost, run.report.headline
        usd = cost.per_1k_steps if comparison.per == "step" else cost.per_million_samples
        times_s = None if headline is None else headline.step_time_range_s
        if usd is None or times_s is None:
            return None
        axes.barh(row, usd.value, height=0.6, color=run.colour)
        axes.text(usd.value, row, f" {usd.value:.4g}", va="center")
        least_s, most_s = times_s
        # The step time is a range if other work of the machine made steps longer.
        if least_s < most_s:
            has_bounds = True
            # The cost grows with the step time, so its bounds have the same ratio.
            axes.plot([usd.value * least_s / most_s, usd.value], [row, row], color="#000000", linewidth=3)
    axes.set_xlabel(f"USD for {'1,000 steps' if comparison.per == 'step' else 'a million samples'}")
    caption = f"The second run costs as much as the first at {break_even.value:.2f} times its pace"
    step = None if comparison.baseline.headline is None else comparison.baseline.headline.step_time_mean
    if comparison.per == "step" and step is not None:
        caption += f", which is a step of {seconds_text(step.value / break_even.value)}"
    caption += "."
    if has_bounds:
        caption += " The black line leads to a lower bound without this machine's other work."
    return Plot(title="Cost of the same work", caption=caption, svg=svg_of(axes))
