"""Draws the clusters of a plan: cost of 1,000 steps against step time.

Both axes are logarithmic, so equal distances are equal ratios. The cost of a cluster is its price per hour times its
step time. Its two intervals therefore have one cause, and the plot shows them as one slanted bar.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from hetero.decide.pages.drawing import PALETTE, QUIET, Plot, legend, new_axes, plain_ticks, svg_of
from hetero.decide.pages.front import pareto_front
from hetero.decide.planning.plan_text import cluster_text
from hetero.decide.planning.reasons import seconds_text, usd_text
from hetero.documents.text import counted
from hetero.report.plan import Plan, PlannedCluster

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

__all__ = ["plan_plot", "rows_text", "unbeaten"]

_HEIGHT_IN = 5.0
_LEAST_RATIO = 1.3
"""Least ratio between the ends of an axis. Small differences would look large on a shorter axis."""
_INTERVAL_RATIO = 2.0
"""Limit of the ratio that intervals add to an axis. Longer bars are cut off."""
_FAR_RATIO = 8.0
"""Step time / headspace above this ratio: the headspace does not fit on the axis of the clusters."""
_PADDING = 0.08
_NEAR = 12.0
"""Distance in points below which the numbers of two clusters become one label."""
_KINDS: dict[str, dict[str, Any]] = {
    "trainer hosts only": {"marker": "s", "markerfacecolor": "#ffffff", "markeredgecolor": QUIET},
    "data hosts": {"marker": "o", "markerfacecolor": PALETTE[0], "markeredgecolor": "#ffffff"},
    "spot data hosts": {"marker": "D", "markerfacecolor": PALETTE[1], "markeredgecolor": "#ffffff"},
}
"""Symbol of each kind of cluster."""
_GREEN = PALETTE[2]
_PLACES = [(1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1)]
"""Directions from a symbol to its label, in the order of preference."""
_ACROSS: dict[int, Literal["left", "center", "right"]] = {1: "left", 0: "center", -1: "right"}
_UP: dict[int, Literal["bottom", "center", "top"]] = {1: "bottom", 0: "center", -1: "top"}
"""Side of a label that faces its symbol."""


def rows_text(rows: Iterable[int]) -> str:
    """Return ascending row numbers as text, with ranges: ``1, 2, 4-7``."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == row - 1 else row
        ranges.append((first, row))
    return ", ".join(f"{a}-{b}" if b > a + 1 else ", ".join(map(str, sorted({a, b}))) for a, b in ranges)


def unbeaten(clusters: Sequence[PlannedCluster]) -> list[PlannedCluster]:
    """Return the clusters that no other cluster beats in both step time and cost, the fastest first.

    Clusters without a price are left out.
    """

    def costs_of(cluster: PlannedCluster) -> tuple[float, float] | None:
        # Timelines compute equal times with different rounding errors.
        step_s = float(f"{cluster.step_time.value:.4g}")
        return (step_s, _usd(cluster)) if _usd(cluster) > 0 else None

    return sorted(pareto_front(clusters, costs_of), key=lambda cluster: cluster.step_time.value)


def plan_plot(plan: Plan) -> Plot | None:
    """Return the plot, or None if no cluster has a price."""
    points = [
        _Point(row=row, cluster=cluster)
        for row, cluster in enumerate(plan.alternatives, start=1)
        if _usd(cluster) > 0 and cluster.step_time.value > 0
    ]
    if not points:
        return None
    (axes,) = new_axes(_HEIGHT_IN, is_wide=True)
    _draw_scales(axes, plan, points)
    _draw_headspace(axes, plan.headspace.value)
    front = unbeaten(plan.alternatives)
    if len(front) > 1:
        times_s = [cluster.step_time.value for cluster in front]
        axes.step(times_s, [_usd(cluster) for cluster in front], where="post", color=_GREEN, gid="front")
    _draw_clusters(axes, plan, points)
    legend(axes, is_outside=True)
    _Labels(axes, plan, points, front).draw()
    return Plot(
        title="Cost against step time",
        caption=_caption(plan, points, front),
        svg=svg_of(axes, {_gid(point): _tip(point) for point in points}),
        is_wide=True,
    )


def _usd(cluster: PlannedCluster) -> float:
    return 0.0 if cluster.usd_per_1k_steps is None else cluster.usd_per_1k_steps.value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One cluster with its row in the table, counted from 1."""

    row: int
    cluster: PlannedCluster

    @property
    def place(self) -> tuple[float, float]:
        """Step time and cost."""
        return self.cluster.step_time.value, _usd(self.cluster)

    @property
    def times_s(self) -> tuple[float, float]:
        """Ends of the bar. They are above 0."""
        low, high = self.cluster.step_time_low_s, self.cluster.step_time_high_s
        return max(low, self.place[0] / 100), max(high, self.place[0])

    @property
    def usds(self) -> tuple[float, float]:
        """Costs at the ends of the bar."""
        step_s, usd = self.place
        return usd * self.times_s[0] / step_s, usd * self.times_s[1] / step_s


def _draw_scales(axes: Axes, plan: Plan, points: Sequence[_Point]) -> None:
    times_s, usds = [point.place[0] for point in points], [point.place[1] for point in points]
    if plan.headspace.value > min(times_s) / _FAR_RATIO:
        times_s.append(plan.headspace.value)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*_ends(times_s, [end for point in points for end in point.times_s]))
    axes.set_ylim(*_ends(usds, [end for point in points for end in point.usds]))
    plain_ticks(axes.xaxis, seconds_text)
    plain_ticks(axes.yaxis, usd_text)
    axes.set_xlabel("step time (logarithmic)")
    axes.set_ylabel("USD per 1,000 steps (logarithmic)")


def _ends(values: Sequence[float], more: Sequence[float]) -> tuple[float, float]:
    """Return the ends of an axis with all values, and with more values that are not far away."""
    low, high = min(values), max(values)
    low, high = max(min([low, *more]), low / _INTERVAL_RATIO), min(max([high, *more]), high * _INTERVAL_RATIO)
    ratio = max(high / low, _LEAST_RATIO)
    # The axis is logarithmic, so both ends move by the same factor.
    widen = math.sqrt(ratio / (high / low)) * ratio**_PADDING
    return low / widen, high * widen


def _draw_headspace(axes: Axes, headspace_s: float) -> None:
    """Draw the step time that no cluster beats, or an arrow to it if it is far to the left of all clusters."""
    low, high = axes.get_xlim()
    text = f"headspace {seconds_text(headspace_s)}: no cluster is faster"
    if headspace_s < low:
        axes.text(0.0, 1.02, f"← {text}", transform=axes.transAxes)
        return
    axes.axvline(headspace_s, color="#000000", linestyle="--", linewidth=1, gid="headspace")
    # A text that began in the right half could leave the plot.
    side = "left" if headspace_s < math.sqrt(low * high) else "right"
    axes.text(headspace_s, 1.02, text, transform=axes.get_xaxis_transform(), ha=side)


def _draw_clusters(axes: Axes, plan: Plan, points: Sequence[_Point]) -> None:
    for point in points:
        alpha, width = (0.9, 2.5) if _is_marked(plan, point) else (0.4, 1.5)
        axes.plot(point.times_s, point.usds, color=QUIET, gid=f"bar-{point.row}", alpha=alpha, linewidth=width)
    labelled: set[str] = set()
    # The marked clusters come last, because others would hide them.
    for point in sorted(points, key=lambda point: _is_marked(plan, point)):
        kind = _kind_of(point.cluster)
        # One symbol of each kind is in the legend.
        label = "" if kind in labelled else kind
        labelled.add(kind)
        axes.plot(*point.place, linestyle="none", label=label, markersize=8, gid=_gid(point), **_KINDS[kind])
        if point.cluster == plan.chosen:
            axes.plot(
                *point.place, "o", markersize=15, markerfacecolor="none", markeredgecolor=_GREEN, markeredgewidth=2
            )


def _kind_of(cluster: PlannedCluster) -> str:
    """Return the kind of a cluster, one of `_KINDS`."""
    if any(group.is_spot for group in cluster.groups):
        return "spot data hosts"
    return "data hosts" if any(group.role == "data" for group in cluster.groups) else "trainer hosts only"


def _is_marked(plan: Plan, point: _Point) -> bool:
    return point.cluster in (plan.chosen, plan.baseline)


def _gid(point: _Point) -> str:
    return f"cluster-{point.row}"


def _tip(point: _Point) -> str:
    cluster, (step_s, usd) = point.cluster, point.place
    times = " to ".join(map(seconds_text, (cluster.step_time_low_s, cluster.step_time_high_s)))
    return (
        f"{point.row}. {cluster_text(cluster)}\n{seconds_text(step_s)} per step ({times}), "
        f"USD {usd_text(usd)} per 1,000 steps\n{cluster.rejected or 'chosen'}"
    )


def _caption(plan: Plan, points: Sequence[_Point], front: Sequence[PlannedCluster]) -> str:
    captions = [
        "A number is a row of the table.",
        "A bar is the 90 % interval of a cluster.",
        "It is slanted because the cost of a step is a price per hour times the step time.",
        "The headspace is a mean, so a bar may cross it.",
    ]
    if len(front) == 1:
        captions.append(f"Row {plan.alternatives.index(front[0]) + 1} is both the fastest and the cheapest.")
    else:
        captions.append("The line joins the clusters that no other cluster beats in both time and cost.")
    num_left_out = len(plan.alternatives) - len(points)
    if num_left_out:
        captions.append(f"{counted(num_left_out, 'cluster')} without a known price: only in the table.")
    return " ".join(captions)


class _Labels:
    """Names of the chosen cluster and the baseline, and row numbers of the others where there is room."""

    def __init__(self, axes: Axes, plan: Plan, points: Sequence[_Point], front: Sequence[PlannedCluster]) -> None:
        # The layout decides where the axes are, and labels are compared in points of the figure.
        cast("Figure", axes.figure).draw_without_rendering()
        self._axes = axes
        self._plan = plan
        self._points = points
        self._front = front
        self._covered = [line.get_window_extent() for line in axes.lines if line.get_marker() != "None"]
        """Symbols and labels, which a label must not cover."""
        self._crossed = [line.get_path().transformed(line.get_transform()) for line in axes.lines]
        """Bars and lines, which a label should not cross."""

    def draw(self) -> None:
        for point in (point for point in self._points if _is_marked(self._plan, point)):
            figures = f"{seconds_text(point.place[0])}, USD {usd_text(point.place[1])}"
            self._place(point, f"{point.row}. {self._name(point.cluster)}\n{figures}", is_marked=True)
        for points in self._neighbours():
            self._place(points[0], rows_text(sorted(point.row for point in points)), is_marked=False)

    def _name(self, cluster: PlannedCluster) -> str:
        if cluster == self._plan.baseline:
            return "chosen, as it is now" if cluster == self._plan.chosen else "as it is now"
        return "chosen"

    def _neighbours(self) -> list[list[_Point]]:
        """Return the points without a name. Points that almost cover each other are one group."""
        groups: list[list[_Point]] = []
        for point in sorted(self._points, key=lambda point: point.cluster not in self._front):
            if _is_marked(self._plan, point):
                continue
            near = (group for group in groups if self._distance(group[0], point) < _NEAR)
            group = next(near, None)
            if group is None:
                groups.append([point])
            else:
                group.append(point)
        return groups

    def _distance(self, one: _Point, other: _Point) -> float:
        # What covers what shows on the page alone, not in seconds and dollars.
        return math.dist(*(self._axes.transData.transform(point.place) for point in (one, other)))

    def _place(self, point: _Point, text: str, *, is_marked: bool) -> None:
        """Draw a label where it covers least. A row number that would cover something is left out."""
        gap = 13 if is_marked else 6
        label = self._axes.annotate(
            text,
            point.place,
            (0, 0),
            textcoords="offset points",
            fontsize="medium" if is_marked else "small",
            fontweight="bold" if is_marked else "normal",
            color="#000000" if is_marked else QUIET,
            gid="label",
        )
        best = min(_PLACES, key=lambda place: self._cost(label, place, gap))
        num_covered, _ = self._cost(label, best, gap)
        if num_covered and not is_marked:
            # The tip of the symbol has the number too.
            label.remove()
        else:
            self._covered.append(self._moved(label, best, gap))

    def _cost(self, label: Annotation, place: tuple[int, int], gap: int) -> tuple[int, int]:
        """Return how many symbols and labels a label covers at a place, and how many lines it crosses."""
        box = self._moved(label, place, gap)
        frame = self._axes.get_window_extent()
        is_outside = not (frame.contains(box.x0, box.y0) and frame.contains(box.x1, box.y1))
        return box.count_overlaps(self._covered) + is_outside, sum(
            path.intersects_bbox(box, filled=False) for path in self._crossed
        )

    def _moved(self, label: Annotation, place: tuple[int, int], gap: int) -> Bbox:
        """Move a label to a place beside its symbol and return the rectangle that it covers."""
        across, up = place
        label.set_position((gap * across, gap * up))
        label.set_horizontalalignment(_ACROSS[across])
        label.set_verticalalignment(_UP[up])
        return label.get_window_extent()
