"""The results of an examination."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Finding", "Level", "error", "ok", "warning"]


class Level(enum.Enum):
    """Meaning of a finding for a job."""

    OK = "ok"
    WARNING = "warning"
    """A job runs, but something about it will be slow, open or lost."""
    ERROR = "error"
    """A job fails on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact about this host, and advice."""

    level: Level
    found: str
    """One sentence without a full stop. It never contains a secret."""
    to_do: str = ""
    """Advice. Empty if the level is OK."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Data behind the sentence as JSON values, for ``--json`` only."""


def ok(found: str, **details: object) -> Finding:
    """Return a finding that needs no action."""
    return Finding(level=Level.OK, found=found, details=details)


def warning(found: str, to_do: str, **details: object) -> Finding:
    """Return a finding that a job survives."""
    return Finding(level=Level.WARNING, found=found, to_do=to_do, details=details)


def error(found: str, to_do: str, **details: object) -> Finding:
    """Return a finding that makes a job fail."""
    return Finding(level=Level.ERROR, found=found, to_do=to_do, details=details)
