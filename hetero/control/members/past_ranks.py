"""What the ranks of this host have counted and logged before the trainer group was restarted. Pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from hetero.control.status import RankReport
from hetero.metrics.logged import MAX_VALUES, LoggedMetric, thinned

__all__ = ["PastRanks"]


class PastRanks:
    """The counters and logged values of this host's ranks from earlier generations."""

    def __init__(self) -> None:
        self.counters: collections.Counter[str] = collections.Counter()
        self._metrics: dict[int, tuple[LoggedMetric, ...]] = {}

    def take(self, reports: Iterable[RankReport]) -> None:
        """Keep the figures of ranks whose generation ends."""
        for report in reports:
            self.counters.update(report.counters)
            self._metrics[report.rank] = report.metrics or ()

    def merged(self, report: RankReport, known: RankReport | None) -> RankReport:
        """Return a new report with all logged values of its rank, including those of earlier generations.

        Args:
            report: The new report. Its values are None if they have not changed since ``known``.
            known: The report before of the same rank and generation, if there is one. Its values are complete.
        """
        past = self._metrics.get(report.rank, ())
        if report.metrics is not None:
            return dataclasses.replace(report, metrics=thinned([*past, *report.metrics], MAX_VALUES))
        return dataclasses.replace(report, metrics=past if known is None else known.metrics)
