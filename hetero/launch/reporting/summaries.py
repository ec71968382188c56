"""The summaries in a report of a rank: by loader, and of the loader that takes the most time."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator

from hetero.errors import ConfigError
from hetero.metrics.steps import StepSummary

__all__ = ["longest_summary", "named_summaries"]


def longest_summary(summaries_json: Iterable[bytes]) -> StepSummary | None:
    """Return the summary of the loader with the longest total time. None without a valid summary."""
    found = _summaries(summaries_json)
    return max(found, key=lambda summary: (summary.total_s, summary.num_steps), default=None)


def named_summaries(summaries_json: Iterable[bytes]) -> dict[str, StepSummary]:
    """Return the summary of each loader by its name in `RankReport.loader`. Namesakes are numbered."""
    found: dict[str, StepSummary] = {}
    counts: collections.Counter[str] = collections.Counter()
    for summary in _summaries(summaries_json):
        counts[summary.name] += 1
        number = counts[summary.name]
        found[summary.name if number == 1 else f"{summary.name}#{number}"] = summary
    return found


def _summaries(summaries_json: Iterable[bytes]) -> Iterator[StepSummary]:
    """Yield a rank's summaries without the malformed ones."""
    for part in summaries_json:
        try:
            yield StepSummary.from_json(part)
        except ConfigError:
            # A malformed summary is logged when the report is written.
            continue
