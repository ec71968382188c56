"""Examines all subjects, and shows their diagnoses as text or JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from hetero import __version__
from hetero.doctor import leftovers, limits, signals, token, versions
from hetero.doctor.cluster import examine_description, examine_names, examine_platform
from hetero.doctor.connections import examine_ports
from hetero.doctor.parallel import gather
from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, Level, error, warning
from hetero.documents.text import counted, escape_line
from hetero.system.waits import CALL_TIMEOUT_S

__all__ = ["SUBJECTS", "examine", "render_text", "to_json"]

SUBJECTS: Mapping[str, Callable[[Snapshot], list[Diagnosis]]] = {
    "versions": versions.examine,
    "platform": examine_platform,
    "cluster": examine_description,
    "names": examine_names,
    "ports": examine_ports,
    "token": token.examine,
    "signals": signals.examine,
    "cpus": limits.examine_cpus,
    "descriptors": limits.examine_descriptors,
    "shared memory": limits.examine_shared_memory,
    "memory": limits.examine_memory,
    "disk": limits.examine_disk,
    "leftovers": leftovers.examine,
}
"""Subjects of the examination by name, in the order of the output."""

_TIMEOUT_S = 2 * CALL_TIMEOUT_S
"""Time limit for all subjects together. Names and ports take at most half of it. A check of a hung disk never ends."""


def examine(snapshot: Snapshot) -> dict[str, list[Diagnosis]]:
    """Return the diagnoses of each subject. This takes at most `_TIMEOUT_S` seconds.

    If the examination of a subject fails, its diagnosis is one error. If it does not end, its diagnosis is one warning.
    The others are not affected.
    """
    tasks = {name: functools.partial(subject, snapshot) for name, subject in SUBJECTS.items()}
    outcomes = gather(tasks, timeout_s=_TIMEOUT_S)
    return {name: _diagnoses(outcomes.get(name)) for name in SUBJECTS}


def render_text(diagnoses: Mapping[str, Sequence[Diagnosis]]) -> str:
    """Return one line per diagnosis with the advice below it, and a last line with the totals."""
    lines = []
    for subject, entries in diagnoses.items():
        for diagnosis in entries:
            # The messages of some errors have several lines.
            first, *rest = map(escape_line, diagnosis.found.split("\n"))
            lines.append(_columns(diagnosis.level.value, subject, first))
            lines += [_columns("", "", line.strip()) for line in rest]
            if diagnosis.to_do:
                lines.append(_columns("", "", f"to do: {escape_line(diagnosis.to_do)}"))
    levels = [diagnosis.level for entries in diagnoses.values() for diagnosis in entries]
    counts = {level: levels.count(level) for level in Level}
    errors, warnings = counted(counts[Level.ERROR], "error"), counted(counts[Level.WARNING], "warning")
    lines.append(f"{errors}, {warnings}, {counts[Level.OK]} ok")
    return "\n".join(lines) + "\n"


def _columns(level: str, subject: str, text: str) -> str:
    return f"{level:<9}{subject:<16}{text}"


def to_json(diagnoses: Mapping[str, Sequence[Diagnosis]]) -> dict[str, object]:
    """Return the diagnoses as a JSON object."""
    return {
        "hetero": __version__,
        "findings": [
            {"subject": subject, **dataclasses.asdict(diagnosis), "level": diagnosis.level.value}
            for subject, entries in diagnoses.items()
            for diagnosis in entries
        ],
    }


def _diagnoses(outcome: list[Diagnosis] | Exception | None) -> list[Diagnosis]:
    """Return the diagnoses of one subject.

    Args:
        outcome: What the examination returned or raised, or None if it did not end in time.
    """
    if outcome is None:
        # This is only a warning. On a slow host, six examinations once did not end in time, and nothing was wrong.
        to_do = (
            "run hetero doctor again when the machine has less to do; if this does not help, look for a disk, a "
            "network file system or a name server that does not answer"
        )
        return [warning(f"the examination did not end within {_TIMEOUT_S:.0f} s", to_do)]
    if isinstance(outcome, Exception):
        return [error(f"the examination failed: {type(outcome).__name__}: {outcome}", "please report it")]
    return outcome
