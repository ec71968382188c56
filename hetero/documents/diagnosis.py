"""The results of an examination of a host. Each subject of `hetero doctor` and each platform returns them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Diagnosis", "Level", "error", "ok", "warning"]


class Level(enum.Enum):
    """Meaning of a diagnosis for a job."""

    OK = "ok"
    WARNING = "warning"
    """A job runs, but it may be slow, be open to other processes, or lose data."""
    ERROR = "error"
    """A job fails on this host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One fact about this host, and advice."""

    level: Level
    found: str
    """One sentence without a full stop. It never contains a secret."""
    to_do: str = ""
    """Advice. Empty if the level is OK."""
    details: Mapping[str, object] = field(default_factory=dict)
    """Data behind the sentence as JSON values, for ``--json`` only."""


def ok(found: str, **details: object) -> Diagnosis:
    """Return a diagnosis that needs no action."""
    return Diagnosis(level=Level.OK, found=found, details=details)


def warning(found: str, to_do: str, **details: object) -> Diagnosis:
    """Return the diagnosis of a problem that does not make a job fail."""
    return Diagnosis(level=Level.WARNING, found=found, to_do=to_do, details=details)


def error(found: str, to_do: str, **details: object) -> Diagnosis:
    """Return the diagnosis of a problem that makes a job fail."""
    return Diagnosis(level=Level.ERROR, found=found, to_do=to_do, details=details)
