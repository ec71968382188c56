"""One canary run as the forecast sees it: how much data it had, and what it used. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from hetero.documents.records import limits

__all__ = [
    "MAX_FRACTION",
    "MIN_FRACTIONS",
    "MIN_RUNS",
    "CanaryPoint",
    "LoaderWork",
    "Part",
    "Resources",
    "mean_excess",
]

MAX_FRACTION = 0.5
"""Largest fraction of a canary run."""
MIN_RUNS = 4
"""Runs of each cluster that a forecast needs."""
MIN_FRACTIONS = 3
"""Different fractions that a forecast needs, because two points are always on a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a run's time."""

    name: str
    """For example ``start-up``, ``imports``, ``download`` or ``script``."""
    seconds: float
    grows: bool
    """Whether the time may depend on the amount of data. If not, the whole job has the same part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWork:
    """What one loader of the script delivered, on the rank that took longest. Counts include the warm-up."""

    name: str
    num_steps: int
    num_samples: int
    batch_samples: int
    """Samples in the largest batch."""
    num_steps_measured: int
    """Steps after the warm-up."""
    num_samples_measured: int
    measured_s: float
    """Time of the measured steps, compute and data wait."""
    dataset_samples: int | None = None
    pass_samples: int | None = None
    """Samples of a pass over all ranks."""
    num_passes: int
    num_complete_passes: int
    max_in_flight: int
    """Most batches that were requested and not yet delivered. 0 if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Resources of the host that used the most, over the part of the run that grows. None if unknown."""

    cpu_percent_mean: float | None = None
    """In percent of one logical CPU."""
    cpu_percents: tuple[float, ...] = ()
    """CPU use of equal intervals, for percentiles."""
    memory_base_bytes: float | None = None
    """Memory before the part that grows: the launcher, the interpreter and the imported libraries."""
    memory_mean_bytes: float | None = None
    memory_p99_bytes: float | None = None
    memory_peak_bytes: float | None = None
    gpu_percent_mean: float | None = None
    gpu_percents: tuple[float, ...] = ()
    gpu_memory_mean_bytes: float | None = None
    gpu_memory_p99_bytes: float | None = None
    gpu_memory_peak_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryPoint:
    """One canary run."""

    run_id: str
    fraction: float = field(metadata=limits(maximum=1.0))
    """Share of the whole data that the run really had. Files are whole, so it differs from the share asked for."""
    replicate: int
    wall_s: float
    """Time that is billed."""
    parts: tuple[Part, ...]
    """Parts of `wall_s`. Their sum is at most `wall_s`; the rest is a fixed part."""
    loaders: tuple[LoaderWork, ...] = ()
    resources: Resources = Resources()
    excess_share: float = field(default=0.0, metadata=limits(maximum=1.0))
    """Largest share of its time that may be due to other work of the machine, see `hetero.metrics.excess`."""
    failure: str = ""
    """Why the run failed. Empty if it finished."""

    @property
    def growing_s(self) -> float:
        """Time of the parts that may grow with the data."""
        return sum(part.seconds for part in self.parts if part.grows)

    @property
    def fixed_s(self) -> float:
        """Time of everything else."""
        return max(0.0, self.wall_s - self.growing_s)


def mean_excess(points: Sequence[CanaryPoint]) -> float:
    """Return the mean excess of the finished runs, because a forecast is about the mean of their times."""
    return statistics.fmean([point.excess_share for point in points if not point.failure] or [0.0])
