"""The values that ranks have logged, on the wire: one series per metric.

A rank sends all its values after each new one. A launcher keeps the latest. Only the host that writes the job's report
needs them, so heartbeats to other hosts leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hetero.errors import ProtocolError
from hetero.metrics.logged import MAX_NAMES, MAX_VALUES, LoggedMetric, is_metric_name, thinned
from hetero.wire.proto import control_pb2 as pb
from hetero.wire.records import Wire

__all__ = ["MAX_HOST_VALUES", "SERIES", "fit_for_peer"]

MAX_HOST_VALUES = 8_000
"""Limit of the values in one heartbeat, for all ranks of its host together. A value takes 27 bytes."""


def _write(values: Sequence[LoggedMetric] | None) -> Mapping[str, object]:
    """Return the fields of a report for the values of its rank, one message per metric. None means no new values."""
    found: dict[str, list[LoggedMetric]] = {}
    for value in values or ():
        found.setdefault(value.name, []).append(value)
    metrics = [
        pb.MetricSeries(
            name=name,
            # A message's number is never absent. So 0 means no step, and n + 1 means step n.
            step=[0 if each.step is None else each.step + 1 for each in series],
            value=[each.value for each in series],
            at_s=[each.at_s for each in series],
            unix_s=[each.unix_s for each in series],
        )
        for name, series in found.items()
    ]
    return {"metrics": metrics, "has_metrics": values is not None}


def _read(report: pb.RankReport, _outer: object) -> tuple[LoggedMetric, ...] | None:
    """Return the values in a report, in the order of their times. None if they have not changed.

    Raises:
        ProtocolError: If a message is malformed or there are too many values.
    """
    if not report.has_metrics:
        return None
    messages = report.metrics
    if len(messages) > MAX_NAMES or sum(len(each.value) for each in messages) > MAX_VALUES:
        raise ProtocolError(f"a rank sent more than {MAX_NAMES} metrics or {MAX_VALUES} values")
    found = []
    for message in messages:
        columns = message.step, message.value, message.at_s, message.unix_s
        if not is_metric_name(message.name) or len({len(column) for column in columns}) > 1:
            raise ProtocolError(f"a rank sent a malformed metric {message.name[:100]!r}")
        if not all(math.isfinite(number) for column in columns[1:] for number in column):
            raise ProtocolError(f"a rank sent a value of metric {message.name!r} that is not finite")
        found += [
            LoggedMetric(
                name=message.name,
                value=value,
                # `_write` adds 1 to each step, because 0 means no step.
                step=step - 1 if step else None,
                at_s=max(0.0, at_s),
                unix_s=max(0.0, unix_s),
                rank=report.rank,
            )
            for step, value, at_s, unix_s in zip(*columns, strict=True)
        ]
    return tuple(sorted(found, key=lambda value: value.at_s))


SERIES = Wire(write=_write, read=_read)
"""How the values of a rank are sent in its report."""


def fit_for_peer(values: tuple[LoggedMetric, ...] | None, *, num_ranks: int) -> tuple[LoggedMetric, ...] | None:
    """Return the values of one rank for a heartbeat that carries the values of ``num_ranks`` ranks."""
    return None if values is None else thinned(values, max(1, MAX_HOST_VALUES // max(1, num_ranks)))
