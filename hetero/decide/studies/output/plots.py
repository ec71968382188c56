"""The plots of a study's page, drawn by matplotlib. Each function returns a plot, or None without its data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.decide.pages.drawing import PALETTE, QUIET, Plot, legend, new_axes, plain_ticks, svg_of
from hetero.decide.pages.front import pareto_front
from hetero.decide.studies.cells.designs import Correlations
from hetero.decide.studies.output.table import communication_ratio
from hetero.decide.studies.runs import FINISHED, Level, RunResult
from hetero.decide.studies.statistics import interval_of, series_of
from hetero.decide.studies.study_file import Metric
from hetero.documents.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "Results",
    "communication_plot",
    "correlation_plot",
    "pareto_plot",
    "quality_over_time_plot",
    "quality_plot",
    "scaling_plot",
]

_MARKERS = "osD^vPX*"
_MAX_SERIES = len(PALETTE)
_MAX_CURVES = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What the plots show: finished runs, and the factors that tell their series apart."""

    results: Sequence[RunResult]
    factors: Sequence[str]
    """Names of the factors, without those that only choose the size of the cluster."""
    metric: Metric | None
    """The first metric of quality."""

    @property
    def finished(self) -> list[RunResult]:
        """The runs that finished."""
        return [result for result in self.results if result.state == FINISHED]

    def series(self, *, axis: str = "ranks") -> dict[str, list[RunResult]]:
        """Return the finished runs by series: a series has the runs with equal levels of the factors.

        The label of a series has those levels that vary. If there are more than `_MAX_SERIES`, all runs are one series
        without a label. A series may have several combinations of levels at one place of an axis, see `_combinations`.

        Args:
            axis: Quantity on the x axis. If it is a factor, its levels do not tell series apart.
        """
        levels = {name: {result.levels.get(name) for result in self.finished} for name in self.factors if name != axis}
        varied = [name for name in levels if len(levels[name]) > 1]
        # Place of each level in ascending order, numbers before texts. Levels of a factor may be of both kinds.
        places = {
            name: {level: at for at, level in enumerate(sorted(levels[name], key=lambda x: (isinstance(x, str), x)))}
            for name in varied
        }
        found: dict[str, list[RunResult]] = {}
        for result in sorted(self.finished, key=lambda run: [places[name][run.levels.get(name)] for name in varied]):
            label = ", ".join(f"{name} {result.levels.get(name)}" for name in varied)
            found.setdefault(label, []).append(result)
        return found if len(found) <= _MAX_SERIES else {"": self.finished}

    @property
    def time_unit(self) -> tuple[float, str]:
        """Seconds of a unit of time that suits the longest run, and the name of the unit."""
        longest_s = max((result.wall_s for result in self.finished), default=0.0)
        for seconds, name in ((3600.0, "hours"), (60.0, "minutes")):
            if longest_s >= 2 * seconds:
                return seconds, name
        return 1.0, "seconds"


def scaling_plot(found: Results, *, cost: bool) -> Plot | None:
    """Return time, or cost, against ranks on logarithmic axes. None if all runs have equally many ranks."""
    unit_s, unit = found.time_unit

    def value_of(run: RunResult) -> float | None:
        # A logarithmic axis cannot show 0.
        return (run.usd if cost else run.wall_s / unit_s) or None

    runs = [result for result in found.finished if value_of(result) is not None]
    if len({_ranks(result) for result in runs}) < 2:
        return None
    (axes,) = new_axes()
    are_joined, _ = _draw_series(axes, found.series(), _ranks, value_of)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _ticks_at(axes, sorted({_ranks(result) for result in runs}))
    plain_ticks(axes.yaxis)
    axes.set_xlabel("ranks")
    axes.set_ylabel("cost of a run [USD]" if cost else f"time of a run [{unit}]")
    legend(axes)
    what = "Cost" if cost else "Time"
    rest = "" if cost else " A straight line is a power law: with perfect scaling, twice the ranks take half the time."
    return Plot(
        title=f"{what} against ranks",
        caption=f"{what} of a run against its ranks, both logarithmic. {_marks_text(are_joined)}{rest}",
        svg=svg_of(axes),
    )


def quality_plot(found: Results) -> Plot | None:
    """Return quality with 95 % intervals against the global batch, or the ranks. None without quality."""
    metric = found.metric
    if metric is None:
        return None
    axis = next((name for name in ("global_batch", "ranks") if _is_axis(found, name)), None)
    if axis is None or not any(_quality(each, metric) is not None for each in found.finished):
        return None
    (axes,) = new_axes()
    # Each combination of the other factors is one series.
    are_means_joined, has_intervals = _draw_series(
        axes,
        found.series(axis=axis),
        lambda each: _number(each.levels.get(axis)),
        lambda each: _quality(each, metric),
        has_bars=True,
    )
    if metric.target is not None:
        axes.axhline(metric.target, color=QUIET, linestyle="--", linewidth=1)
        axes.annotate("target", (0.995, metric.target), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_xscale("log", base=2)
    _ticks_at(axes, sorted({_number(each.levels.get(axis)) for each in found.finished}))
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel(metric.name)
    legend(axes)
    text = ""
    if has_intervals:
        text = " Bars are 95 % intervals of the mean over replicates (Student's t)."
    # If lines do not join the means, no intervals are drawn either, and `_marks_text` gives the reason.
    elif are_means_joined:
        text = " There are no intervals, because no combination of levels ran twice: set replicates to 3 or more."
    return Plot(
        title=f"Quality: {metric.name}",
        caption=f"Last value of {metric.name} of each run. {_marks_text(are_means_joined)}{text}",
        svg=svg_of(axes),
    )


def pareto_plot(found: Results) -> Plot | None:
    """Return cost against time, with quality as colour and the front marked. None without prices or with one run."""
    metric = found.metric
    runs = [each for each in found.finished if each.usd is not None]
    if len(runs) < 2:
        return None
    qualities = [None if metric is None else _quality(each, metric) for each in runs]
    rated = [value for value in qualities if value is not None]
    is_rated = metric is not None and len(rated) == len(runs)

    def costs_of(index: int) -> list[float]:
        """Return time, cost and, if all runs have it, the quality as a cost: the lower the better."""
        run, quality = runs[index], qualities[index]
        costs = [run.wall_s, run.usd or 0.0]
        if is_rated and metric is not None and quality is not None:
            costs.append(-quality if metric.goal == "max" else quality)
        return costs

    # Find the runs that no other run beats, then draw them with rings.
    front = pareto_front(range(len(runs)), costs_of)
    unit_s, unit = found.time_unit
    xs, ys = [each.wall_s / unit_s for each in runs], [each.usd or 0.0 for each in runs]
    (axes,) = new_axes()
    rings = axes.scatter([xs[at] for at in front], [ys[at] for at in front], s=150, label="not beaten by any run")
    rings.set(facecolors="none", edgecolors="black", linewidths=1.4)
    if is_rated and metric is not None:
        points = axes.scatter(xs, ys, c=rated, cmap="viridis", s=44)
        axes.figure.colorbar(points, ax=axes, label=metric.name)
    else:
        axes.scatter(xs, ys, color=PALETTE[0], s=44)
    axes.set_xscale("log")
    axes.set_yscale("log")
    plain_ticks(axes.xaxis)
    plain_ticks(axes.yaxis)
    axes.set_xlabel(f"time of a run [{unit}]")
    axes.set_ylabel("cost of a run [USD]")
    legend(axes)
    what = f"time, cost and {metric.name}" if is_rated and metric is not None else "time and cost"
    return Plot(
        title="Cost, time and quality" if is_rated else "Cost and time",
        caption=f"Each mark is a run. A ring marks the Pareto front of {what}: no other run is at least as good in all "
        "of them and better in one.",
        svg=svg_of(axes),
    )


def communication_plot(found: Results) -> Plot | None:
    """Return communication over computation against ranks. None if the script did not log both."""
    ratios = {each.run_id: communication_ratio(each) for each in found.finished}
    runs = [each for each in found.finished if ratios[each.run_id] is not None]
    if not runs:
        return None
    (axes,) = new_axes()
    are_joined, _ = _draw_series(axes, found.series(), _ranks, lambda each: ratios[each.run_id])
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    _ticks_at(axes, sorted({_ranks(each) for each in runs}))
    axes.set_xlabel("ranks")
    axes.set_ylabel("communication / computation")
    legend(axes)
    return Plot(
        title="Communication over computation",
        caption="Sum of the metric communication_s over the sum of computation_s, of all ranks of a run. "
        + _marks_text(are_joined),
        svg=svg_of(axes),
    )


def quality_over_time_plot(found: Results) -> Plot | None:
    """Return quality against the time since the start of each run. None if no run logged it twice."""
    metric = found.metric
    if metric is None or not any(len(series_of(each.metrics, metric.name)) > 1 for each in found.finished):
        return None
    unit_s, unit = found.time_unit
    (axes,) = new_axes()
    # A group has the curves of one colour: those with equal levels, and with equal ranks if the ranks vary.
    groups: dict[str, list[RunResult]] = {}
    has_sizes = len({_ranks(each) for each in found.finished}) > 1
    for levels, members in found.series().items():
        for each in members:
            # Name the ranks also if the label would be empty without them.
            size = counted(int(_ranks(each)), "rank") if has_sizes or not levels else ""
            groups.setdefault(", ".join(filter(None, (levels, size))), []).append(each)
    # Groups with fewer ranks come first. The runs of a group have equally many ranks.
    ordered = sorted(groups.items(), key=lambda item: _ranks(item[1][0]))[:_MAX_SERIES]
    # Draw at most `_MAX_CURVES`, equally many of each group.
    num_drawn = 0
    for style, (label, members) in zip(_styles(), ordered, strict=False):
        for number, each in enumerate(members[: _MAX_CURVES // len(ordered)]):
            series = series_of(each.metrics, metric.name)
            num_drawn += 1
            axes.plot(
                [value.at_s / unit_s for value in series],
                [value.value for value in series],
                color=style["color"],
                marker=".",
                linewidth=1,
                alpha=0.8,
                label=label if number == 0 else None,
            )
    if metric.target is not None:
        axes.axhline(metric.target, color=QUIET, linestyle="--", linewidth=1)
    axes.set_xlabel(f"time since the start of the run [{unit}]")
    axes.set_ylabel(metric.name)
    legend(axes)
    return Plot(
        title=f"{metric.name} over time",
        caption=(
            "One line per run."
            + (f" {num_drawn} of {len(found.finished)} runs are shown." if num_drawn < len(found.finished) else "")
            + (" The dashed line is the target." if metric.target is not None else "")
        ),
        svg=svg_of(axes),
    )


def correlation_plot(found: Correlations) -> Plot | None:
    """Return the map of correlations between the columns of a design. None for one column."""
    number = len(found.columns)
    if number < 2:
        return None
    # More columns than these do not fit beside another plot.
    is_wide = number > 6
    (axes,) = new_axes(height_in=min(11.0, 2.0 + 0.5 * number), is_wide=is_wide)
    values = [[math.nan if value is None else value for value in row] for row in found.values]
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
    axes.grid(visible=False)
    axes.set_xticks(range(number), found.columns, rotation=45, ha="right")
    axes.set_yticks(range(number), found.columns)
    if number <= 12:
        for row, column in itertools.product(range(number), repeat=2):
            value = values[row][column]
            # The cells of strong correlations are dark.
            colour = "white" if abs(value) > 0.6 else "black"
            text = "-" if math.isnan(value) else f"{value:.2f}"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
    axes.figure.colorbar(image, ax=axes, label="Pearson's correlation")
    return Plot(
        title="Correlations of the design",
        caption="A factor with numbers is one column. Of another factor, each level but the first is a column.",
        svg=svg_of(axes),
        is_wide=is_wide,
    )


# What the plots share


def _styles() -> Iterator[dict[str, Any]]:
    """Yield the style of each series."""
    for colour, marker in zip(PALETTE, _MARKERS, strict=True):
        yield {"color": colour, "marker": marker, "markersize": 6, "linewidth": 1.4}


def _draw_series(
    axes: Axes,
    series: Mapping[str, Sequence[RunResult]],
    x_of: Callable[[RunResult], float],
    value_of: Callable[[RunResult], float | None],
    *,
    has_bars: bool = False,
) -> tuple[bool, bool]:
    """Draw each series: its runs, and the means of its combinations of levels.

    Args:
        axes: Where to draw.
        series: Runs by the label of their series.
        x_of: Returns the place of a run on the x axis.
        value_of: Returns the value of a run, or None to leave the run out.
        has_bars: Whether to draw 95 % intervals.

    Returns:
        Whether a line joins the means in each series, and whether any interval was drawn. A series with several
        combinations at one place gets marks without a line.
    """
    are_joined, has_intervals = True, False
    # There are at most as many series as styles, see `Results.series`.
    for number, (style, (label, members)) in enumerate(zip(_styles(), series.items(), strict=False)):
        combinations = _combinations(members, x_of, value_of)
        if not combinations:
            continue
        # A line needs one combination of levels at each place.
        is_joined = len({x for x, _ in combinations}) == len(combinations)
        are_joined &= is_joined
        # Shift each series a little, because the intervals of two series would hide each other.
        shift = 1.0 + 0.05 * (number - (len(series) - 1) / 2) if has_bars else 1.0
        means = [(x * shift, each) for x, values in combinations if (each := interval_of(values)) is not None]
        # Lengths of the bars below and above each mean.
        errors = [
            [each.mean - each.low if each.low is not None else 0.0 for _, each in means],
            [each.high - each.mean if each.high is not None else 0.0 for _, each in means],
        ]
        # Draw no intervals for several combinations at one place, because they would hide each other too.
        is_barred = has_bars and is_joined
        has_intervals |= is_barred and any(each.low is not None for _, each in means)
        axes.errorbar(
            [x for x, _ in means],
            [each.mean for _, each in means],
            yerr=errors if is_barred else None,
            capsize=4,
            label=label,
            **style | ({} if is_joined else {"linestyle": "none"}),
        )
        for x, values in combinations:
            axes.scatter([x * shift] * len(values), values, s=12, color=style["color"], alpha=0.6, linewidths=0)
    return are_joined, has_intervals


def _combinations(
    members: Sequence[RunResult], x_of: Callable[[RunResult], float], value_of: Callable[[RunResult], float | None]
) -> list[tuple[float, list[float]]]:
    """Return the combinations of levels of a series: the place of each on the x axis, and the values of its runs.

    They are in the order of the places. The runs of a combination are replicates, which differ only in their seed.
    """
    found: dict[tuple[tuple[str, str], ...], tuple[float, list[float]]] = {}
    for each in members:
        value = value_of(each)
        if value is not None:
            key = tuple((name, repr(level)) for name, level in sorted(each.levels.items()) if name != "seed")
            found.setdefault(key, (x_of(each), []))[1].append(value)
    return sorted(found.values(), key=lambda item: item[0])


def _marks_text(are_joined: bool) -> str:
    """Return what the marks of a plot are. If lines do not join them, say why."""
    if are_joined:
        return "Small marks are runs, lines join their means."
    return (
        "Small marks are runs, large marks are means of one combination of levels. Marks of one colour are not joined "
        "if several combinations are at one place. The table of combinations has their levels and intervals."
    )


def _ticks_at(axes: Axes, xs: Sequence[float]) -> None:
    """Label a logarithmic x axis at these values with plain numbers."""
    # matplotlib is an extra, so it is imported when something is drawn.
    from matplotlib.ticker import NullLocator

    axes.set_xticks(list(xs), [f"{x:g}" for x in xs])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(xs[0] / 1.3, xs[-1] * 1.3)


def _ranks(result: RunResult) -> float:
    return _number(result.levels.get("ranks", 1))


def _number(level: Level | None) -> float:
    return float(level) if isinstance(level, (int, float)) else math.nan


def _is_axis(found: Results, name: str) -> bool:
    """Return whether a quantity is a number in each run, and differs between runs."""
    values = [result.levels.get(name) for result in found.finished]
    return all(isinstance(value, (int, float)) for value in values) and len(set(values)) > 1


def _quality(result: RunResult, metric: Metric) -> float | None:
    """Return the last value of a metric, or None without a value."""
    series = series_of(result.metrics, metric.name)
    return series[-1].value if series else None
