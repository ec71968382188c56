"""A bounded history of the steps of one loader."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero.documents.records import limits
from hetero.metrics.history import MAX_POINTS, History, check_columns

__all__ = ["StepLog", "StepSeries", "without_history"]


class _Interval(NamedTuple):
    """One or more consecutive steps. Times are in seconds."""

    begin_s: float
    end_s: float
    num_steps: int
    compute_s: float
    """Sum over the steps."""
    data_wait_s: float
    """Sum over the steps."""


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
        """Add a step that has just ended. It consists of its compute and of the data wait after it."""
        self.add(_Interval(end_s - compute_s - data_wait_s, end_s, 1, compute_s, data_wait_s))

    def series(self) -> StepSeries:
        """Return the history so far. Times are rounded to 0.1 ms."""
        points = self.points()
        return StepSeries(
            # If the start of the run is not known, the time 0 is the first delivery, and a step began before it.
            begin_s=tuple(round(max(0.0, point.begin_s), 4) for point in points),
            end_s=tuple(round(max(0.0, point.end_s), 4) for point in points),
            num_steps=tuple(point.num_steps for point in points),
            compute_s=tuple(round(point.compute_s / point.num_steps, 4) for point in points),
            data_wait_s=tuple(round(point.data_wait_s / point.num_steps, 4) for point in points),
        )


def _merged(first: _Interval, second: _Interval) -> _Interval:
    """Return one interval for two consecutive ones."""
    return _Interval(
        begin_s=first.begin_s,
        end_s=second.end_s,
        num_steps=first.num_steps + second.num_steps,
        compute_s=first.compute_s + second.compute_s,
        data_wait_s=first.data_wait_s + second.data_wait_s,
    )


@functools.lru_cache
def without_history(summary_json: bytes) -> bytes:
    """Return the JSON of a `StepSummary` without its history. Other JSON is returned unchanged.

    A host sends the summaries of its ranks to every other host with each heartbeat. The cache saves the work for all
    hosts but the first.
    """
    try:
        summary = json.loads(summary_json)
    except ValueError:
        return summary_json
    if not isinstance(summary, dict) or summary.pop("history", None) is None:
        return summary_json
    return json.dumps(summary).encode()
