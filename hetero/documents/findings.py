"""What a check found before a job or a study costs money: a mistake or a fact that the user must know, with advice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ERROR", "WARNING", "Finding", "findings_json", "findings_text"]

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One mistake, or one fact that the user should know before the work starts."""

    number: str
    """Number of the check, such as ``SM-03``. Its meaning never changes."""
    severity: str
    """``error`` or ``warning``.

    An error means that the work is rejected, that it fails, or that it does not do what the user asked for. A warning
    asks the user to look at the finding.
    """
    found: str
    """Description of the mistake, with the reason why it is a mistake. Never contains a secret."""
    fix: str
    """Steps that remove the mistake."""

    def __str__(self) -> str:
        return f"{self.number} {self.severity}: {self.found}\n  fix: {self.fix}"


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings as text. The last line contains the numbers of errors and warnings."""
    counts = [sum(finding.severity == severity for finding in findings) for severity in (ERROR, WARNING)]
    lines = [*map(str, findings), f"errors: {counts[0]}, warnings: {counts[1]}"]
    return "\n".join(lines)


def findings_json(findings: Sequence[Finding]) -> str:
    """Return the findings as JSON: an object with the list ``findings``."""
    return json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2)
