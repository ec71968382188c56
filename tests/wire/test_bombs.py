"""Small answers that claim to be large: refused before anything is allocated, in a process that could not pay."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.wire import bombs

pytestmark = [pytest.mark.attack("A5"), pytest.mark.attack("A6"), pytest.mark.attack("A7")]

MAX_GROWTH_KIB = 5_000_000 / 1024
Found = dict[str, dict[str, float | str]]


@pytest.fixture(scope="module")
def found() -> Found:
    """What a process with 128 MiB beyond its imports said to each bomb."""
    pytest.importorskip("lz4.block")
    pytest.importorskip("zstandard")
    done = subprocess.run([sys.executable, bombs.__file__], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: Found = json.loads(done.stdout)
    return loaded


def small(found: Found) -> Found:
    """Leave out those whose own bytes take time and memory."""
    return {name: facts for name, facts in found.items() if float(facts["message_bytes"]) < 10_000}


def test_every_bomb_is_refused(found: Found) -> None:
    assert len(found) == 16
    assert [name for name, facts in found.items() if not facts["refused"]] == []


def test_small_bombs_never_take_more_memory_than_promised(found: Found) -> None:
    peaks_kib = {name: float(facts["peak_kib"]) for name, facts in small(found).items()}
    assert len(peaks_kib) >= 7
    assert {name: kib for name, kib in peaks_kib.items() if kib > MAX_GROWTH_KIB} == {}


def test_no_bomb_makes_the_process_grow(found: Found) -> None:
    grown_kib = {
        name: float(facts["grown_kib"]) - 8 * float(facts["message_bytes"]) / 1024 for name, facts in found.items()
    }
    assert {name: kib for name, kib in grown_kib.items() if kib > 5 * 1024} == {}


def test_small_bombs_take_no_time(found: Found) -> None:
    """The promise is 10 ms. The best of three counts, because other processes may run."""
    times_s = {name: float(facts["time_s"]) for name, facts in small(found).items()}
    assert {name: time_s for name, time_s in times_s.items() if time_s > 0.01} == {}
