"""A series of measurements of at most 120 points that covers a run of any length. Pure.

When the series is full, each two neighbouring points become one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from hetero.errors import ConfigError

__all__ = ["MAX_POINTS", "History", "check_columns"]

MAX_POINTS = 120
"""Longest history. Every heartbeat of a host contains its histories, and a chart shows no more points."""

Point = TypeVar("Point")


class History(Generic[Point]):
    """Collects the points of one run.

    Args:
        merge: Returns one point for two consecutive points.
    """

    def __init__(self, merge: Callable[[Point, Point], Point]) -> None:
        self._merge = merge
        self._points: list[Point] = []
        self._pending: Point | None = None
        """One point for the latest added points, which are too few for an entry of ``_points``."""
        self._num_pending = 0
        """Added points that ``_pending`` covers."""
        self._num_per_point = 1
        """Added points that one point covers. It doubles whenever the history is full."""

    def add(self, point: Point) -> None:
        """Add the next point. If the history is full, merge each two neighbours."""
        # A full history has merged its points. So merge new points too, until one covers `_num_per_point` added points.
        self._pending = point if self._pending is None else self._merge(self._pending, point)
        self._num_pending += 1
        if self._num_pending < self._num_per_point:
            return
        self._points.append(self._pending)
        self._pending, self._num_pending = None, 0
        if len(self._points) >= MAX_POINTS:
            # MAX_POINTS is even, so each point has a partner.
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [self._merge(first, second) for first, second in pairs]
            self._num_per_point *= 2

    def points(self) -> list[Point]:
        """Return the points so far, at most `MAX_POINTS`. The last point may cover less time than the other points."""
        return [*self._points, *([] if self._pending is None else [self._pending])]


def check_columns(what: str, length: int, columns: Iterable[Sequence[object]]) -> None:
    """Check that the columns of a history are equally long.

    Args:
        what: What the history is about, for the message.
        length: Length of the first column.
        columns: The other columns.

    Raises:
        ConfigError: If a column has another length.
    """
    other_lengths = sorted({len(column) for column in columns} - {length})
    if other_lengths:
        raise ConfigError(f"columns of a {what}'s history have {other_lengths} entries; expected {length} in each")
