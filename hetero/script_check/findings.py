"""What `hetero check SCRIPT` has found."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Finding", "findings_from_json", "findings_json", "findings_text"]


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


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings as text, by file and line."""
    if not findings:
        return "nothing found: data hosts would make the batches that this script makes alone"
    blocks = []
    for each in sorted(findings, key=lambda each: (each.file, each.line)):
        lines = [line.strip() for line in each.to_do.splitlines() if line.strip()]
        blocks.append("\n  ".join([f"{_short(each.file)}:{each.line}: {each.what}", *lines]))
    return "\n\n".join(blocks)


def findings_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON, in the order in which they were found."""
    return json.dumps([dataclasses.asdict(each) for each in findings], indent=2)


def findings_from_json(text: str) -> list[Finding]:
    """Return the findings in a text that `findings_json` has written."""
    return [Finding(**each) for each in json.loads(text)]


def _short(file: str) -> str:
    """Return a path relative to the current folder if it is below that."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
