"""The memory of a process, and malloc's settings. Those stay for good, so they are tested in separate processes."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from hetero.system.memory import keep_freed_memory, no_garbage_collection, process_memory
from tests.support.freed_memory import LIVE_THREADS, MAX_FAULTS_IF_REUSED, needs_glibc, page_faults_of_threads

KEEP = """
from hetero.system.memory import keep_freed_memory
assert keep_freed_memory()
"""
LEAVE = KEEP.replace("assert", "assert not")


@pytest.fixture
def mallopt(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The settings that malloc got. Malloc itself gets none."""
    given: dict[int, int] = {}

    def record(setting: int, value: int) -> int:
        given[setting] = value
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(mallopt=record))
    for variable in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_", "HETERO_MALLOC"))]:
        monkeypatch.delenv(variable)
    return given


@needs_glibc
@pytest.mark.parametrize("before", ["", LIVE_THREADS], ids=["at the start", "with threads"])
def test_freed_memory_is_used_again_by_all_threads(before: str) -> None:
    assert page_faults_of_threads(before + KEEP) < MAX_FAULTS_IF_REUSED


@needs_glibc
def test_malloc_stays_as_it_is_if_the_environment_says_so() -> None:
    assert page_faults_of_threads(LEAVE, environment={"HETERO_MALLOC": "default"}) > MAX_FAULTS_IF_REUSED


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1", -1),
        ("MALLOC_TOP_PAD_", "1", -2),
        ("MALLOC_MMAP_THRESHOLD_", "1", -3),
        ("MALLOC_ARENA_MAX", "4", -8),
        ("GLIBC_TUNABLES", "glibc.malloc.check=1:glibc.malloc.arena_max=4", -8),
    ],
)
def test_settings_of_the_user_stay(
    mallopt: dict[int, int], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, setting: int
) -> None:
    assert keep_freed_memory()
    assert mallopt.keys() == {-1, -2, -3, -8}
    mallopt.clear()
    monkeypatch.setenv(variable, value)
    assert keep_freed_memory()
    assert mallopt.keys() == {-1, -2, -3, -8} - {setting}


def test_choice_without_a_meaning_is_logged_once(
    mallopt: dict[int, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HETERO_MALLOC", "off")
    for _ in range(2):
        assert keep_freed_memory()
    assert mallopt
    assert caplog.messages == ["HETERO_MALLOC='off' has no meaning, expected 'default' or no value"]


def test_without_mallopt_nothing_is_kept(mallopt: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not keep_freed_memory()


def test_malloc_that_refuses_stays_as_it_is(mallopt: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(mallopt=lambda *_: 0))
    assert not keep_freed_memory()


def test_malloc_before_glibc_2_35_gets_a_lower_threshold(
    mallopt: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ctypes.CDLL(None)
    refusing = lambda setting, value: 0 if (setting, value) == (-3, 2**30) else library.mallopt(setting, value)  # noqa: E731
    monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(mallopt=refusing))
    assert keep_freed_memory()
    assert mallopt[-3] == 2**25


ALLOCATION = """
from hetero.system.memory import no_garbage_collection, process_memory
before = process_memory()
held = b"x" * 50_000_000
print(process_memory().private_bytes - before.private_bytes)
"""


GAPS = """
blocks = [b"x" * (1000 if number % 2 else 4000) for number in range(8000)]
del blocks[1::2]
act = lambda: [bytes(900) for _ in range(4000)]
"""
OBJECTS = """
blocks = [[number] for number in range(200_000)]
act = gc.collect
"""
FORK = """
import gc, os
from hetero.system.memory import prepare_to_fork, process_memory
{parent}
{prepare}
with open("/proc/self/status") as file:
    virtual_kb = next(int(line.split()[1]) for line in file if line.startswith("VmSize"))
assert virtual_kb < 2_000_000, virtual_kb
if not os.fork():
    kept = act()
    print(process_memory().private_bytes, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    "parent", [pytest.param(GAPS, marks=needs_glibc), OBJECTS], ids=["allocates", "collects garbage"]
)
def test_forked_process_writes_to_few_pages_of_its_parent(parent: str) -> None:
    def private_bytes(prepare: str) -> int:
        program = FORK.format(parent=parent, prepare=prepare)
        return int(subprocess.check_output([sys.executable, "-c", program], text=True))

    assert private_bytes("prepare_to_fork()") < 8_000_000
    assert private_bytes("gc.collect()") > 14_000_000


def test_process_memory_counts_what_the_process_has_allocated() -> None:
    # A separate process, because threads of other tests might free memory meanwhile.
    grown_bytes = int(subprocess.check_output([sys.executable, "-c", ALLOCATION], text=True))
    assert 49_500_000 < grown_bytes < 55_000_000


def test_memory_of_a_process_that_has_ended_is_not_known(tmp_path: Path) -> None:
    assert process_memory(tmp_path) is None
    (tmp_path / "smaps_rollup").write_text("")
    assert process_memory(tmp_path) is None


def test_no_garbage_is_collected_while_it_says_so_and_a_threshold_that_is_set_meanwhile_stays() -> None:
    before = gc.get_threshold()
    try:
        with no_garbage_collection():
            num_before = gc.get_stats()[0]["collections"]
            kept = [[] for _ in range(100_000)]
            assert gc.get_stats()[0]["collections"] == num_before
        assert gc.get_threshold() == before
        assert len(kept) == 100_000
        with no_garbage_collection():
            gc.set_threshold(5_000)
        assert gc.get_threshold()[0] == 5_000
    finally:
        gc.set_threshold(*before)
