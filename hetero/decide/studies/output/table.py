"""The results of a study as a table, for CSV and Parquet: one row per run."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero.decide.studies.placeholders import level_text
from hetero.decide.studies.runs import RunResult
from hetero.decide.studies.statistics import best_value, quality_after, time_to_quality
from hetero.decide.studies.study_file import Metric
from hetero.errors import ConfigError
from hetero.metrics.logged import last_values
from hetero.report.model import Report

__all__ = [
    "CSV_FILE_NAME",
    "PARQUET_FILE_NAME",
    "Cell",
    "Row",
    "by_levels",
    "communication_ratio",
    "csv_text",
    "rows",
    "write_parquet",
]

CSV_FILE_NAME = "runs.csv"
PARQUET_FILE_NAME = "runs.parquet"

Cell = str | int | float | bool | None
Row = dict[str, Cell]

COMMUNICATION, COMPUTATION = "communication_s", "computation_s"
"""Metrics that a script may log: seconds that ranks communicated and computed since the last value."""


def rows(results: Sequence[RunResult], *, metrics: Sequence[Metric] = ()) -> list[Row]:
    """Return a row for each run. All rows have the same columns in the same order. A value that is not known is None.

    The columns are: ``run_id``, levels and derived quantities, ``replicate``, ``state``, ``exit_code``, ``cause``,
    ``started_at``, ``wall_s``, a column ``PHASE_s`` per phase, ``usd``, then from the report ``step_time_s``,
    ``step_time_least_s`` (its lower bound in an emulated run), ``data_wait_per_step_s``, ``samples_per_s``,
    ``cpu_percent``, ``memory_bytes``, ``gpu_percent``, ``gpu_memory_bytes``, then the last value of each metric, and
    for each of ``metrics`` its best value, the time to its target, and its quality after each stated time. The phases
    are parts of ``wall_s``. A phase with the name of a level gets ``phase_`` in front. A logged metric with the name
    of another column gets ``metric_`` in front.

    Args:
        results: The results.
        metrics: Metrics of quality, see `Metric`.
    """
    measured = [_measured(result) for result in results]
    computed = [_computed(result, metrics) for result in results]
    # Collect the names of all rows, because a metric must have the same column in each row. The computed acc_best of
    # the metric acc once replaced a logged acc_best.
    other_columns = {name for row in (*measured, *computed) for name in row}
    found = []
    for result, measured_row, computed_row in zip(results, measured, computed, strict=True):
        logged_row = {
            f"metric_{name}" if name in other_columns else name: value
            for name, value in last_values(result.metrics).items()
        }
        found.append({**measured_row, **logged_row, **computed_row})
    columns = _in_order([list(row) for row in found])
    return [{name: row.get(name) for name in columns} for row in found]


def _in_order(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return all names once. If only some lists have a name, it comes after the name that it follows in these lists."""
    merged: list[str] = []
    for names in lists:
        place_of_next = 0
        for name in names:
            if name not in merged:
                merged.insert(place_of_next, name)
            place_of_next = merged.index(name) + 1
    return merged


def _measured(result: RunResult) -> Row:
    """Return the columns that a run itself has: levels, state, times, cost, figures of its report."""
    row: Row = {"run_id": result.run_id, **result.levels, "replicate": result.replicate}
    row |= {
        "state": result.state,
        "exit_code": result.exit_code,
        "cause": result.cause,
        "started_at": result.started_at,
        "wall_s": result.wall_s,
    }
    # A level may have the name of a phase, such as start_s. Then the phase gets another name.
    for phase, seconds in result.phases.items():
        name = f"{phase.replace(' ', '_')}_s"
        row[f"phase_{name}" if name in result.levels else name] = seconds
    return {**row, "usd": result.usd, **_from_report(result.report)}


def _computed(result: RunResult, metrics: Sequence[Metric]) -> Row:
    """Return the columns that follow from the metrics of a run."""
    row: Row = {}
    for metric in metrics:
        row[f"{metric.name}_best"] = best_value(result.metrics, metric)
        if metric.target is not None:
            row[f"{metric.name}_time_to_target_s"] = time_to_quality(result.metrics, metric)
        for after_s in metric.after_s:
            shown = int(after_s) if after_s.is_integer() else after_s
            row[f"{metric.name}_after_{shown}s"] = quality_after(result.metrics, metric, after_s)
    row["communication_over_computation"] = communication_ratio(result)
    return row


def _from_report(report: Report | None) -> Row:
    """Return the columns that come from a report. Each is None without a report. The data hosts do not count."""
    headline = None if report is None else report.headline
    usages = () if report is None else report.run.trainer_usages

    def figure(name: str) -> float | None:
        found = getattr(headline, name, None)
        return None if found is None else float(found.value)

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return {
        "step_time_s": figure("step_time_mean"),
        "step_time_least_s": figure("step_time_least"),
        "data_wait_per_step_s": figure("data_wait_mean"),
        "samples_per_s": figure("samples_per_s"),
        "cpu_percent": mean([usage.cpu_percent_mean for usage in usages]),
        "memory_bytes": max((usage.memory_peak_bytes for usage in usages), default=None),
        "gpu_percent": mean([usage.gpu_percent_mean for usage in usages]),
        # If no host has a reading of its GPUs, the largest is 0, which becomes None.
        "gpu_memory_bytes": max((usage.gpu_memory_peak_bytes or 0 for usage in usages), default=0) or None,
    }


def communication_ratio(result: RunResult) -> float | None:
    """Return communication / computation of a run, over all ranks. None if they did not log both.

    A step of a rank counts only if both were logged for it, because long series are thinned. If a script logs no steps,
    the n-th values belong together.
    """

    def by_step(name: str) -> dict[tuple[int, int], float]:
        own = [value for value in result.metrics if value.name == name]
        return {(each.rank, at if each.step is None else each.step): each.value for at, each in enumerate(own)}

    communication, computation = by_step(COMMUNICATION), by_step(COMPUTATION)
    shared = communication.keys() & computation.keys()
    computation_s = sum(computation[key] for key in shared)
    return sum(communication[key] for key in shared) / computation_s if computation_s > 0 else None


def csv_text(table: Sequence[Row]) -> str:
    """Return the table as CSV. A value that is not known is empty."""
    columns = list(table[0]) if table else ["run_id"]
    target = io.StringIO()
    writer = csv.DictWriter(target, columns, lineterminator="\n")
    writer.writeheader()
    for row in table:
        writer.writerow({name: None if value is None else level_text(value) for name, value in row.items()})
    return target.getvalue()


def write_parquet(path: Path, table: Sequence[Row]) -> bool:
    """Write the table as Parquet. Return False if pyarrow is not installed.

    Raises:
        OSError: If the file cannot be written.
        ConfigError: If a column has values that no type of a column holds.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError:
        return False
    columns = {name: _column([row[name] for row in table]) for name in (table[0] if table else {})}
    try:
        content = pa.table(columns)
    except (pa.ArrowException, OverflowError) as error:
        raise ConfigError(f"the results cannot be written to {path}: {error}") from error
    parquet.write_table(content, path)
    return True


def _column(values: Sequence[Cell]) -> list[Cell]:
    """Return the values with one type, which a column of Parquet needs.

    Whole and other numbers together become floats, and any other mixture of types becomes texts. Whole numbers beyond
    64 bits become texts too, because no type of a column holds them exactly.
    """
    kinds = {type(value) for value in values if value is not None}
    is_too_large = kinds == {int} and any(isinstance(value, int) and not -(2**63) <= value < 2**63 for value in values)
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if is_too_large or len(kinds) > 1:
        return [None if value is None else str(value) for value in values]
    return list(values)


def by_levels(results: Sequence[RunResult], names: Sequence[str]) -> Mapping[tuple[object, ...], list[RunResult]]:
    """Return the results grouped by their values of some quantities. Groups are in the order of their first result."""
    found: dict[tuple[object, ...], list[RunResult]] = {}
    for result in results:
        found.setdefault(tuple(result.levels.get(name) for name in names), []).append(result)
    return found
