"""A bounded history of the steps of one loader."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field

from hetero.documents.records import limits
from hetero.metrics.history import MAX_POINTS, History, check_columns

__all__ = ["StepLog", "StepSeries", "without_history"]

_Interval = tuple[float, float, int, float, float]
"""Begin and end in seconds, number of steps, and the sums of their compute and data wait in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeries:
    """History of steps as columns of equal length, one entry per interval of one or more steps, in order."""

    begin_s: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    """Begin of each interval in seconds since the start of the run, or since the first step if that is not known."""
    end_s: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    num_steps: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS, maximum=2**53))
    """Steps of each interval. All have equally many, except the last."""
    compute_s: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    """Mean compute of a step of each interval."""
    data_wait_s: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))

    def __post_init__(self) -> None:
        columns = (self.end_s, self.num_steps, self.compute_s, self.data_wait_s)
        check_columns("loader", len(self.begin_s), columns)


class StepLog(History[_Interval]):
    """Collects the steps of one run. Not thread-safe."""

    def __init__(self) -> None:
        super().__init__(_merged)

    def add_step(self, end_s: float, compute_s: float, data_wait_s: float) -> None:
        """Add a step that has just ended."""
        self.add((end_s - compute_s - data_wait_s, end_s, 1, compute_s, data_wait_s))

    def series(self) -> StepSeries:
        """Return the history so far. Times are rounded to 0.1 ms."""
        points = self.points()
        return StepSeries(
            begin_s=tuple(round(max(0.0, point[0]), 4) for point in points),
            end_s=tuple(round(max(0.0, point[1]), 4) for point in points),
            num_steps=tuple(point[2] for point in points),
            compute_s=tuple(round(point[3] / point[2], 4) for point in points),
            data_wait_s=tuple(round(point[4] / point[2], 4) for point in points),
        )


def _merged(first: _Interval, second: _Interval) -> _Interval:
    return first[0], second[1], first[2] + second[2], first[3] + second[3], first[4] + second[4]


@functools.lru_cache
def without_history(summary_json: bytes) -> bytes:
    """Return the JSON of a summary without its history. Anything else is returned as it is.

    A host sends the summaries of its ranks to each other host, once per heartbeat. The result is kept meanwhile.
    """
    try:
        summary = json.loads(summary_json)
    except ValueError:
        return summary_json
    if not isinstance(summary, dict) or summary.pop("history", None) is None:
        return summary_json
    return json.dumps(summary).encode()
