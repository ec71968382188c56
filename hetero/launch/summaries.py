"""The loader of a rank that takes the most time."""

from __future__ import annotations

import json
from collections.abc import Iterable

from hetero.errors import ConfigError
from hetero.metrics.steps import StepSummary

__all__ = ["longest_summary"]


def longest_summary(summaries_json: Iterable[bytes]) -> StepSummary | None:
    """Return the summary of the loader with the longest total time. None without a valid summary."""
    found = []
    for part in summaries_json:
        try:
            found.append(StepSummary.from_json(json.loads(part)))
        except (ValueError, ConfigError):
            continue  # a malformed summary is logged when the report is written
    return max(found, key=lambda summary: (summary.total_s, summary.num_steps), default=None)
