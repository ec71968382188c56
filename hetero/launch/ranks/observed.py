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

__all__ = ["CANARY_DIR_VARIABLE", "ScriptObserver", "observer_of"]

CANARY_DIR_VARIABLE = "HETERO_CANARY_DIR"
"""Environment variable with the folder for the observations of a canary run's ranks."""


class ScriptObserver:
    """Observes one rank's script from `running` on.

    Args:
        folder: Folder for the rank's file.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._import_s = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Observe the script that runs inside of the context, and write the file at its end, also if it fails."""
        original_import = builtins.__import__
        builtins.__import__ = self._timed(original_import)
        began_s = time.monotonic()
        try:
            yield
        finally:
            builtins.__import__ = original_import
            self._write(began_s, time.monotonic())

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an import function that adds the time of the main thread's outermost imports."""
        main = threading.get_ident()
        is_inside = False

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            # An import inside of another one is part of its time. Other threads import beside the script's work.
            if is_inside or threading.get_ident() != main:
                return original(*args, **kwargs)
            is_inside = True
            began_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self._import_s += time.perf_counter() - began_s
                is_inside = False

        return timed

    def _write(self, began_s: float, ended_s: float) -> None:
        # The monotonic clock, because a host's usage has its times too. After a jump of the wall clock, the resources
        # of a canary belonged to other parts of the run (F25).
        content = {"began_monotonic_s": began_s, "ended_monotonic_s": ended_s, "import_s": self._import_s}
        try:
            write_text(self._path, json.dumps(content) + "\n")
        except OSError as error:
            sys.stderr.write(f"cannot write the observations of this canary run: {error}\n")


def observer_of(rank: int) -> ScriptObserver | None:
    """Return the observer that the environment asks for, or None outside of a canary run."""
    folder = os.environ.get(CANARY_DIR_VARIABLE)
    return ScriptObserver(Path(folder), rank) if folder else None
