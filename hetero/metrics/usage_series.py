"""A bounded history of a host's resources, and percentiles of many readings in little memory. Pure.

The launcher publishes a host's use several times per second, and must not import numpy. Therefore both have a bounded
size and cheap updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetero.errors import ConfigError
from hetero.system.records import limits

__all__ = ["MAX_POINTS", "Percentiles", "SeriesLog", "UsagePoint", "UsageSeries"]

MAX_POINTS = 120
"""Longest history. If it is full, neighbouring points are merged, so it covers a run of any length."""
_BIN = math.log(1.01)
"""Width of a bin of `Percentiles` on a logarithmic scale. A percentile is therefore exact within 1 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSeries:
    """History of a host's resources as columns of equal length, one entry per interval, in order.

    It is columns and not a list of points because every heartbeat of a host contains it.
    """

    begin_s: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    """Begin of each interval, in seconds since the first reading."""
    end_s: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    cpu_percent: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS, maximum=1e7))
    """Mean CPU use of each interval, in percent of one logical CPU."""
    memory_mean_bytes: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    memory_peak_bytes: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    gpu_percent: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS, maximum=100))
    """Empty without GPUs."""
    gpu_memory_bytes: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    """Highest sum over the GPUs of each interval. Empty without GPUs."""

    def __post_init__(self) -> None:
        columns = (self.end_s, self.cpu_percent, self.memory_mean_bytes, self.memory_peak_bytes)
        optional = (self.gpu_percent, self.gpu_memory_bytes)
        lengths = {len(column) for column in columns} | {len(column) for column in optional if column}
        if lengths - {len(self.begin_s)}:
            raise ConfigError(
                f"the columns of a host's history have {sorted(lengths)} entries; expected {len(self.begin_s)} in each"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePoint:
    """Resources over one interval. Values that could not be read are None."""

    begin_s: float
    end_s: float
    cpu_percent: float
    memory_mean_bytes: float
    memory_peak_bytes: int
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None

    @property
    def duration_s(self) -> float:
        """Length of the interval in seconds."""
        return self.end_s - self.begin_s


class SeriesLog:
    """Collects the points of one run. The number of points stays at most `MAX_POINTS`."""

    def __init__(self) -> None:
        self._points: list[UsagePoint] = []
        self._pending: list[UsagePoint] = []
        self._num_per_point = 1
        """Intervals between readings that one point covers. It doubles whenever the history is full."""

    def add(self, point: UsagePoint) -> None:
        """Add the interval between two readings. Intervals must be added in order and must not be empty."""
        self._pending.append(point)
        if len(self._pending) < self._num_per_point:
            return
        self._points.append(_merged(self._pending))
        self._pending.clear()
        if len(self._points) >= MAX_POINTS:
            self._points = [_merged(self._points[i : i + 2]) for i in range(0, len(self._points), 2)]
            self._num_per_point *= 2

    def series(self) -> UsageSeries:
        """Return the history so far, including the intervals of an unfinished point. Values are rounded."""
        points = [*self._points, *([_merged(self._pending)] if self._pending else [])]
        gpu_percents = [point.gpu_percent for point in points if point.gpu_percent is not None]
        gpu_memory = [point.gpu_memory_bytes for point in points if point.gpu_memory_bytes is not None]
        return UsageSeries(
            begin_s=tuple(round(point.begin_s, 3) for point in points),
            end_s=tuple(round(point.end_s, 3) for point in points),
            cpu_percent=tuple(round(point.cpu_percent, 1) for point in points),
            memory_mean_bytes=tuple(round(point.memory_mean_bytes) for point in points),
            memory_peak_bytes=tuple(point.memory_peak_bytes for point in points),
            gpu_percent=tuple(round(value, 1) for value in gpu_percents) if len(gpu_percents) == len(points) else (),
            gpu_memory_bytes=tuple(gpu_memory) if len(gpu_memory) == len(points) else (),
        )


def _merged(points: list[UsagePoint]) -> UsagePoint:
    """Return one point for consecutive points. Means are weighted with the durations."""
    if len(points) == 1:
        return points[0]
    total_s = sum(point.duration_s for point in points)

    def mean(values: list[float]) -> float:
        return sum(value * point.duration_s for value, point in zip(values, points, strict=True)) / total_s

    gpu_percents = [point.gpu_percent for point in points if point.gpu_percent is not None]
    gpu_memory = [point.gpu_memory_bytes for point in points if point.gpu_memory_bytes is not None]
    return UsagePoint(
        begin_s=points[0].begin_s,
        end_s=points[-1].end_s,
        cpu_percent=mean([point.cpu_percent for point in points]),
        memory_mean_bytes=mean([point.memory_mean_bytes for point in points]),
        memory_peak_bytes=max(point.memory_peak_bytes for point in points),
        gpu_percent=mean(gpu_percents) if len(gpu_percents) == len(points) else None,
        gpu_memory_bytes=max(gpu_memory) if gpu_memory else None,
    )


class Percentiles:
    """Percentiles of any number of values, within 1 %. The memory is that of a few hundred counters."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._num_zero = 0
        self._num_values = 0
        self._largest = 0.0

    def add(self, value: float) -> None:
        """Count a value, which must not be negative."""
        self._num_values += 1
        self._largest = max(self._largest, value)
        if value <= 0:
            self._num_zero += 1
            return
        key = math.floor(math.log(value) / _BIN)
        self._counts[key] = self._counts.get(key, 0) + 1

    def get(self, share: float) -> float | None:
        """Return the value that a share of all values does not exceed, or None without values.

        Args:
            share: Share in (0, 1], for example 0.99.
        """
        if not self._num_values:
            return None
        wanted = share * self._num_values
        if self._num_zero >= wanted:
            return 0.0
        seen = self._num_zero
        for key in sorted(self._counts):
            seen += self._counts[key]
            if seen >= wanted:
                return min(self._largest, math.exp((key + 0.5) * _BIN))
        return self._largest
