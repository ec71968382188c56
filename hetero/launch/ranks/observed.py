"""What a canary run observes of its script: the time of its imports, and conditions that more data would change.

A canary trains on a few percent of the data, and `hetero canary` forecasts the whole job from it. Two things would
mislead the forecast. The time of imports does not grow with the data, and varies from run to run by more than the data
costs. And a script may contain work that a short run never reaches, or loops that end early:

    for step, batch in enumerate(loader):
        ...
        if step % 500 == 0:          # a periodic condition: which steps does the whole job reach?
            save(model)
        if bad_epochs >= patience:   # leaves the loop early
            break

Therefore a rank of a canary run times the outermost imports, and runs a copy of the script whose conditions of these
two forms count. The line numbers stay. `hetero.canary` reads the file of a rank.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import os
import resource
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from hetero.system.documents import write_text

__all__ = ["CANARY_DIR_VARIABLE", "ScriptObserver", "instrumented", "observer_of"]

CANARY_DIR_VARIABLE = "HETERO_CANARY_DIR"
"""Environment variable with the folder for the observations of a canary run's ranks."""
_MOD = "__hetero_modulo__"
_LEFT = "__hetero_left_loop__"
_MAX_CONDITIONS = 200
_MAX_TEXT_CHARS = 200
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_KEEPS_ONE = 8
"""Periods per condition that are kept apart. A script that divides by ever new numbers has no period."""


class ScriptObserver:
    """Observes one rank's script from `running` on.

    Args:
        folder: Folder for the rank's file.
        rank: Rank of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = folder / f"rank-{rank}.json"
        self._import_s = 0.0
        self._periodic: dict[tuple[int, int], dict[str, Any]] = {}
        self._left: dict[int, dict[str, Any]] = {}
        self._began_s = 0.0

    @contextlib.contextmanager
    def running(self, script: str, *, is_module: bool) -> Iterator[None]:
        """Observe the script that runs inside of the context, and write the file at its end, also if it fails."""
        original_import = builtins.__import__
        builtins.__import__ = self._timed(original_import)
        setattr(builtins, _MOD, self._modulo)
        setattr(builtins, _LEFT, self._leave)
        self._began_s = time.monotonic()
        try:
            with contextlib.nullcontext() if is_module else _instrumented_files(script):
                yield
        finally:
            builtins.__import__ = original_import
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

    def _modulo(self, line: int, text: str, value: Any, period: Any) -> Any:
        if type(value) is int and type(period) is int and period > 1:
            found = self._periodic.get((line, period))
            if found is None:
                num_periods = sum(key[0] == line for key in self._periodic)
                if num_periods < _KEEPS_ONE and len(self._periodic) < _MAX_CONDITIONS:
                    self._periodic[line, period] = {"line": line, "text": text, "period": period, "largest": value}
            elif value > found["largest"]:
                found["largest"] = value
        return value % period

    def _leave(self, line: int, text: str) -> None:
        if line in self._left or len(self._left) < _MAX_CONDITIONS:
            found = self._left.setdefault(line, {"line": line, "text": text, "count": 0})
            found["count"] += 1

    def _write(self) -> None:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        content = {
            "began_monotonic_s": self._began_s,
            "ended_monotonic_s": time.monotonic(),
            "import_s": self._import_s,
            "cpu_s": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
            "periodic": list(self._periodic.values()),
            "left_loops": list(self._left.values()),
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
        code = _instrumented_code(script)
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


def instrumented(source: bytes | str) -> ast.Module:
    """Return a script's syntax tree, in which periodic conditions and early ends of loops count.

    Raises:
        SyntaxError: If the source is not Python.
    """
    tree = _Counting().visit(ast.parse(source))
    ast.fix_missing_locations(tree)
    assert isinstance(tree, ast.Module)
    return tree


class _Counting(ast.NodeTransformer):
    """Replaces ``a % b`` in conditions, and records the comparisons that leave ``for`` loops."""

    def __init__(self) -> None:
        self._num_for_loops = 0

    def visit_For(self, node: ast.For) -> ast.AST:
        self._num_for_loops += 1
        self.generic_visit(node)
        self._num_for_loops -= 1
        return node

    def visit_While(self, node: ast.While) -> ast.AST:
        # The end of ``while True`` is usually a break, so it says nothing.
        outer, self._num_for_loops = self._num_for_loops, 0
        self.generic_visit(node)
        self._num_for_loops = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        outer, self._num_for_loops = self._num_for_loops, 0
        self.generic_visit(node)
        self._num_for_loops = outer
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        text = f"if {ast.unparse(node.test)}"[:_MAX_TEXT_CHARS]
        is_order = any(
            isinstance(each, ast.Compare) and any(isinstance(operator, _ORDER) for operator in each.ops)
            for each in ast.walk(node.test)
        )
        leaves = self._num_for_loops > 0 and is_order and isinstance(node.body[-1], (ast.Break, ast.Return))
        self.generic_visit(node)
        node.test = _Modulos(node.lineno, text).visit(node.test)
        if leaves:
            node.body.insert(len(node.body) - 1, ast.Expr(_call(_LEFT, node.lineno, text)))
        return node


class _Modulos(ast.NodeTransformer):
    """Replaces the modulo operations of one condition."""

    def __init__(self, line: int, text: str) -> None:
        self._line, self._text = line, text

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.op, ast.Mod) or isinstance(node.left, (ast.JoinedStr, ast.Constant)):
            return node
        return _call(_MOD, self._line, self._text, node.left, node.right)


def _call(name: str, line: int, text: str, *arguments: ast.expr) -> ast.Call:
    constants: list[ast.expr] = [ast.Constant(line), ast.Constant(text)]
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=[*constants, *arguments], keywords=[])
