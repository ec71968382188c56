"""Compares the ledgers of two runs, given as paths, and returns the answer as text. The command line calls this.

This is a separate module because `hetero.audit.compare` returns facts, not text.
"""

from __future__ import annotations

from pathlib import Path

from hetero.audit.compare import AuditResult, compare_runs
from hetero.audit.runs import find_run

__all__ = ["audit_paths"]

_MAX_SHOWN = 20


def audit_paths(one: Path, other: Path) -> tuple[bool, str]:
    """Return whether two runs trained on the same data, and the answer in words.

    Args:
        one: A run's folder, or one of its ledgers.
        other: The other run's folder, or one of its ledgers.

    Raises:
        ConfigError: If a path lacks a ledger, if a ledger cannot be read, or if the ledgers cannot be compared.
    """
    runs = find_run("A", one), find_run("B", other)
    result = compare_runs(*runs)
    lines = [f"{run.label}: {run.path}, {_count(len(run.ledgers), 'ledger')}" for run in runs]
    lines += ["", _headline(result)]
    lines += _listed(result.differences)
    if result.notes:
        lines += ["", "Notes:", *_listed(result.notes)]
    return not result.differences, "\n".join(lines)


def _headline(result: AuditResult) -> str:
    """Return the answer in one sentence. With differences, it ends in a colon, because a list of them follows."""
    what = "bit for bit" if result.by_rank else "by the samples of their global batches: their world sizes differ"
    if not result.differences:
        return f"The same data: {_count(result.num_compared, 'batch', 'batches')} are equal {what}."
    if result.by_rank:
        return f"Not the same data ({_count(result.num_compared, 'batch', 'batches')} in common):"
    return f"Not the same data, compared {what} ({_count(result.num_compared, 'batch', 'batches')} in common):"


def _listed(texts: tuple[str, ...]) -> list[str]:
    """Return the first texts as lines of a list, and a line with the number of the others."""
    left = len(texts) - _MAX_SHOWN
    return [f"  {text}" for text in texts[:_MAX_SHOWN]] + ([f"  and {left} more"] if left > 0 else [])


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
