"""What every test gets: an environment without the machine's own job, a sweep, and a way to say what it measured."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline, because a loaded machine is not a failure. `make test` tries the same cases in every run: a failure comes
# from the change. `make test-long` tries new ones.
settings.register_profile("ordinary", deadline=None, derandomize=True)
settings.register_profile("long", deadline=None, derandomize=False, max_examples=1000)
settings.load_profile("ordinary")

EVIDENCE_VARIABLE = "HETERO_TEST_EVIDENCE"
"""Names the file with the rows of the fault and attack tables that a run has shown, and how fast: JSON in lines.

A line is written when its test is done, because a test that hangs ends the whole run (`timeout_method`).
"""

_EVIDENCE_PATH = Path(os.environ[EVIDENCE_VARIABLE]).resolve() if os.environ.get(EVIDENCE_VARIABLE) else None
"""Taken before a test hides it or changes the folder."""

Measured = Callable[[str, float], None]
_MEASURED = pytest.StashKey[dict[str, float]]()
_OUTCOMES = pytest.StashKey[dict[str, str]]()

_SWEEP_TIMEOUT_S = 5.0
_SLACK = 2
"""Descriptors, and threads, that the first use of something may keep: those of multiprocessing's helpers, say."""


def pytest_collection_finish() -> None:
    """Leave the imported modules out of garbage collections. With all of them, each would take half a second.

    Many tests collect garbage, to show that nothing is left.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _clean_environment() -> Iterator[None]:
    """Hide the variables that would make a test read the job or the configuration of its surroundings.

    For a whole module, because a job that its tests share starts before the first of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            of_a_job = name.startswith(("SM_", "SAGEMAKER_", "HETERO_", "SLURM", "JOBSET_", "PET_", "VC_"))
            if of_a_job and name != "HETERO_TIME_SCALE":
                patch.delenv(name)
        yield


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Expect that this process holds afterwards what it held before, if the test shows a fault or starts jobs.

    Not those of attacks and of Ray: the servers that they attack and the connections of the driver outlive them. Tests
    that start processes look for these themselves: their marks, ports, shared memory and files are not known here.
    """
    node = request.node
    folder = node.path.parent.name
    is_swept = folder == "integration" or (folder != "ray" and node.get_closest_marker("fault") is not None)
    before = _held() if is_swept else None
    yield
    deadline_s = time.monotonic() + _SWEEP_TIMEOUT_S
    while (left := _excess(before)) and time.monotonic() < deadline_s:
        gc.collect()  # what only a traceback held
        subprocess._cleanup()  # type: ignore[attr-defined]
        multiprocessing.active_children()
        time.sleep(0.1)
    assert left == [], f"still there {_SWEEP_TIMEOUT_S:.0f} s after the test: {left}"


_Held = tuple[dict[str, str], list[threading.Thread], int]


def _held() -> _Held:
    """Return what this process holds: its descriptors, its threads, and a child that was not waited for."""
    descriptors = {}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of this very listing
            target = str(path.readlink())
            if not target.startswith("anon_inode:"):  # event descriptors: gRPC keeps those for the next connections
                descriptors[path.name] = target
    child = 0
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        child = 0 if ended is None else ended.si_pid
    return descriptors, threading.enumerate(), child


def _excess(before: _Held | None) -> list[str]:
    """Return what this process holds more than before. Empty within the slack."""
    if before is None:
        return []
    (descriptors, threads, child), found = _held(), []
    if len(descriptors) > len(before[0]) + _SLACK:
        found += [f"descriptor {name}: {at}" for name, at in descriptors.items() if before[0].get(name) != at]
    if len(threads) > len(before[1]) + _SLACK:
        found += [f"thread {thread.name}" for thread in threads if thread not in before[1]]
    if child not in (0, before[2]):
        found.append(f"zombie {child}")
    return found


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Return a function that records a time of this test: ``measured("detection_s", 1.3)``. The name has the unit."""
    found = request.node.stash.setdefault(_MEASURED, {})

    def record(name: str, value: float) -> None:
        found[name] = float(value)

    return record


@pytest.fixture(autouse=True, scope="module")
def _repetition(request: pytest.FixtureRequest) -> int:
    """Which run of the same test this is."""
    number: int = getattr(request, "param", 0)
    return number


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, metavar="N", help="run every test of a fault N times")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Multiply the tests that show a row of the fault table, as ``make repeat`` asks."""
    count = metafunc.config.getoption("--repeat", 1)
    if count > 1 and next(metafunc.definition.iter_markers("fault"), None) is not None:
        metafunc.parametrize("_repetition", range(count), indirect=True, ids=lambda number: f"run {number + 1}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what became of tests that prove rows: passed only if setting up and the sweep afterwards passed too."""
    report = yield
    rows = [str(row) for kind in ("fault", "attack") for mark in item.iter_markers(kind) for row in mark.args]
    if not rows or _EVIDENCE_PATH is None:
        return report
    outcomes = item.stash.setdefault(_OUTCOMES, {})
    outcomes[report.when] = report.outcome
    if report.when == "teardown":
        worst = next((each for each in ("failed", "skipped") if each in outcomes.values()), "passed")
        entry = {
            "test": item.nodeid,
            "rows": sorted(set(rows)),
            "outcome": worst,
            "measured": item.stash.get(_MEASURED, {}),
        }
        with _EVIDENCE_PATH.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    return report
