"""No duration, lease or order depends on the wall clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero

PACKAGE = Path(hetero.__file__).parent
WALL_CLOCK = {"time.time", "time.time_ns", "time.strftime", "time.localtime", "time.gmtime"}
WALL_CLOCK |= {"dt.datetime.now", "datetime.now", "datetime.datetime.now", "dt.date.today", "datetime.utcnow"}
LABELS = {
    "launch/certificates.py: datetime.now",  # how long certificates are valid
    "launch/host.py: time.time",  # when the job began, for the report
    "launch/simulate.py: time.strftime",  # part of a job's name
}


def wall_clock_calls() -> Iterator[str]:
    """Yield file and function of each call that reads the wall clock."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in WALL_CLOCK:
                yield f"{path.relative_to(PACKAGE)}: {ast.unparse(node.func)}"


@pytest.mark.fault("F25")
def test_wall_clock_is_read_for_labels_only() -> None:
    assert set(wall_clock_calls()) == LABELS
