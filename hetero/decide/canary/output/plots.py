"""The plots of a canary forecast, drawn by matplotlib: the points with the line, and a comparison of candidates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hetero.decide.canary.model import CanaryReport, Candidate, ForecastFigure
from hetero.decide.pages.drawing import PALETTE, QUIET, Plot, bar_axes, legend, new_axes, svg_of

__all__ = ["comparison_plot", "draws_of", "figure_plot"]

_SHOWN = ("time", "memory peak", "CPU mean", "GPU mean", "GPU memory peak")
_SCALES = {"bytes": (1e9, "GB")}


def draws_of(report: CanaryReport) -> dict[str, Callable[[], Plot | None]]:
    """Return the functions that draw the plots of a report, by the names of the plots."""
    draws: dict[str, Callable[[], Plot | None]] = {"time": partial(comparison_plot, report.candidates, "time")}
    if len(report.candidates) > 1:
        draws["cost"] = partial(comparison_plot, report.candidates, "cost")
    for candidate in report.candidates:
        for name in _SHOWN:
            figure = candidate.figure(name)
            if figure is not None and figure.points:
                draws[f"{candidate.name}: {name}"] = partial(figure_plot, candidate, figure)
    return draws


def figure_plot(candidate: Candidate, figure: ForecastFigure) -> Plot:
    """Return a plot of a figure: the canary runs with the line through them, and the forecast of the whole.

    The left half shows the canaries, the right half the whole, because a few percent and the whole do not fit on one
    axis.
    """
    scale, unit = _SCALES.get(figure.unit, (1.0, figure.unit))
    points = [point for point in candidate.points if not point.failure]
    x = [100 * point.fraction for point in points]
    y = [value / scale for value in figure.points]
    left, right = new_axes(widths=(3, 2))
    left.plot(x, y, "o", color=PALETTE[0], label="canary runs", alpha=0.8)
    refusals = candidate.refused(figure.name)
    # Only these figures are forecast by a line through the runs' own values.
    is_straight = figure.name in ("time", "memory peak", "GPU memory peak")
    if is_straight and figure.fixed is not None and x:
        ends = [0.0, 1.1 * max(x)]
        growth_per_percent = (figure.value - figure.fixed) / 100
        label = "line (refused)" if refusals else "line"
        left.plot(ends, [(figure.fixed + growth_per_percent * end) / scale for end in ends], "-", label=label)
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    left.set_xlabel("% of the data")
    left.set_ylabel(f"{figure.name} [{unit}]")
    legend(left)
    colour = QUIET if refusals else PALETTE[1]
    error = [[(figure.value - figure.low) / scale], [(figure.high - figure.value) / scale]]
    right.bar([0], [figure.value / scale], color=colour, width=0.5)
    right.errorbar([0], [figure.value / scale], yerr=error, color="black", capsize=6)
    right.set_xlim(-1, 1)
    right.set_ylim(bottom=0)
    right.set_xticks([0], ["the whole\n(refused)" if refusals else "the whole"])
    caption = refusals[0].reason if refusals else "Bar: forecast of the whole with its 90 % interval."
    return Plot(title=f"{candidate.name}: {figure.name}", caption=caption, svg=svg_of(left))


def comparison_plot(candidates: Sequence[Candidate], name: str) -> Plot | None:
    """Return a plot of a figure of all candidates side by side, or None if no candidate has the figure."""
    shown = [(each, figure) for each in candidates if (figure := each.figure(name)) is not None]
    if not shown:
        return None
    names = [f"{each.name}\n(refused)" if each.refused(name) else each.name for each, _ in shown]
    axes = bar_axes(names)
    for at, (candidate, figure) in enumerate(shown):
        colour = QUIET if candidate.refused(name) else PALETTE[at % len(PALETTE)]
        error = [[figure.value - figure.low], [figure.high - figure.value]]
        axes.barh([at], [figure.value], color=colour, height=0.6)
        axes.errorbar([figure.value], [at], xerr=error, color="black", capsize=6)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{name} [{shown[0][1].unit}]")
    return Plot(
        title=f"Forecast {name} of the whole job", caption="With 90 % intervals. Grey: refused.", svg=svg_of(axes)
    )
