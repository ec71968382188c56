"""No duration, lease or order depends on the wall clock."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hetero

PACKAGE = Path(hetero.__file__).parent
WALL_CLOCK = {f"time.{name}" for name in ("time", "time_ns", "strftime", "localtime", "gmtime", "ctime", "asctime")}
WALL_CLOCK |= {"time.clock_gettime", "time.clock_gettime_ns"}
WALL_CLOCK |= {f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")} | {"datetime.date.today"}
LABELS = {
    "doctor/token.py: time.time",  # a certificate's end is a date
    "wire/certificates.py: datetime.datetime.now",  # how long certificates are valid
    "launch/host.py: time.time",  # a certificate's end is a date
    "launch/placement.py: time.time",  # when the job began, for the report
    "launch/reporting/profiling.py: datetime.datetime.now",  # when a profile was measured
    "metrics/logged.py: time.time",  # when the script logged a metric
    "sagemaker/study_executor.py: datetime.datetime.now",  # when a run was submitted
    "sagemaker/study_executor.py: time.gmtime",  # part of a training job's name
    "sagemaker/study_executor.py: time.strftime",  # likewise
    "simulate/simulate.py: time.strftime",  # part of a job's name
    "decide/studies/executors.py: datetime.datetime.now",  # when a run began
    "decide/studies/child_job.py: time.time",  # when a line with a metric arrived
    "decide/studies/ledger.py: datetime.datetime.now",  # when a run was recorded
    "tf/measured.py: time.time",  # the only clock of TensorFlow's graphs, cut to the time that passed
}


def wall_clock_reads(source: str) -> Iterator[str]:
    """Yield, by its full name, each function that reads the wall clock where a module mentions it."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, dot, rest = ast.unparse(node).partition(".")
            full = names.get(first, first) + dot + rest
            if full in WALL_CLOCK:
                yield full


@pytest.mark.fault("F25")
def test_wall_clock_is_read_for_labels_only() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in wall_clock_reads(path.read_text(encoding="utf-8"))
    }
    assert found == LABELS


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ntime.time()", ["time.time"]),
        ("import time as t\nt.time_ns()", ["time.time_ns"]),
        ("from time import time\ntime()", ["time.time"]),
        ("from time import time as now\nnow()", ["time.time"]),
        ("import time\nclock = time.time", ["time.time"]),
        ("import time\ntime.clock_gettime(time.CLOCK_REALTIME)", ["time.clock_gettime"]),
        ("from time import clock_gettime_ns\nclock_gettime_ns(0)", ["time.clock_gettime_ns"]),
        ("from datetime import datetime as dt\ndt.now()", ["datetime.datetime.now"]),
        ("import datetime as dt\ndt.date.today()", ["datetime.date.today"]),
        ("import time\ntime.monotonic()\ntime.sleep(1)", []),
        ("from time import monotonic as time\ntime()", []),
    ],
)
def test_readings_are_found_under_any_name(source: str, expected: list[str]) -> None:
    assert list(wall_clock_reads(source)) == expected
