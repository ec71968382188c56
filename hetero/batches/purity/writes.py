"""Search in the user's source for code that assigns or changes globals.

It searches functions, and the block of ``if __name__ == "__main__":``. It ignores other statements at module level,
because every process that imports the module runs them.
"""

from __future__ import annotations

import ast
import functools
import sys
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from hetero.batches.purity.reach import Key, owner_key

__all__ = ["Write", "changed_objects", "is_in_main_block", "writes_in"]

_MAX_SOURCE_BYTES = 2 * 2**20
_MUTATORS = frozenset(
    (
        *("add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "fill", "insert", "pop"),
        *("popitem", "popleft", "remove", "reverse", "rotate", "setdefault", "sort", "subtract", "update"),
        *("difference_update", "intersection_update", "symmetric_difference_update"),
        *("merge_from_dict", "merge_from_file", "merge_from_list"),  # methods of yacs and similar libraries
    )
)
_NO_IMPORTS: Mapping[str, tuple[str, str | None]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Write:
    """An expression or statement in a function that assigns or changes a value that is not local to the function."""

    path: tuple[str, ...]
    """Names from the global to the value, for example ``("SCALE",)`` or ``("config", "SCALE")``.

    The first name is ``""`` for a local variable, and ``"*"`` for any global.
    """
    is_store: bool
    """Whether the code assigns the last name of the path. If not, it changes the object with that name."""
    function: str
    """Name of the function. Empty in the block of ``if __name__ == "__main__":``."""
    first_line: int
    """First line of the function."""
    line: int
    imports: Mapping[str, tuple[str, str | None]] = field(default_factory=lambda: _NO_IMPORTS)
    """Imports of the function by local name: the module and the imported name, or None for the module itself."""


def writes_in(file: str) -> tuple[Write, ...]:
    """Return the writes in the functions of a source file, or an empty tuple if the file cannot be read."""
    try:
        status = Path(file).stat()
    except OSError:
        return ()
    return _parse(file, status.st_mtime_ns) if status.st_size <= _MAX_SOURCE_BYTES else ()


@functools.lru_cache(maxsize=4096)
def _parse(file: str, _changed_ns: int) -> tuple[Write, ...]:
    try:
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ()
    finder = _Finder()
    finder.visit(tree)
    return tuple(finder.found)


def is_in_main_block(file: str, line: int) -> bool:
    """Return whether a line of a source file is in a block of ``if __name__ == "__main__":``."""
    try:
        with tokenize.open(file) as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    guards = [node for node in tree.body if isinstance(node, ast.If) and _is_main_guard(node.test)]
    return any(node.lineno <= line <= (node.body[-1].end_lineno or 0) for node in guards)


def changed_objects(write: Write, namespace: Mapping[str, Any]) -> Iterator[Key]:
    """Yield keys of the names and objects that a write changes in this process.

    Args:
        write: A write in the source of a module.
        namespace: Namespace of the same module.

    Yields:
        For each object on the path, its ``id`` and ``""``. For an assignment, also the `Key` of the assigned name.
    """
    root, *rest = write.path
    owner: Any = namespace
    if root in write.imports:
        module, name = write.imports[root]
        owner = vars(sys.modules[module]) if module in sys.modules else {}
        if name is None:
            value: Any = sys.modules.get(module)
        else:
            root, value = name, owner.get(name)
    else:
        value = owner.get(root)
    # Follow the path from the global through modules and objects.
    names = [root, *rest]
    for position, name in enumerate(names):
        is_last = position == len(names) - 1
        if is_last and write.is_store:
            yield owner_key(owner), name
            return
        if position:
            value = _members(owner).get(name)
        if value is None:
            return
        if isinstance(value, ModuleType):
            owner = vars(value)
            continue
        yield id(value), ""
        owner = value


def _members(owner: Any) -> Mapping[str, Any]:
    if isinstance(owner, dict):  # the namespace of a module, or the user's dictionary
        return owner
    try:
        members: Mapping[str, Any] = vars(owner)
    except TypeError:
        return {}
    return members


@dataclass
class _Scope:
    """A function whose body is being searched, or the block of ``if __name__ == "__main__":``."""

    name: str
    first_line: int
    own: set[str] = field(default_factory=set)
    declared: set[str] = field(default_factory=set)  # names in its `global` statements
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)


class _Finder(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Write] = []
        self._scopes: list[_Scope] = []
        self._classes: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if self._scopes or self._classes or not _is_main_guard(node.test):
            self.generic_visit(node)
            return
        self._scopes.append(_Scope("", node.lineno))
        for statement in node.body:
            self.visit(statement)
        self._scopes.pop()
        for statement in node.orelse:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node, node.name, node.body, node.decorator_list)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node, node.name, node.body, node.decorator_list)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node, "<lambda>", [node.body], [])

    def _function(self, node: Any, name: str, body: Sequence[ast.AST], decorators: Sequence[ast.expr]) -> None:
        for outside in (*decorators, *node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(outside)
        first_line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        scope = _Scope(".".join((*self._classes, name)), first_line)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            scope.own.add(argument.arg)
        scope.own.update(argument.arg for argument in (arguments.vararg, arguments.kwarg) if argument is not None)
        for inside in body:
            _collect(inside, scope)
        scope.own -= scope.declared
        self._scopes.append(scope)
        for inside in body:
            self.visit(inside)
        self._scopes.pop()

    # Nodes of the syntax tree that assign or change values

    def visit_Assign(self, node: ast.Assign) -> None:
        self._targets(node.targets)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._targets([node.target])
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._targets([node.target])
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._targets([node.target])
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._targets(node.targets)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._targets([node.target])
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._targets([node.optional_vars])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in _MUTATORS:
            if _is_call_of(function.value, "globals"):
                self._note(("*",), node, is_store=True)
            else:
                self._change(function.value, node)
        elif isinstance(function, ast.Name) and function.id == "setattr" and len(node.args) == 3:
            names, name = _path(node.args[0]), node.args[1]
            if names is not None and isinstance(name, ast.Constant) and isinstance(name.value, str):
                self._note((*names[0], name.value), node, is_store=True)
            else:
                self._change(node.args[0], node)
        for keyword in node.keywords:
            if keyword.arg == "namespace":  # argparse fills this object
                self._change(keyword.value, node)
        self.generic_visit(node)

    def _targets(self, targets: Sequence[ast.expr]) -> None:
        for target in targets:
            if isinstance(target, ast.Tuple | ast.List):
                self._targets(target.elts)
            elif isinstance(target, ast.Starred):
                self._targets([target.value])
            elif isinstance(target, ast.Subscript) and _is_call_of(target.value, "globals"):
                key = target.slice
                is_text = isinstance(key, ast.Constant) and isinstance(key.value, str)
                self._note((key.value if is_text else "*",), target, is_store=True)  # type: ignore[attr-defined]
            elif (found := _path(target)) is not None:
                names, is_exact = found
                self._note(names, target, is_store=is_exact)

    def _change(self, node: ast.expr, place: ast.AST) -> None:
        if (found := _path(node)) is not None:
            self._note(found[0], place, is_store=False)

    def _note(self, names: tuple[str, ...], node: Any, *, is_store: bool) -> None:
        if not self._scopes:
            return  # every process that imports the module runs module-level code
        scope = self._scopes[-1]
        imports = next((each.imports for each in reversed(self._scopes) if names[0] in each.imports), _NO_IMPORTS)
        is_global = names[0] in scope.declared or not any(names[0] in each.own for each in self._scopes)
        if not imports and not is_global:
            if len(names) == 1:
                return
            names = ("", *names[1:])
        elif imports and len(names) == 1 and is_store:
            return  # rebinds a local name, which does not change the imported module
        self.found.append(Write(names, is_store, scope.name, scope.first_line, node.lineno, imports))


def _collect(node: ast.AST, scope: _Scope) -> None:
    """Record the local names of a function, but not those of the functions inside it."""
    if isinstance(node, ast.Global):
        scope.declared.update(node.names)
    elif isinstance(node, ast.Nonlocal):
        scope.own.update(node.names)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        _collect_imports(node, scope)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        scope.own.add(node.id)
    elif isinstance(node, ast.ExceptHandler) and node.name:
        scope.own.add(node.name)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope.own.add(node.name)
    elif not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            _collect(child, scope)


def _collect_imports(node: ast.Import | ast.ImportFrom, scope: _Scope) -> None:
    for alias in node.names:
        if isinstance(node, ast.Import):
            local = alias.asname or alias.name.partition(".")[0]
            scope.imports[local] = (alias.name if alias.asname else local, None)
        else:
            local = alias.asname or alias.name
            if not node.level and node.module:
                scope.imports[local] = (node.module, alias.name)
        scope.own.add(local)


def _path(node: ast.expr) -> tuple[tuple[str, ...], bool] | None:
    """Return the dotted name that begins an expression, and whether it is the whole expression.

    For ``a.b[0].c`` these are ``("a", "b")`` and False. None if the expression is not a name that only attributes and
    subscripts follow.
    """
    names: list[str] = []
    is_exact = True
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            names.clear()
            is_exact = False
            node = node.value
        else:
            return None
    return (node.id, *reversed(names)), is_exact


def _is_call_of(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def _is_main_guard(test: ast.expr) -> bool:
    if not (isinstance(test, ast.Compare) and len(test.comparators) == 1):
        return False
    sides = (test.left, test.comparators[0])
    has_name = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return has_name and any(isinstance(side, ast.Constant) and side.value == "__main__" for side in sides)
