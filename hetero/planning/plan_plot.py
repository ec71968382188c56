"""Draws the clusters of a plan as SVG: cost of 1,000 steps against step time.

Both axes are logarithmic, so equal distances are equal ratios. The cost of a cluster is its price per hour times its
step time. Its two intervals therefore have one cause, and the drawing shows them as one slanted bar.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.planning.plan import Plan, PlannedCluster
from hetero.planning.plan_text import cluster_text
from hetero.planning.reasons import seconds_text, usd_text
from hetero.system.text import html_text

__all__ = ["KINDS", "kind_of", "pareto_front", "plan_svg", "rows_text", "symbol"]

_WIDTH, _HEIGHT = 1000.0, 480.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 82.0, 976.0, 34.0, 420.0
"""Edges of the area between the axes."""
_LEAST_RATIO = 1.3
"""Least ratio between the ends of an axis. Small differences would look large on a shorter axis."""
_INTERVAL_RATIO = 2.0
"""Limit of the ratio that intervals add to an axis. Longer bars are cut off."""
_FAR_RATIO = 8.0
"""Step time / headspace above this ratio: the headspace does not fit on the axis of the clusters."""
_PADDING = 0.08
_SAME_TIME = 0.001
"""Relative difference below which step times count as equal."""
_CHAR_WIDTH, _LINE_HEIGHT = 8.2, 16.0
"""Size of a character of a label. It is an estimate, because only the browser knows the font."""
_NEAR = 12.0
"""Distance below which the numbers of two points become one label."""
_SYMBOLS = {
    "trainer hosts only": "M-5-5H5V5H-5Z",
    "data hosts": "M-5.5 0A5.5 5.5 0 1 1 5.5 0A5.5 5.5 0 1 1-5.5 0Z",
    "spot data hosts": "M0-7L7 0L0 7L-7 0Z",
}
KINDS = tuple(_SYMBOLS)
"""Kinds of clusters in the legend."""


def kind_of(cluster: PlannedCluster) -> str:
    """Return the kind of a cluster, one of `KINDS`."""
    if any(group.is_spot for group in cluster.groups):
        return "spot data hosts"
    return "data hosts" if any(group.role == "data" for group in cluster.groups) else "trainer hosts only"


def symbol(kind: str) -> str:
    """Return the SVG path of a kind of `kind_of`, with the origin at its centre."""
    return f'<path class="{kind.split()[0]}" d="{_SYMBOLS[kind]}"/>'


def rows_text(rows: Iterable[int]) -> str:
    """Return ascending row numbers as text, with ranges: ``1, 2, 4-7``."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        first = ranges.pop()[0] if ranges and ranges[-1][1] == row - 1 else row
        ranges.append((first, row))
    return ", ".join(f"{a}-{b}" if b > a + 1 else ", ".join(map(str, sorted({a, b}))) for a, b in ranges)


def pareto_front(clusters: Iterable[PlannedCluster]) -> list[PlannedCluster]:
    """Return the clusters that no other cluster beats in both step time and cost, the fastest first.

    Step times within 0.1 % of the fastest one of them count as equal, because timelines compute them with rounding
    errors. Of equally fast clusters, the cheapest counts. Clusters without a price are left out.
    """
    priced = sorted(
        ((cluster.step_time.value, _usd(cluster), cluster) for cluster in clusters if _usd(cluster) > 0),
        key=lambda item: item[:2],
    )
    front: list[PlannedCluster] = []
    least = math.inf
    while priced:
        limit_s = priced[0][0] * (1 + _SAME_TIME)
        equal = [item for item in priced if item[0] <= limit_s]
        priced = priced[len(equal) :]
        _, usd, cluster = min(equal, key=lambda item: item[1])
        if usd < least:
            front.append(cluster)
            least = usd
    return front


def plan_svg(plan: Plan) -> str:
    """Return the drawing as an ``svg`` element, or an empty text if no cluster has a price."""
    points = [
        _Point(row=row, cluster=cluster)
        for row, cluster in enumerate(plan.alternatives, start=1)
        if _usd(cluster) > 0 and cluster.step_time.value > 0
    ]
    return _Drawing(plan, points).svg() if points else ""


def _usd(cluster: PlannedCluster) -> float:
    return 0.0 if cluster.usd_per_1k_steps is None else cluster.usd_per_1k_steps.value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Point:
    """One cluster with its row in the table, counted from 1."""

    row: int
    cluster: PlannedCluster

    @property
    def step_s(self) -> float:
        return self.cluster.step_time.value

    @property
    def usd(self) -> float:
        return _usd(self.cluster)

    @property
    def times_s(self) -> tuple[float, float]:
        """Ends of the bar. They are above 0."""
        low, high = self.cluster.step_time_low_s, self.cluster.step_time_high_s
        return max(low, self.step_s / 100), max(high, self.step_s)

    @property
    def usds(self) -> tuple[float, float]:
        """Costs at the ends of the bar."""
        return self.usd * self.times_s[0] / self.step_s, self.usd * self.times_s[1] / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """A logarithmic axis."""

    low: float
    high: float
    start: float
    """Coordinate of `low`."""
    end: float

    @classmethod
    def over(cls, values: Sequence[float], more: Sequence[float], *, start: float, end: float) -> _Axis:
        """Return an axis with all values, and with more values that are not far away."""
        low, high = min(values), max(values)
        low, high = max(min([low, *more]), low / _INTERVAL_RATIO), min(max([high, *more]), high * _INTERVAL_RATIO)
        ratio = max(high / low, _LEAST_RATIO)
        widen = math.sqrt(ratio / (high / low)) * ratio**_PADDING
        return cls(low=low / widen, high=high * widen, start=start, end=end)

    def at(self, value: float) -> float:
        """Return the coordinate of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Return round values, about four to ten."""
        if self.high / self.low > 6:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
            found = [value for value in values if self.low <= value <= self.high]
            if len(found) < 4:
                values = [digit * 10.0**exponent for exponent in exponents for digit in (1, 1.5, 2, 3, 4, 5, 7)]
                return [value for value in values if self.low <= value <= self.high]
            return found if len(found) <= 10 else [10.0**e for e in exponents if self.low <= 10.0**e <= self.high]
        unit = 10.0 ** math.floor(math.log10(self.high - self.low))
        for step in (5 * unit, 2 * unit, unit, unit / 2, unit / 5):
            found = [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
            if len(found) >= 4:
                break
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A rectangle that a label or a symbol covers."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: _Box) -> float:
        """Return the common area."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)


_FRAME = _Box(left=_LEFT, top=_TOP, right=_RIGHT, bottom=_BOTTOM)


class _Drawing:
    """The parts of the drawing, from back to front."""

    def __init__(self, plan: Plan, points: Sequence[_Point]) -> None:
        self._plan = plan
        self._points = points
        self._front = pareto_front(point.cluster for point in points)
        times_s, headspace_s = [point.step_s for point in points], plan.headspace.value
        self._shows_headspace = headspace_s > min(times_s) / _FAR_RATIO
        if self._shows_headspace:
            times_s.append(headspace_s)
        ends_s = [end for point in points for end in point.times_s]
        ends_usd = [end for point in points for end in point.usds]
        self._x = _Axis.over(times_s, ends_s, start=_LEFT, end=_RIGHT)
        self._y = _Axis.over([point.usd for point in points], ends_usd, start=_BOTTOM, end=_TOP)
        self._covered = [self._around(point) for point in points]
        """Symbols and labels, which a label must not cover."""
        self._crossed = self._dots()
        """Points on bars and lines, which a label should not cover."""

    def svg(self) -> str:
        parts = [
            *self._grid(),
            *self._headspace(),
            *self._front_line(),
            *self._bars(),
            *self._symbols(),
            *self._labels(),
        ]
        title = "Cost of 1,000 steps against step time of the clusters in the table"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
            f'aria-label="{title}">\n<clipPath id="area"><rect x="{_LEFT:g}" y="{_TOP:g}" '
            f'width="{_RIGHT - _LEFT:g}" height="{_BOTTOM - _TOP:g}"/></clipPath>\n' + "\n".join(parts) + "\n</svg>"
        )

    def _position(self, point: _Point) -> tuple[float, float]:
        return self._x.at(point.step_s), self._y.at(point.usd)

    def _around(self, point: _Point) -> _Box:
        """Return the square that the symbol of a point covers."""
        radius = 12.0 if point.cluster == self._plan.chosen else 6.0
        x, y = self._position(point)
        return _Box(left=x - radius, top=y - radius, right=x + radius, bottom=y + radius)

    def _is_marked(self, point: _Point) -> bool:
        return point.cluster in (self._plan.chosen, self._plan.baseline)

    # Parts

    def _grid(self) -> list[str]:
        parts = []
        for value in self._x.ticks():
            x = self._x.at(value)
            parts.append(_line("grid", x, _TOP, x, _BOTTOM))
            parts.append(_text("tick", x, _BOTTOM + 19, seconds_text(value), "middle"))
        for value in self._y.ticks():
            y = self._y.at(value)
            parts.append(_line("grid", _LEFT, y, _RIGHT, y))
            parts.append(_text("tick", _LEFT - 8, y + 4.5, usd_text(value), "end"))
        turned = f'transform="translate(20 {(_TOP + _BOTTOM) / 2:g}) rotate(-90)"'
        return [
            *parts,
            _line("axis", _LEFT, _BOTTOM, _RIGHT, _BOTTOM),
            _line("axis", _LEFT, _TOP, _LEFT, _BOTTOM),
            _text("name", (_LEFT + _RIGHT) / 2, _BOTTOM + 46, "step time (logarithmic)", "middle"),
            f'<text class="name" text-anchor="middle" {turned}>USD per 1,000 steps (logarithmic)</text>',
        ]

    def _headspace(self) -> list[str]:
        text = f"headspace {seconds_text(self._plan.headspace.value)}: no cluster is faster"
        half = len(text) * _CHAR_WIDTH / 2
        if not self._shows_headspace:
            return [_text("headspace", _LEFT + half, _TOP - 12, f"← {text}", "middle")]
        x = self._x.at(self._plan.headspace.value)
        inside = min(max(x, _LEFT + half - 40), _RIGHT - half)
        return [_line("headspace", x, _TOP - 6, x, _BOTTOM), _text("headspace", inside, _TOP - 12, text, "middle")]

    def _front_line(self) -> list[str]:
        corners = self._front_corners()
        if len(corners) < 2:
            return []
        return [f'<path class="front" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in corners)}"/>']

    def _front_corners(self) -> list[tuple[float, float]]:
        """Return the corners of the stairs between the clusters that none beats in both time and cost."""
        corners: list[tuple[float, float]] = []
        for cluster in self._front:
            x, y = self._position(_Point(row=0, cluster=cluster))
            corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
        return corners

    def _bars(self) -> list[str]:
        parts = []
        for point in self._points:
            x1, x2 = map(self._x.at, point.times_s)
            y1, y2 = map(self._y.at, point.usds)
            parts.append(_line("bar marked" if self._is_marked(point) else "bar", x1, y1, x2, y2))
        return [f'<g clip-path="url(#area)">{"".join(parts)}</g>']

    def _symbols(self) -> list[str]:
        parts = []
        # The marked clusters come last, because others would hide them.
        for point in sorted(self._points, key=self._is_marked):
            x, y = self._position(point)
            ring = '<circle class="ring" r="10"/>' if point.cluster == self._plan.chosen else ""
            tip = f"<title>{html_text(self._tip(point))}</title>"
            at = f'transform="translate({x:.1f} {y:.1f})"'
            parts.append(f'<g class="cluster" {at}>{tip}{ring}{symbol(kind_of(point.cluster))}</g>')
        return parts

    def _tip(self, point: _Point) -> str:
        cluster = point.cluster
        times = " to ".join(map(seconds_text, (cluster.step_time_low_s, cluster.step_time_high_s)))
        return (
            f"{point.row}. {cluster_text(cluster)}\n{seconds_text(point.step_s)} per step ({times}), "
            f"USD {usd_text(point.usd)} per 1,000 steps\n{cluster.rejected or 'chosen'}"
        )

    # Labels

    def _labels(self) -> list[str]:
        """Return the names of the chosen cluster and the baseline, and row numbers where there is room."""
        parts = []
        for point in filter(self._is_marked, self._points):
            lines = [f"{point.row}. {self._name(point.cluster)}"]
            lines.append(f"{seconds_text(point.step_s)}, USD {usd_text(point.usd)}")
            parts += self._label(self._free_place(point, lines)[0], lines, "label")
        for points in self._neighbours():
            lines = [rows_text(sorted(point.row for point in points))]
            box, covers = self._free_place(points[0], lines)
            if not covers:
                parts += self._label(box, lines, "row")
        return parts

    def _label(self, box: _Box, lines: Sequence[str], kind: str) -> list[str]:
        self._covered.append(box)
        middle = (box.left + box.right) / 2
        kinds = [f"{kind} first", *[kind] * (len(lines) - 1)]
        ys = [box.top + (index + 1) * _LINE_HEIGHT - 4 for index in range(len(lines))]
        return [_text(name, middle, y, line, "middle") for name, y, line in zip(kinds, ys, lines, strict=True)]

    def _neighbours(self) -> list[list[_Point]]:
        """Return the points without a name. Points that almost cover each other are one group."""
        groups: list[list[_Point]] = []
        for point in sorted(self._points, key=lambda p: p.cluster not in self._front):
            if self._is_marked(point):
                continue
            place = self._position(point)
            near = (group for group in groups if math.dist(self._position(group[0]), place) < _NEAR)
            group = next(near, None)
            if group is None:
                groups.append([point])
            else:
                group.append(point)
        return groups

    def _name(self, cluster: PlannedCluster) -> str:
        if cluster == self._plan.baseline:
            return "chosen, as it is now" if cluster == self._plan.chosen else "as it is now"
        return "chosen"

    def _free_place(self, point: _Point, lines: Sequence[str]) -> tuple[_Box, bool]:
        """Return the place beside a point that covers least, and whether it covers a label, a symbol or the frame."""
        x, y = self._position(point)
        width, height = max(map(len, lines)) * _CHAR_WIDTH, len(lines) * _LINE_HEIGHT
        gap = 13.0 if self._is_marked(point) else 7.0
        places = [
            (x + gap, y - height / 2),
            (x - gap - width, y - height / 2),
            (x - width / 2, y - gap - height),
            (x - width / 2, y + gap),
            (x + gap, y - gap - height),
            (x + gap, y + gap),
            (x - gap - width, y - gap - height),
            (x - gap - width, y + gap),
        ]
        boxes = [_Box(left=left, top=top, right=left + width, bottom=top + height) for left, top in places]
        best = min(boxes, key=lambda box: 10 * self._covered_area(box) + self._crossed_area(box))
        return best, self._covered_area(best) > 0

    def _covered_area(self, box: _Box) -> float:
        """Return the area that a label takes from other labels, symbols and the margins."""
        outside = (box.right - box.left) * (box.bottom - box.top) - box.overlap(_FRAME)
        return outside + sum(box.overlap(other) for other in self._covered)

    def _crossed_area(self, box: _Box) -> float:
        """Return how much of bars and lines a label covers, in about the units of an area."""
        return 60.0 * sum(box.left <= x <= box.right and box.top <= y <= box.bottom for x, y in self._crossed)

    def _dots(self) -> list[tuple[float, float]]:
        lines = [(tuple(map(self._x.at, point.times_s)), tuple(map(self._y.at, point.usds))) for point in self._points]
        if self._shows_headspace:
            x = self._x.at(self._plan.headspace.value)
            lines.append(((x, x), (_TOP, _BOTTOM)))
        corners = self._front_corners()
        lines += [((x1, x2), (y1, y2)) for (x1, y1), (x2, y2) in itertools.pairwise(corners)]
        return [dot for xs, ys in lines for dot in zip(_steps(*xs), _steps(*ys), strict=True)]


def _steps(start: float, end: float) -> list[float]:
    """Return 20 values from start to end."""
    return [start + (end - start) * index / 19 for index in range(20)]


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html_text(text)}</text>'
