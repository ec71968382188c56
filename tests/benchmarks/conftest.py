"""The benchmarks as importable modules: they are scripts, whose folder is on the path only while they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load() -> Iterator[Callable[[str], ModuleType]]:
    """Give a function that imports a module of the benchmarks; what it imported is forgotten afterwards."""
    own = {path.stem for path in BENCHMARKS.iterdir() if path.suffix in {"", ".py"}}
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
