"""Draws the clusters of a plan: cost of 1,000 steps against step time.

Both axes are logarithmic, so equal distances are equal ratios. The cost of a cluster is its price per hour times its
step time. So only the step time is uncertain, and one slanted bar shows the intervals of both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero.decide.pages.drawing import PALETTE, QUIET, Plot, legend, new_axes, plain_ticks, svg_of
from hetero.decide.pages.front import pareto_front
from hetero.decide.planning.plan_text import cluster_text, step_interval_text
from hetero.decide.planning.reasons import seconds_text, usd_text
from hetero.documents.text import counted
from hetero.report.plan import Plan, PlannedCluster

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plan_plot", "unbeaten"]

_HEIGHT_IN = 5.0
_LEAST_RATIO = 1.3
"""Least ratio between the ends of an axis. Small differences would look large on a shorter axis."""
_FAR_RATIO = 8.0
"""Step time / headspace above this ratio: the headspace does not fit on the axis of the clusters."""
_KINDS: dict[str, dict[str, Any]] = {
    "trainer hosts only": {"marker": "s", "markersize": 13, "markerfacecolor": "#ffffff", "markeredgecolor": QUIET},
    "data hosts": {"marker": "o", "markersize": 14, "markerfacecolor": PALETTE[0], "markeredgecolor": "#ffffff"},
    "spot data hosts": {"marker": "D", "markersize": 13, "markerfacecolor": PALETTE[1], "markeredgecolor": "#ffffff"},
}
"""Symbol of each kind of cluster."""
_GREEN = PALETTE[2]


def unbeaten(clusters: Sequence[PlannedCluster]) -> list[PlannedCluster]:
    """Return the clusters that no other cluster beats in both step time and cost, the fastest first.

    Clusters without a price are left out.
    """

    def costs_of(cluster: PlannedCluster) -> tuple[float, float] | None:
        # Round the times, because timelines compute equal times with different rounding errors.
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
    axes.set_xscale("log")
    axes.set_yscale("log")
    front = unbeaten(plan.alternatives)
    if len(front) > 1:
        times_s = [cluster.step_time.value for cluster in front]
        axes.step(times_s, [_usd(cluster) for cluster in front], where="post", color=_GREEN, gid="front")
    _draw_clusters(axes, plan, points)
    _draw_headspace(axes, plan.headspace.value, points)
    axes.set_xlim(*_widened(axes.get_xlim()))
    axes.set_ylim(*_widened(axes.get_ylim()))
    plain_ticks(axes.xaxis, seconds_text)
    plain_ticks(axes.yaxis, usd_text)
    axes.set_xlabel("step time (logarithmic)")
    axes.set_ylabel("USD per 1,000 steps (logarithmic)")
    legend(axes, is_outside=True)
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
        # A logarithmic axis cannot show 0, where the interval of an uncertain step may begin.
        return max(low, self.place[0] / 100), max(high, self.place[0])

    @property
    def usds(self) -> tuple[float, float]:
        """Costs at the ends of the bar."""
        step_s, usd = self.place
        return usd * self.times_s[0] / step_s, usd * self.times_s[1] / step_s


def _widened(ends: tuple[float, float]) -> tuple[float, float]:
    """Return the ends of a logarithmic axis, moved apart by the same factor until their ratio is `_LEAST_RATIO`."""
    low, high = ends
    # Each end moves by the square root of the missing ratio.
    factor = math.sqrt(max(1.0, _LEAST_RATIO * low / high))
    return low / factor, high * factor


def _draw_headspace(axes: Axes, headspace_s: float, points: Sequence[_Point]) -> None:
    """Draw the step time that no cluster beats, or an arrow to it if it is far to the left of all clusters."""
    text = f"headspace {seconds_text(headspace_s)}: no cluster is faster"
    # If the headspace is far away, draw only an arrow. A line there would squeeze the clusters into a corner.
    if headspace_s * _FAR_RATIO < min(point.place[0] for point in points):
        axes.text(0.0, 1.02, f"← {text}", transform=axes.transAxes)
        return
    axes.axvline(headspace_s, color="#000000", linestyle="--", linewidth=1, gid="headspace")
    axes.text(headspace_s, 1.02, text, transform=axes.get_xaxis_transform())


def _draw_clusters(axes: Axes, plan: Plan, points: Sequence[_Point]) -> None:
    """Draw the clusters: a bar for the interval, a symbol for the kind, and the number of the table row.

    The chosen cluster and the baseline have a name, stronger bars and a ring.
    """
    for point in points:
        alpha, width = (0.9, 2.5) if _name_of(plan, point) else (0.4, 1.5)
        axes.plot(point.times_s, point.usds, color=QUIET, gid=f"bar-{point.row}", alpha=alpha, linewidth=width)
    labelled: set[str] = set()
    # Draw clusters with a name last, because others would hide them. A cluster's symbol and number have the same order,
    # so the next symbol hides both. The orders begin with 3, because matplotlib draws lines such as the bars at 2.
    for order, point in enumerate(sorted(points, key=lambda point: bool(_name_of(plan, point))), start=3):
        kind, name = _kind_of(point.cluster), _name_of(plan, point)
        # Only the first symbol of each kind gets a label, because the legend shows a kind once.
        label = "" if kind in labelled else kind
        labelled.add(kind)
        if name:
            ring = _GREEN if point.cluster == plan.chosen else "#000000"
            style: dict[str, Any] = {
                "markersize": 20,
                "markerfacecolor": "none",
                "markeredgecolor": ring,
                "markeredgewidth": 2,
            }
            axes.plot(*point.place, "o", label=name, zorder=order, **style)
        axes.plot(*point.place, linestyle="none", label=label, zorder=order, gid=_gid(point), **_KINDS[kind])
        # The symbol of trainer hosts is white.
        colour = "#000000" if kind == "trainer hosts only" else "#ffffff"
        axes.text(*point.place, str(point.row), ha="center", va="center", color=colour, fontsize=8, zorder=order)


def _name_of(plan: Plan, point: _Point) -> str:
    """Return the name of a cluster in the legend. Empty unless it is the chosen one, the baseline, or both."""
    names = {"chosen": plan.chosen, "as it is now": plan.baseline}
    return ", ".join(name for name, cluster in names.items() if cluster == point.cluster)


def _kind_of(cluster: PlannedCluster) -> str:
    """Return the kind of a cluster, one of `_KINDS`."""
    if any(group.is_spot for group in cluster.groups):
        return "spot data hosts"
    return "data hosts" if any(group.role == "data" for group in cluster.groups) else "trainer hosts only"


def _gid(point: _Point) -> str:
    return f"cluster-{point.row}"


def _tip(point: _Point) -> str:
    """Return the text that a browser shows over a cluster."""
    cluster, (step_s, usd) = point.cluster, point.place
    return (
        f"{point.row}. {cluster_text(cluster)}\n{seconds_text(step_s)} per step ({step_interval_text(cluster)}), "
        f"USD {usd_text(usd)} per 1,000 steps\n{cluster.rejected or 'chosen'}"
    )


def _caption(plan: Plan, points: Sequence[_Point], front: Sequence[PlannedCluster]) -> str:
    """Return the sentences below the plot."""
    captions = [
        "A number is a row of the table. Where symbols cover each other, the table has all.",
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
