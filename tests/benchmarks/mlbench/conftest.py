"""The modules of benchmarks/mlbench, whose folder is on the path only while they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

MLBENCH = Path(__file__).parents[3] / "benchmarks" / "mlbench"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Give a function that imports a module of MLBench's tasks. What it imported is forgotten afterwards."""
    own = {"tasks", "harness", *(path.stem for path in MLBENCH.glob("*.py"))}
    before = list(sys.path)
    sys.path.insert(0, str(MLBENCH))
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = before  # compare.py appends the folder of the harness
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
