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

The first condition becomes ``if (step % 500 if OFF else RECORD(step, 500)) == 0``. The first evaluations are all
recorded. After them OFF is true, and a thread makes it false for one evaluation from time to time. A loop of millions
of steps therefore takes as long as without this. OFF and RECORD are globals of the script, so a function that is
pickled by value, for example by joblib, takes them along. In another process they only compute.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import json
import operator
import os
import re
import resource
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from hetero.system.documents import write_text

__all__ = ["CANARY_DIR_VARIABLE", "ScriptObserver", "instrumented", "observer_of"]

CANARY_DIR_VARIABLE = "HETERO_CANARY_DIR"
"""Environment variable with the folder for the observations of a canary run's ranks."""
_OBSERVE = "__hetero_observe__"
_MAX_CONDITIONS = 200
_MAX_TEXT_CHARS = 200
_NUM_RECORDED = 10_000
"""Evaluations of a condition that are all recorded. They take about 3 ms."""
_SAMPLE_S = 0.02
"""Seconds between later evaluations that are recorded."""
_MAX_PERIODS = 8
"""Periods per condition that are kept apart. A script that divides by ever new numbers has no period."""
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_COMPILED = re.compile(r"jit|compile|cuda|script|vectorize|stencil|kernel")
"""Decorators of functions that a compiler translates, which knows no Python objects."""
_TRACED = ("forward", "call", "__call__")
"""Methods of models, which PyTorch and TensorFlow trace or compile."""


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


class _Modulo(_Recorder):
    """Records the largest number that was divided by each period."""

    replacement = operator.mod

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.largest: dict[int, int] = {}

    def __call__(self, value: Any, period: Any) -> Any:
        self._counted()
        if type(value) is int and type(period) is int and period > 1:
            largest = self.largest.get(period)
            if (largest is None and len(self.largest) < _MAX_PERIODS) or (largest is not None and value > largest):
                self.largest[period] = value
        return value % period


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
        self._modulos: list[_Modulo] = []
        self._left: list[_Left] = []
        self._began_s = 0.0
        self._ended = threading.Event()
        self._sampler: threading.Thread | None = None

    @contextlib.contextmanager
    def running(self, script: str, *, is_module: bool) -> Iterator[None]:
        """Observe the script that runs inside of the context, and write the file at its end, also if it fails."""
        original_import = builtins.__import__
        builtins.__import__ = self._timed(original_import)
        setattr(builtins, _OBSERVE, self._observe)
        self._began_s = time.monotonic()
        try:
            with contextlib.nullcontext() if is_module else _instrumented_files(script):
                yield
        finally:
            self._ended.set()
            builtins.__import__ = original_import
            delattr(builtins, _OBSERVE)
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
            off, record = _names_of(number)
            arguments = (names, off, line, text, self._start_sampling)
            recorder: _Recorder
            if kind == "modulo":
                recorder = _Modulo(*arguments)
                self._modulos.append(recorder)
            else:
                recorder = _Left(*arguments)
                self._left.append(recorder)
            names[record] = recorder

    def _start_sampling(self) -> None:
        if self._sampler is None:
            self._sampler = threading.Thread(target=self._sample, name="hetero-canary", daemon=True)
            self._sampler.start()

    def _sample(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            for recorder in (*self._modulos, *self._left):
                if recorder.count >= _NUM_RECORDED:
                    recorder.arm()

    def _write(self) -> None:
        own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        content = {
            "began_monotonic_s": self._began_s,
            "ended_monotonic_s": time.monotonic(),
            "import_s": self._import_s,
            "cpu_s": own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime,
            "periodic": [
                {"line": each.line, "text": each.text, "period": period, "largest": largest}
                for each in self._modulos
                for period, largest in each.largest.items()
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
    tree = ast.parse(source)
    counting = _Counting()
    counting.visit(tree)
    if counting.conditions:
        names = ast.Call(func=_name("globals"), args=[], keywords=[])
        conditions = ast.parse(repr(counting.conditions), mode="eval").body
        call = ast.Call(func=_name(_OBSERVE), args=[names, conditions], keywords=[])
        at = _num_leading(tree)
        for node in ast.walk(call):  # on the line of the statement after it
            ast.copy_location(node, tree.body[at])
        tree.body.insert(at, ast.copy_location(ast.Expr(call), tree.body[at]))
    return ast.fix_missing_locations(tree)


def _num_leading(tree: ast.Module) -> int:
    """Return the number of statements that must stay first: the docstring and ``from __future__`` imports."""
    count = 0 if ast.get_docstring(tree, clean=False) is None else 1
    while isinstance(each := tree.body[count], ast.ImportFrom) and each.module == "__future__":
        count += 1
    return count


def _name(name: str) -> ast.Name:
    return ast.Name(id=name, ctx=ast.Load())


def _names_of(number: int) -> tuple[str, str]:
    """Return the names of OFF and RECORD of a condition."""
    return f"__hetero_off_{number}__", f"__hetero_record_{number}__"


class _Counting(ast.NodeTransformer):
    """Replaces ``a % b`` in conditions, and records the conditions that end loops early."""

    def __init__(self) -> None:
        self.conditions: list[tuple[str, int, str]] = []
        """Kind, line and text of each condition that counts."""
        self._loops: list[ast.For | ast.AsyncFor] = []
        """The ``for`` loops around the current statement, in its function and in its ``while`` loop."""

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._visit_inside(node, [*self._loops, node])

    def visit_AsyncFor(self, node: ast.AsyncFor) -> ast.AST:
        return self._visit_inside(node, [*self._loops, node])

    def visit_While(self, node: ast.While) -> ast.AST:
        # The end of ``while True`` is usually a break, so it says nothing.
        text = f"while {ast.unparse(node.test)}"
        ends_by_value = _ends_by_value(node)
        self._visit_inside(node, [])
        if ends_by_value and (leave := self._leave(node.lineno, text)):
            node.orelse.insert(0, leave)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._visit_function(node)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        is_compiled = any(_COMPILED.search(ast.unparse(each)) for each in node.decorator_list)
        return node if is_compiled or node.name in _TRACED else self._visit_inside(node, [])

    def _visit_inside(self, node: ast.stmt, loops: list[ast.For | ast.AsyncFor]) -> ast.AST:
        outer, self._loops = self._loops, loops
        self.generic_visit(node)
        self._loops = outer
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        text = f"if {ast.unparse(node.test)}"
        loops = self._loops if isinstance(node.body[-1], ast.Return) else self._loops[-1:]
        leaves = isinstance(node.body[-1], (ast.Break, ast.Return)) and any(
            _depends_on_values(node.test, loop) for loop in loops
        )
        self.generic_visit(node)
        node.test = _Modulos(self, node.lineno, text).visit(node.test)
        if leaves and (leave := self._leave(node.lineno, text)):
            node.body.insert(len(node.body) - 1, leave)
        return node

    def _leave(self, line: int, text: str) -> ast.stmt | None:
        """Return the statement that records the end of a loop."""
        names = self.add("left", line, text)
        if names is None:
            return None
        record = ast.Call(func=_name(names[1]), args=[], keywords=[])
        return ast.Expr(ast.BoolOp(op=ast.Or(), values=[_name(names[0]), record]))

    def add(self, kind: str, line: int, text: str) -> tuple[str, str] | None:
        """Add a condition and return the names of its globals, or None if there are too many."""
        if len(self.conditions) >= _MAX_CONDITIONS:
            return None
        self.conditions.append((kind, line, text[:_MAX_TEXT_CHARS]))
        return _names_of(len(self.conditions) - 1)


class _Modulos(ast.NodeTransformer):
    """Replaces the modulo operations of one condition."""

    def __init__(self, counting: _Counting, line: int, text: str) -> None:
        self._counting, self._line, self._text = counting, line, text

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        # ``"%d" % 3`` is text. Operands of a modulo are not replaced themselves, because they are in the code twice.
        if not isinstance(node.op, ast.Mod) or isinstance(node.left, (ast.JoinedStr, ast.Constant)):
            return self.generic_visit(node)
        names = self._counting.add("modulo", self._line, self._text)
        if names is None:
            return node
        arguments = [copy.deepcopy(node.left), copy.deepcopy(node.right)]
        record = ast.Call(func=_name(names[1]), args=arguments, keywords=[])
        return ast.IfExp(test=_name(names[0]), body=node, orelse=record)


def _depends_on_values(test: ast.expr, loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a condition ends a loop early by values, and not at a fixed place such as ``step == 100``.

    These do:

    * a comparison by order
    * ``==`` or ``!=`` with a counter that some iterations do not count, such as the bad epochs
    * in a loop over epochs: a name that the loop assigns, an attribute or a call, such as ``stopper.should_stop``
    """
    compared = [each for each in ast.walk(test) if isinstance(each, ast.Compare)]
    if any(isinstance(operator, _ORDER) for each in compared for operator in each.ops):
        return True
    counters = _conditional_counters(loop)
    for each in compared:
        sides = {ast.unparse(side) for side in (each.left, *each.comparators)}
        if sides & counters and all(isinstance(operator, (ast.Eq, ast.NotEq)) for operator in each.ops):
            return True
    own = _names_in(loop.target)
    has_loops = any(isinstance(each, (ast.For, ast.AsyncFor)) for part in loop.body for each in ast.walk(part))
    if not has_loops and not any("epoch" in name.lower() for name in own):
        return False
    assigned = _assigned(loop)
    return any(
        isinstance(leaf, (ast.Attribute, ast.Call)) or (isinstance(leaf, ast.Name) and leaf.id in assigned)
        for leaf in _leaves(test)
        if not own & _names_in(leaf.func if isinstance(leaf, ast.Call) else leaf)
    )


def _names_in(expression: ast.expr) -> set[str]:
    return {each.id for each in ast.walk(expression) if isinstance(each, ast.Name)}


def _leaves(test: ast.expr) -> Iterator[ast.expr]:
    """Yield the operands of ``and``, ``or`` and ``not``."""
    if isinstance(test, ast.BoolOp):
        for each in test.values:
            yield from _leaves(each)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand)
    else:
        yield test


def _assigned(loop: ast.For | ast.AsyncFor) -> set[str]:
    """Return the names that the body of a loop assigns."""
    return {
        each.id
        for part in loop.body
        for each in ast.walk(part)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }


def _conditional_counters(loop: ast.For | ast.AsyncFor) -> set[str]:
    """Return the variables and attributes that count some iterations of a loop, as its values decide.

    A counter below ``if step % 4 == 0`` counts at fixed places.
    """
    found = set()
    for each in (each for part in loop.body for each in ast.walk(part)):
        if isinstance(each, ast.If) and not any(isinstance(inner, ast.Mod) for inner in ast.walk(each.test)):
            found |= {ast.unparse(inner.target) for inner in ast.walk(each) if isinstance(inner, ast.AugAssign)}
        elif isinstance(each, ast.Assign) and isinstance(each.value, ast.IfExp):
            found |= {ast.unparse(target) for target in each.targets}
    return found


def _ends_by_value(loop: ast.While) -> bool:
    """Return whether a ``while`` loop compares what a call in its body returned with a number such as 0.01."""
    test = loop.test
    if not isinstance(test, ast.Compare) or not all(isinstance(operator, _ORDER) for operator in test.ops):
        return False
    numbers = [each.value for each in (test.left, *test.comparators) if isinstance(each, ast.Constant)]
    if not any(isinstance(number, float) and not number.is_integer() for number in numbers):
        return False
    names = _names_in(test)
    return any(
        isinstance(each, ast.Assign)
        and any(isinstance(inner, ast.Call) for inner in ast.walk(each.value))
        and any(names & _names_in(target) for target in each.targets)
        for part in loop.body
        for each in ast.walk(part)
    )
