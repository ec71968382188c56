"""What a canary run observes of its script: when it began and ended, and the time of its imports.

A canary trains on a few percent of the data, and `hetero canary` forecasts the whole job from it. The time of imports
does not grow with the data, and varies from run to run by more than the data adds. Therefore a rank of a canary run
times the outermost imports of its script. `hetero.decide.canary` reads the file of a rank.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hetero.documents.files import write_text

__all__ = ["CANARY_DIR_VARIABLE", "observed"]

CANARY_DIR_VARIABLE = "HETERO_CANARY_DIR"
"""Environment variable with the folder for the observations of a canary run's ranks."""


@contextlib.contextmanager
def observed(rank: int) -> Iterator[None]:
    """Observe the script that runs inside of the context, and write a file at its end, also if it fails.

    Do nothing outside of a canary run.

    Args:
        rank: Rank of this process.
    """
    folder = os.environ.get(CANARY_DIR_VARIABLE)
    if not folder:
        yield
        return
    imports = _TimedImports(builtins.__import__)
    builtins.__import__ = imports
    # Use the monotonic clock, because the times of a host's usage come from it too. With the wall clock, a jump of that
    # clock once assigned the resources of a canary to other parts of the run (F25).
    began_s = time.monotonic()
    try:
        yield
    finally:
        builtins.__import__ = imports.original
        content = {"began_monotonic_s": began_s, "ended_monotonic_s": time.monotonic(), "import_s": imports.total_s}
        try:
            write_text(Path(folder) / f"rank-{rank}.json", json.dumps(content) + "\n")
        except OSError as error:
            sys.stderr.write(f"cannot write the observations of this canary run: {error}\n")


class _TimedImports:
    """Python's import function, which also adds up the time of the main thread's outermost imports."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        """Python's own import function."""
        self.total_s = 0.0
        """Seconds of all outermost imports so far."""
        self._main_thread_id = threading.get_ident()
        self._is_inside = False
        """Whether an outermost import is in progress."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do an import of the script with Python's own function, and add its time to `total_s`."""
        # Measure only outermost imports, because their time includes imports inside of them. Imports of other threads
        # do not delay the script.
        if self._is_inside or threading.get_ident() != self._main_thread_id:
            return self.original(*args, **kwargs)
        self._is_inside = True
        began_s = time.perf_counter()
        try:
            return self.original(*args, **kwargs)
        finally:
            self.total_s += time.perf_counter() - began_s
            self._is_inside = False
