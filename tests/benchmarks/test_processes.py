"""The end of a benchmark's processes."""

from __future__ import annotations

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
