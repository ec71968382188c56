"""The end of a benchmark's processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

_LEAVES_A_SEMAPHORE = """
import json, multiprocessing, os, sys, time
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    held = context.Semaphore()
    context.Process(target=time.sleep, args=(600,)).start()  # and it does not end by itself
    os.write(int(sys.argv[3]), json.dumps(held._semlock.name).encode() + b"\\n")
    sys.stdin.read()
    os._exit(0)
"""


@pytest.mark.integration
def test_child_that_is_stopped_leaves_no_semaphore(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    processes = load("harness.processes")
    script = tmp_path / "bench.py"
    script.write_text(_LEAVES_A_SEMAPHORE)
    with processes.Child(str(script), "server", "any", {}) as child:
        semaphore = Path("/dev/shm", "sem." + child.ask().removeprefix("/"))
        assert semaphore.exists()
    assert not semaphore.exists()


def test_program_that_fails_ends_the_benchmark_with_its_name_and_output(load: Callable[[str], ModuleType]) -> None:
    call = load("harness.processes").call
    call([sys.executable, "-c", "print('fine')"], "job, cluster")
    with pytest.raises(SystemExit, match=r"job, cluster ended with 3:\n.*no such file"):
        call([sys.executable, "-c", "print('no such file', flush=True); raise SystemExit(3)"], "job, cluster")
