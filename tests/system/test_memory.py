"""The memory of a process, and malloc's settings. Those stay for good, so they are tested in separate processes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetero.system.memory import no_garbage_collection, process_memory

PROGRAM = """
import resource
import threading
import numpy as np
from hetero.system.memory import keep_freed_memory
keeps = keep_freed_memory()
def page_faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        np.ones(2**20, np.uint8)  # a quarter of the size for which NumPy asks for huge pages
        thread = threading.Thread(target=np.ones, args=(2**20, np.uint8))
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin
page_faults()
print(int(keeps), page_faults())
"""


def run(setting: str, program: str = PROGRAM) -> tuple[bool, int]:
    environment = {**os.environ, "HETERO_MALLOC": setting}
    keeps, faults = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True).split()
    return bool(int(keeps)), int(faults)


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="only glibc has mallopt")
def test_malloc_freed_memory_is_used_again_by_all_threads() -> None:
    keeps, faults = run("")
    assert keeps
    assert faults < 2500  # fresh memory for each array takes 25,600


def test_malloc_switched_off_by_the_environment() -> None:
    assert not run("default")[0]


def test_malloc_without_mallopt_do_nothing() -> None:
    program = "import ctypes\nctypes.CDLL = lambda name: object()\n" + PROGRAM
    assert not run("", program)[0]


def test_malloc_that_refuses_stays_as_it_is() -> None:
    program = "import ctypes, types\nctypes.CDLL = lambda name: types.SimpleNamespace(mallopt=lambda *_: 0)\n" + PROGRAM
    assert not run("", program)[0]


ALLOCATION = """
from hetero.system.memory import no_garbage_collection, process_memory
before = process_memory()
held = b"x" * 50_000_000
print(process_memory().private_bytes - before.private_bytes)
"""


def test_process_memory_counts_what_the_process_has_allocated() -> None:
    # A process of its own: no thread of another test frees memory meanwhile.
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
