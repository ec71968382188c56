"""Turns the result of a run of hetero into a canary's point: its report, and what its ranks observed."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from hetero.decide.canary.points import CanaryPoint, LoaderWork, Part, Resources
from hetero.decide.studies.runs import FINISHED, RunResult
from hetero.documents.files import read_bounded
from hetero.documents.records import decode
from hetero.errors import ConfigError
from hetero.metrics.hosts import HostUsage
from hetero.metrics.steps import StepSummary
from hetero.metrics.usage_series import UsageSeries
from hetero.report.model import RankFacts, Report
from hetero.report.overruns import excess_share

__all__ = ["Observed", "point_of", "read_observed"]

logger = logging.getLogger(__name__)

_SHARED_FIELDS = {each.name for each in fields(LoaderWork)} & {each.name for each in fields(StepSummary)} - {"name"}
"""What a summary of steps and the work of a loader both have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What one rank observed of its script, see `hetero.launch.ranks.observed`."""

    began_monotonic_s: float
    ended_monotonic_s: float
    import_s: float

    @property
    def work_s(self) -> float:
        """Time of the script without its imports."""
        return max(0.0, self.ended_monotonic_s - self.began_monotonic_s - self.import_s)


def read_observed(folder: Path) -> list[Observed]:
    """Return what the ranks of a run wrote into a folder. A malformed file is logged and left out."""
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            content = read_bounded(path, str(path))
            found.append(decode(Observed, json.loads(content)))
        except (ConfigError, ValueError, RecursionError) as error:
            logger.warning("the observations %s of a canary run cannot be used: %s", path, error)
    return found


def point_of(result: RunResult, *, fraction: float, observed: Sequence[Observed]) -> CanaryPoint:
    """Return the point of a run.

    Args:
        result: The run's result.
        fraction: Share of the data that the run had.
        observed: What the run's ranks observed of the script. If it is empty, all of the run's time counts as a part
            that may grow, also start-up and imports.
    """
    # Take the rank with the longest work, because the other ranks wait for it.
    longest = max(observed, key=lambda each: each.work_s, default=None)
    if longest is None:
        parts = [Part(name="run", seconds=result.wall_s, grows=True)]
    else:
        # The clocks of the rank and of the study differ a little, so keep the part within the whole.
        work_s = min(longest.work_s, result.wall_s)
        parts = [
            Part(name="start-up and end", seconds=max(0.0, result.wall_s - work_s - longest.import_s), grows=False),
            Part(name="imports", seconds=longest.import_s, grows=False),
            Part(name="script", seconds=work_s, grows=True),
        ]
    report = result.report
    return CanaryPoint(
        run_id=result.run_id,
        fraction=fraction,
        replicate=result.replicate,
        wall_s=result.wall_s,
        parts=tuple(parts),
        loaders=() if report is None else _loaders(report.run.ranks),
        resources=Resources() if report is None else _resources(report, longest),
        excess_share=0.0 if report is None else excess_share(report),
        failure="" if result.state == FINISHED else result.cause or result.state,
    )


def _loaders(ranks: Sequence[RankFacts]) -> tuple[LoaderWork, ...]:
    """Return the loaders of the rank whose steps took the longest."""
    if not ranks:
        return ()
    # Take the rank with the longest steps, because the other ranks wait for this rank in each step.
    longest = max(ranks, key=lambda rank: sum(loader.total_s for loader in rank.loaders))
    return tuple(
        LoaderWork(
            name=label,
            measured_s=summary.total_s,
            **{name: getattr(summary, name) for name in _SHARED_FIELDS},
        )
        for label, summary in longest.labelled
    )


def _resources(report: Report, observed: Observed | None) -> Resources:
    """Return the resources of the trainer host with the highest memory peak, with the mean CPU use of all of them."""
    hosts = [_of_host(usage, observed) for usage in report.run.trainer_usages]
    if not hosts:
        return Resources()
    # One host without enough memory ends the job, so the host with the highest peak counts. Which host this is may be
    # chance, so the CPU use is the mean of all hosts.
    largest = max(hosts, key=lambda host: host.memory_peak_bytes or 0.0)
    cpu_percents = [host.cpu_percent_mean for host in hosts if host.cpu_percent_mean is not None]
    return replace(largest, cpu_percent_mean=sum(cpu_percents) / len(cpu_percents)) if cpu_percents else largest


def _of_host(usage: HostUsage, observed: Observed | None) -> Resources:
    """Return what one host used while the script did the work that grows with the data.

    Args:
        usage: What was measured on the host.
        observed: When the script began and ended. If it is None, the whole run counts.
    """
    series = usage.series
    # A report of a short run has only the means of its readings.
    if not series.begin_s:
        return Resources(
            cpu_percent_mean=usage.cpu_percent_mean,
            memory_mean_bytes=usage.memory_mean_bytes,
            memory_peak_bytes=usage.memory_peak_bytes,
            memory_p99_bytes=usage.memory_p99_bytes,
        )
    # The script's work begins after its imports. Times of the series count from the start of the measurement.
    begin_s, end_s = 0.0, series.end_s[-1]
    if observed is not None and usage.began_monotonic_s is not None:
        begin_s = observed.began_monotonic_s + observed.import_s - usage.began_monotonic_s
        end_s = observed.ended_monotonic_s - usage.began_monotonic_s
    # Indices of the intervals in the part of the run that grows, and of those before it.
    chosen = _within(series, begin_s, end_s)
    before = [i for i in range(len(series.begin_s)) if series.end_s[i] <= series.begin_s[chosen[0]]]
    intervals = [(i, series.end_s[i] - series.begin_s[i]) for i in chosen]
    second_parts = _parts_of_a_second(intervals)
    has_gpu = bool(series.gpu_memory_bytes)

    def mean(values: Sequence[float], part: Sequence[tuple[int, float]] = tuple(intervals)) -> float:
        """Return the mean of some of the chosen intervals, weighted by their durations. Default: all of them."""
        return sum(values[i] * duration for i, duration in part) / sum(duration for _, duration in part)

    # Percentiles are taken over seconds and not over readings, because a long run is read less often than a short one.

    def means(values: Sequence[float]) -> tuple[float, ...]:
        """Return the mean of each second."""
        return tuple(mean(values, part) for part in second_parts)

    def peaks(values: Sequence[float]) -> list[float]:
        """Return the peak of each second in ascending order."""
        return sorted(max(float(values[i]) for i, _ in part) for part in second_parts)

    memory_peaks = peaks(series.memory_peak_bytes)
    gpu_peaks = peaks(series.gpu_memory_bytes) if has_gpu else []
    # The base is the memory just before the part of the run that grows.
    base = float(series.memory_mean_bytes[before[-1]]) if before else 0.0
    return Resources(
        cpu_percent_mean=mean(series.cpu_percent),
        cpu_percents=means(series.cpu_percent),
        # The base is at most the lowest peak, because memory that is freed after the imports does not belong to it.
        memory_base_bytes=min(base, *(float(series.memory_peak_bytes[i]) for i in chosen)),
        memory_mean_bytes=mean(series.memory_mean_bytes),
        memory_p99_bytes=_p99(memory_peaks),
        memory_peak_bytes=memory_peaks[-1],
        gpu_percent_mean=mean(series.gpu_percent) if series.gpu_percent else None,
        gpu_percents=means(series.gpu_percent) if series.gpu_percent else (),
        gpu_memory_mean_bytes=mean(series.gpu_memory_bytes) if has_gpu else None,
        gpu_memory_p99_bytes=_p99(gpu_peaks) if has_gpu else None,
        gpu_memory_peak_bytes=gpu_peaks[-1] if has_gpu else None,
    )


def _parts_of_a_second(intervals: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Return successive intervals, each with its index and duration, in parts of at least a second.

    Percentiles are taken over these parts, because the reading intervals of short and long runs differ. A run of less
    than a second is one part.
    """
    parts: list[list[tuple[int, float]]] = [[]]
    for i, duration in intervals:
        # Ten readings of 0.1 s add up to a little less than a second.
        if sum(each for _, each in parts[-1]) >= 0.999:
            parts.append([])
        parts[-1].append((i, duration))
    # A last part of less than half a second would count like a whole second, so add it to the part before.
    if len(parts) > 1 and sum(each for _, each in parts[-1]) < 0.5:
        last = parts.pop()
        parts[-1] += last
    return parts


def _within(series: UsageSeries, begin_s: float, end_s: float) -> list[int]:
    """Return the indices of the intervals in a part of the run. If it has none, return the one nearest to ``end_s``."""
    middles = [(a + b) / 2 for a, b in zip(series.begin_s, series.end_s, strict=True)]
    chosen = [i for i, middle in enumerate(middles) if begin_s <= middle <= end_s]
    return chosen or [min(range(len(middles)), key=lambda i: abs(middles[i] - end_s))]


def _p99(ordered: Sequence[float]) -> float:
    """Return the 99th percentile of values in ascending order."""
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
