"""A series of a host's resources of bounded length, and percentiles of many readings in little memory. Pure.

The launcher publishes the use of its host several times per second, and must not import numpy. Therefore the series and
the percentiles have a bounded size, and adding a reading is cheap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hetero.documents.records import limits
from hetero.metrics.history import MAX_POINTS, History, check_columns

__all__ = ["Percentiles", "SeriesLog", "UsagePoint", "UsageSeries"]

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
    cpu_percent: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    """Mean CPU use of each interval, in percent of one logical CPU."""
    memory_mean_bytes: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    memory_peak_bytes: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    gpu_percent: tuple[float, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS, maximum=100))
    """Empty without GPUs."""
    gpu_memory_bytes: tuple[int, ...] = field(default=(), metadata=limits(max_items=MAX_POINTS))
    """Highest sum over the GPUs of each interval. Empty without GPUs."""

    def __post_init__(self) -> None:
        of_gpus = [column for column in (self.gpu_percent, self.gpu_memory_bytes) if column]
        columns = (self.end_s, self.cpu_percent, self.memory_mean_bytes, self.memory_peak_bytes, *of_gpus)
        check_columns("host", len(self.begin_s), columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsagePoint:
    """Resources over one interval. None replaces values that could not be read."""

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


class SeriesLog(History[UsagePoint]):
    """Collects the intervals between two readings, in order. No interval is empty."""

    def __init__(self) -> None:
        super().__init__(_merged)

    def series(self) -> UsageSeries:
        """Return the history so far. Values are rounded."""
        points = self.points()
        # The columns of a series are equally long. So leave out a column of the GPUs that lacks a value.
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


def _merged(first: UsagePoint, second: UsagePoint) -> UsagePoint:
    """Return one point for two consecutive points. Means are weighted with the durations."""
    total_s = first.duration_s + second.duration_s

    def mean(value: float, other: float) -> float:
        return (value * first.duration_s + other * second.duration_s) / total_s

    # If a GPU can no longer be read, later points lack its reading. The mean utilisation needs both readings. One
    # reading is enough for the largest memory.
    has_gpus = first.gpu_percent is not None and second.gpu_percent is not None
    gpu_memory = [point.gpu_memory_bytes for point in (first, second) if point.gpu_memory_bytes is not None]
    return UsagePoint(
        begin_s=first.begin_s,
        end_s=second.end_s,
        cpu_percent=mean(first.cpu_percent, second.cpu_percent),
        memory_mean_bytes=mean(first.memory_mean_bytes, second.memory_mean_bytes),
        memory_peak_bytes=max(first.memory_peak_bytes, second.memory_peak_bytes),
        gpu_percent=mean(first.gpu_percent or 0.0, second.gpu_percent or 0.0) if has_gpus else None,
        gpu_memory_bytes=max(gpu_memory) if gpu_memory else None,
    )


class Percentiles:
    """Mean, maximum and percentiles of any number of values. They need the memory of a few hundred counters.

    The values are not kept. They are counted in bins whose bounds grow by 1 % from bin to bin, so percentiles are
    within 1 %.
    """

    def __init__(self) -> None:
        self._bins: dict[float, tuple[int, float]] = {}
        """Number and sum of the values in each bin, by the logarithm of its lower bound. Zeros have the key -inf."""
        self._num_values = 0
        self._sum = 0.0
        self.largest: float | None = None

    def add(self, value: float) -> None:
        """Count a value, which must not be negative."""
        self._num_values += 1
        self._sum += value
        self.largest = max(self.largest or 0.0, value)
        log_bound = math.floor(math.log(value) / _BIN) if value > 0 else -math.inf
        num_in_bin, bin_sum = self._bins.get(log_bound, (0, 0.0))
        self._bins[log_bound] = num_in_bin + 1, bin_sum + value

    @property
    def mean(self) -> float | None:
        """Mean of all values, or None without values."""
        return self._sum / self._num_values if self._num_values else None

    def get(self, share: float) -> float | None:
        """Return a percentile, for example the value that 99 % of all values do not exceed. None without values.

        The result is the mean of the values in the percentile's bin.

        Args:
            share: The percentile as a share in (0, 1], for example 0.99.
        """
        num_below, bin_mean = 0, None
        for _, (num_in_bin, bin_sum) in sorted(self._bins.items()):
            num_below, bin_mean = num_below + num_in_bin, bin_sum / num_in_bin
            if num_below >= share * self._num_values:
                break
        return bin_mean
