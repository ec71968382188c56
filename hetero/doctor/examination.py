"""All subjects together, and their findings as text and as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from hetero.doctor import (
    cluster,
    cpus,
    descriptors,
    disk,
    leftovers,
    names,
    ports,
    proxies,
    shared_memory,
    signals,
    token,
    versions,
)
from hetero.doctor.finding import Finding, Level, error
from hetero.doctor.surroundings import Surroundings
from hetero.doctor.waiting import gather
from hetero.system.logs import escape_line
from hetero.version import __version__

__all__ = ["SUBJECTS", "examine", "render_text", "to_json"]

SUBJECTS: Mapping[str, Callable[[Surroundings], list[Finding]]] = {
    "versions": versions.examine,
    "cluster": cluster.examine,
    "names": names.examine,
    "ports": ports.examine,
    "proxies": proxies.examine,
    "token": token.examine,
    "signals": signals.examine,
    "cpus": cpus.examine,
    "descriptors": descriptors.examine,
    "shared memory": shared_memory.examine,
    "disk": disk.examine,
    "leftovers": leftovers.examine,
}
"""Subjects of the examination by name, in the order of the output."""

_TIMEOUT_S = 12.0
"""Time limit for everything. Names and ports need at most half of it, a disk that hangs may need any time."""
_INDENT = " " * 25


def examine(surroundings: Surroundings) -> dict[str, list[Finding]]:
    """Return the findings about each subject, after some seconds at most.

    A subject whose examination fails or does not end counts as one error. The others are examined in any case.
    """
    tasks = {name: functools.partial(subject, surroundings) for name, subject in SUBJECTS.items()}
    outcomes = gather(tasks, timeout_s=_TIMEOUT_S)
    return {name: _findings(outcomes.get(name)) for name in SUBJECTS}


def render_text(findings: Mapping[str, Sequence[Finding]]) -> str:
    """Return one line per finding with the advice below it, and a last line with the totals."""
    lines = []
    for subject, entries in findings.items():
        for finding in entries:
            first, *rest = map(escape_line, finding.found.split("\n"))
            lines.append(f"{finding.level.value:<9}{subject:<16}{first}")
            lines += [f"{_INDENT}{line.strip()}" for line in rest]
            if finding.to_do:
                lines.append(f"{_INDENT}to do: {escape_line(finding.to_do)}")
    counts = {level: sum(finding.level is level for each in findings.values() for finding in each) for level in Level}
    lines.append(f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.OK]} ok")
    return "\n".join(lines) + "\n"


def to_json(findings: Mapping[str, Sequence[Finding]]) -> dict[str, object]:
    """Return the findings as a JSON object."""
    return {
        "hetero": __version__,
        "findings": [
            {
                "subject": subject,
                "level": finding.level.value,
                "found": finding.found,
                "to_do": finding.to_do,
                "details": dict(finding.details),
            }
            for subject, entries in findings.items()
            for finding in entries
        ],
    }


def _findings(outcome: list[Finding] | Exception | None) -> list[Finding]:
    if outcome is None:
        to_do = "look for a disk, a network file system or a name server that does not answer"
        return [error(f"the examination did not end within {_TIMEOUT_S:.0f} s", to_do)]
    if isinstance(outcome, Exception):
        return [error(f"the examination failed: {type(outcome).__name__}: {outcome}", "please report it")]
    return outcome
