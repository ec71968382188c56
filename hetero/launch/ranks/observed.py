"""What a canary run observes of its script: the time of its imports, and conditions that more data would change.

A canary trains on a few percent of the data, and `hetero canary` forecasts the whole job from it. Two things would
mislead the forecast. The time of imports does not grow with the data, and varies from run to run by more than the data
costs. And a script may contain work that a short run never reaches, or loops that end early:

    for step, batch in enumerate(loader):
        ...
        if step % 500 == 0:          # a periodic condition: which steps does the whole job reach?
            save(model)
        if step >= max_steps:        # a limit, or an early stop: does the whole job reach it?
            break

Therefore a rank of a canary run times the outermost imports, and runs a copy of the script whose conditions of these
two forms count, see `hetero.launch.ranks.instrumented`. `hetero.canary` reads the file of a rank.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import math
import numbers
import operator
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from hetero.launch.ranks.instrumented import OBSERVE, instrumented, names_of
from hetero.system.documents import write_text

__all__ = ["CANARY_DIR_VARIABLE", "ScriptObserver", "observer_of"]

CANARY_DIR_VARIABLE = "HETERO_CANARY_DIR"
"""Environment variable with the folder for the observations of a canary run's ranks."""
_NUM_RECORDED = 10_000
"""Evaluations of a condition that are all recorded. They take about 3 ms."""
_SAMPLE_S = 0.02
"""Seconds between later evaluations that are recorded."""
_MAX_BOUNDS = 8
"""Bounds per condition that are kept apart. A script that divides by ever new numbers has no period."""
_MAX_BOUND = 2**53
_OPERATORS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "modulo": (operator.mod, False),
    ">": (operator.gt, False),
    ">=": (operator.ge, False),
    "<": (operator.lt, True),
    "<=": (operator.le, True),
    "==": (operator.eq, False),
}
"""The operator of each kind of condition, and whether the bound is its left operand."""


class _Switch(list[None]):
    """Value of OFF while evaluations are recorded: false, because the list is empty. Pickled, it is True."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (1,)


class _Recorder:
    """Records the evaluations of one condition, all at first and then samples.

    Args:
        names: The globals of the script.
        off: Name of the global that turns the recorder off.
        line: Line of the condition.
        text: Its source.
        start_sampling: Called when only samples are recorded from now on.
    """

    replacement: Any
    """Function that replaces the recorder in another process."""

    def __init__(
        self, names: dict[str, Any], off: str, line: int, text: str, start_sampling: Callable[[], None]
    ) -> None:
        self._names, self._off = names, off
        self._start_sampling = start_sampling
        self.line, self.text = line, text
        self.count = 0
        self.arm()

    def arm(self) -> None:
        """Record the next evaluation."""
        self._names[self._off] = _Switch()

    def _counted(self) -> None:
        self.count += 1
        if self.count >= _NUM_RECORDED:
            self._names[self._off] = True
            self._start_sampling()

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.replacement,),)


class _Bounded(_Recorder):
    """Records the largest number that was compared with, or divided by, each bound.

    Args:
        replacement: The operator of the condition. The bound is on its right, or on its left if ``is_mirrored``.
        is_mirrored: Whether the bound is the left operand.
        others: Arguments of `_Recorder`.
    """

    def __init__(self, replacement: Callable[[Any, Any], Any], is_mirrored: bool, *others: Any) -> None:
        super().__init__(*others)
        self.replacement = replacement
        self._is_mirrored = is_mirrored
        self.largest: dict[int, int] = {}

    def __call__(self, left: Any, right: Any) -> Any:
        self._counted()
        value, bound = (right, left) if self._is_mirrored else (left, right)
        number, limit = _number(value), _number(bound)
        if number is not None and limit is not None and 1 < limit < _MAX_BOUND and abs(number) < _MAX_BOUND:
            whole_value, whole_bound = int(number), math.ceil(limit)
            largest = self.largest.get(whole_bound)
            if (largest is None and len(self.largest) < _MAX_BOUNDS) or (largest is not None and whole_value > largest):
                self.largest[whole_bound] = whole_value
        return self.replacement(left, right)


def _number(value: Any) -> int | float | None:
    """Return a number of Python or NumPy, or that of a tensor with one element. None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    try:
        found = value.item() if value.ndim == 0 else None
    except Exception:  # noqa: BLE001  any object may be compared in a script
        return None
    return found if type(found) in (int, float) else None


class _Left(_Recorder):
    """Counts how often a loop was left early."""

    replacement = int

    def __call__(self) -> None:
        self._counted()


class ScriptObserver:
    """Observes one rank's script from `running` on.

    Args:
        folder: Folder for the rank's file.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._import_s = 0.0
        self._bounded: list[_Bounded] = []
        self._left: list[_Left] = []
        self._began_s = 0.0
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    @contextlib.contextmanager
    def running(self, script: str, *, is_module: bool) -> Iterator[None]:
        """Observe the script that runs inside of the context, and write the file at its end, also if it fails."""
        original_import = builtins.__import__
        builtins.__import__ = self._timed(original_import)
        setattr(builtins, OBSERVE, self._observe)
        self._began_s = time.monotonic()
        try:
            with contextlib.nullcontext() if is_module else _instrumented_files(script):
                yield
        finally:
            self._ended.set()
            builtins.__import__ = original_import
            delattr(builtins, OBSERVE)
            self._write()

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return an import function that adds the time of the main thread's outermost imports."""
        main = threading.get_ident()
        is_inside = False

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
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

    def _observe(self, names: dict[str, Any], conditions: Sequence[tuple[str, int, str]]) -> None:
        """Make the globals of the conditions. The first statement of the script calls this."""
        for number, (kind, line, text) in enumerate(conditions):
            off, record = names_of(number)
            arguments = (names, off, line, text, self._start_sampling)
            if kind == "left":
                names[record] = _Left(*arguments)
                self._left.append(names[record])
            else:
                names[record] = _Bounded(*_OPERATORS[kind], *arguments)
                self._bounded.append(names[record])

    def _start_sampling(self) -> None:
        if self._sampler is None:
            self._sampler = threading.Thread(target=self._sample, name="hetero-canary", daemon=True)
            self._sampler.start()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for recorder in (*self._bounded, *self._left):
                if recorder.count >= _NUM_RECORDED:
                    recorder.arm()

    def _write(self) -> None:
        content = {
            "began_monotonic_s": self._began_s,
            "ended_monotonic_s": time.monotonic(),
            "import_s": self._import_s,
            "periodic": [
                {"line": each.line, "text": each.text, "period": bound, "largest": largest}
                for each in self._bounded
                for bound, largest in each.largest.items()
            ],
            "left_loops": [
                {"line": each.line, "text": each.text, "count": each.count} for each in self._left if each.count
            ],
        }
        try:
            write_text(self._path, json.dumps(content) + "\n")
        except OSError as error:
            sys.stderr.write(f"cannot write the observations of this canary run: {error}\n")


def observer_of(rank: int) -> ScriptObserver | None:
    """Return the observer that the environment asks for, or None outside of a canary run."""
    folder = os.environ.get(CANARY_DIR_VARIABLE)
    return ScriptObserver(Path(folder), rank) if folder else None


@contextlib.contextmanager
def _instrumented_files(script: str) -> Iterator[None]:
    """Let `runpy.run_path` compile the script with counting conditions.

    runpy has no public way to change the code. If its function is missing in a version of Python, the script runs
    unchanged.
    """
    name = "_get_code_from_file"
    original = getattr(runpy, name, None)
    if original is None:
        yield
        return

    def read(*args: Any) -> Any:
        found = original(*args)
        code = _instrumented_code(script) if args[-1] == script else None  # the script may run others in this way
        if code is None:
            return found
        return (code, *found[1:]) if isinstance(found, tuple) else code

    setattr(runpy, name, read)
    try:
        yield
    finally:
        setattr(runpy, name, original)


def _instrumented_code(script: str) -> CodeType | None:
    try:
        tree = instrumented(Path(script).read_bytes())
        return compile(tree, script, "exec", dont_inherit=True)  # allowed: the user's own script
    except (OSError, SyntaxError, ValueError, RecursionError):  # the script then fails or runs as it is
        return None
