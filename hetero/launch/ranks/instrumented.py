"""A copy of a script whose conditions count. Pure.

The condition ``if step % 500 == 0`` becomes ``if (step % 500 if OFF else RECORD(step, 500)) == 0``, and ``if step >=
limit: break`` becomes ``if (step >= limit if OFF else RECORD(step, limit))``. The first evaluations are all recorded.
After them OFF is true, and a thread makes it false for one evaluation from time to time. A loop of millions of steps
therefore takes as long as without this. OFF and RECORD are globals of the script, so a function that is pickled by
value, for example by joblib, takes them along. In another process they only compute. The line numbers stay.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Sequence

__all__ = ["OBSERVE", "instrumented", "names_of"]

OBSERVE = "__hetero_observe__"
"""Name of the function that the first statement of the copy calls with its globals and its conditions."""
_MAX_CONDITIONS = 200
_MAX_TEXT_CHARS = 200
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_KINDS: dict[type[ast.cmpop], str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=="}
"""Comparisons that may be limits."""
_EXITS = ("exit", "quit", "sys.exit")
"""Functions that end the script."""
_COMPILED = re.compile(r"jit|compile|cuda|script|vectorize|stencil|kernel")
"""Decorators of functions that a compiler translates, which knows no Python objects."""
_TRACED = ("forward", "call", "__call__")
"""Methods of models, which PyTorch and TensorFlow trace or compile."""


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
        call = ast.Call(func=_name(OBSERVE), args=[names, conditions], keywords=[])
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


def names_of(number: int) -> tuple[str, str]:
    """Return the names of OFF and RECORD of a condition, which is counted from 0."""
    return f"__hetero_off_{number}__", f"__hetero_record_{number}__"


class _Counting(ast.NodeTransformer):
    """Replaces ``a % b`` in conditions, and records the conditions that end loops early."""

    def __init__(self) -> None:
        self.conditions: list[tuple[str, int, str]] = []
        """Kind, line and text of each condition that counts: ``modulo``, ``left``, or the operator of a limit."""
        self._loops: list[ast.For | ast.AsyncFor] = []
        """The ``for`` loops around the current statement, in its function and in its ``while`` loop."""
        self._is_caught = False
        """Whether the innermost of these loops catches exceptions of the current statement."""

    def visit_For(self, node: ast.For) -> ast.AST:
        return self._visit_inside(node, [*self._loops, node] if _does_work(node) else [])

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
        outer, self._loops, self._is_caught = (self._loops, self._is_caught), loops, False
        self.generic_visit(node)
        self._loops, self._is_caught = outer
        return node

    def visit_Try(self, node: ast.Try) -> ast.AST:
        outer, self._is_caught = self._is_caught, self._is_caught or bool(node.handlers)
        node.body = [self.visit(each) for each in node.body]
        self._is_caught = outer
        for others in (node.handlers, node.orelse, node.finalbody):
            others[:] = [self.visit(each) for each in others]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        text = ast.unparse(node)
        self.generic_visit(node)
        node.test = _Modulos(self, node.lineno, text).visit(node.test)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # save = step % 500 == 0, a condition that is used later
        text = ast.unparse(node)
        self.generic_visit(node)
        if isinstance(node.value, (ast.Compare, ast.BoolOp)):
            node.value = _Modulos(self, node.lineno, text).visit(node.value)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        text = f"if {ast.unparse(node.test)}"
        last = node.body[-1]
        is_exit = _is_exit(last) or (isinstance(last, ast.Raise) and not self._is_caught)
        loops = self._loops if is_exit or isinstance(last, ast.Return) else self._loops[-1:]
        is_end = (is_exit or isinstance(last, (ast.Break, ast.Return))) and bool(loops)
        is_milestone = not is_end and bool(self._loops) and _compares_counter(node.test, self._loops[-1])
        leaves = is_end and any(_depends_on_values(node.test, loop) for loop in loops)
        self.generic_visit(node)
        if is_end or is_milestone:
            node.test = self._limit(node.test, node.lineno, text)
        node.test = _Modulos(self, node.lineno, text).visit(node.test)
        if leaves and (leave := self._leave(node.lineno, text)):
            node.body.insert(len(node.body) - 1, leave)
        return node

    def _limit(self, test: ast.expr, line: int, text: str) -> ast.expr:
        """Return a comparison such as ``step >= limit`` that records both of its sides. Others are returned as is."""
        has_modulo = any(isinstance(each, ast.Mod) for each in ast.walk(test))
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or has_modulo:
            return test
        kind = _KINDS.get(type(test.ops[0]))
        names = None if kind is None else self.add(kind, line, text)
        return test if names is None else _recorded(test, [test.left, test.comparators[0]], names)

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
        return names_of(len(self.conditions) - 1)


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
        return _recorded(node, [node.left, node.right], names)


def _recorded(expression: ast.expr, operands: Sequence[ast.expr], names: tuple[str, str]) -> ast.expr:
    """Return ``EXPRESSION if OFF else RECORD(OPERANDS)``."""
    record = ast.Call(func=_name(names[1]), args=[copy.deepcopy(each) for each in operands], keywords=[])
    return ast.IfExp(test=_name(names[0]), body=expression, orelse=record)


def _is_exit(statement: ast.stmt) -> bool:
    """Return whether a statement ends the script, as ``sys.exit(0)`` does."""
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return is_call and ast.unparse(statement.value.func) in _EXITS  # type: ignore[attr-defined]


def _compares_counter(test: ast.expr, loop: ast.For | ast.AsyncFor) -> bool:
    """Return whether a condition compares the variable of a loop, or one that it counts, as ``step == 500`` does."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    counters = _names_in(loop.target) | {
        each.target.id
        for part in loop.body
        for each in ast.walk(part)
        if isinstance(each, ast.AugAssign) and isinstance(each.op, ast.Add) and isinstance(each.target, ast.Name)
    }
    return any(isinstance(side, ast.Name) and side.id in counters for side in (test.left, test.comparators[0]))


def _does_work(loop: ast.For) -> bool:
    """Return whether a loop calls something outside of conditions and returned values. Otherwise it only looks up."""
    ends = [each for part in loop.body for each in ast.walk(part) if isinstance(each, (ast.If, ast.Return))]
    tests = {inner for each in ends for inner in ast.walk(each.test if isinstance(each, ast.If) else each)}
    return any(
        isinstance(each, (ast.Call, ast.AugAssign)) and each not in tests
        for part in loop.body
        for each in ast.walk(part)
    )


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
