"""What `hetero check SCRIPT` has found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finding", "findings_json", "findings_text"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that would go wrong, or differ, on data hosts."""

    file: str
    """Path of the user's file."""
    line: int
    """Line in it, from 1."""
    what: str
    """What was found, one line."""
    to_do: str = ""
    """What to write, one or more lines."""


def findings_text(findings: Sequence[Finding], num_batches: int) -> str:
    """Return the findings as text, by file and line.

    Args:
        findings: The findings.
        num_batches: Batches that were compared.
    """
    if not findings:
        return f"nothing found in {num_batches} batches: they are the same with and without data hosts"
    blocks = []
    for each in sorted(findings, key=lambda each: (each.file, each.line)):
        lines = [line.strip() for line in each.to_do.splitlines() if line.strip()]
        blocks.append("\n  ".join([f"{_short(each.file)}:{each.line}: {each.what}", *lines]))
    return "\n\n".join(blocks)


def findings_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON, in the order of the search."""
    return json.dumps([dataclasses.asdict(each) for each in findings], indent=2)


def _short(file: str) -> str:
    """Return a path relative to the current folder if the file is in that folder."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
