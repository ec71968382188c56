"""What an examination says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Finding", "Level", "error", "ok", "warning"]


class Level(enum.Enum):
    """What a finding means for a job."""

    OK = "ok"
    WARNING = "warning"
    """A job runs; something about it will be slow, open or lost."""
    ERROR = "error"
    """A job fails on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact about this host, and what to do about it."""

    level: Level
    found: str
    """One sentence without a full stop; never a secret."""
    to_do: str = ""
    """Empty if the level is OK."""
    details: Mapping[str, object] = field(default_factory=dict)
    """For ``--json`` only: what the sentence sums up, as JSON has it."""


def ok(found: str, **details: object) -> Finding:
    """Return a finding that needs nothing to be done."""
    return Finding(level=Level.OK, found=found, details=details)


def warning(found: str, to_do: str, **details: object) -> Finding:
    """Return a finding that a job survives."""
    return Finding(level=Level.WARNING, found=found, to_do=to_do, details=details)


def error(found: str, to_do: str, **details: object) -> Finding:
    """Return a finding that a job fails of."""
    return Finding(level=Level.ERROR, found=found, to_do=to_do, details=details)
