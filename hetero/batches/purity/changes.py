"""Finds the names that source code assigns or changes. Used when processes differ, and by ``hetero check``."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

from hetero.batches.purity.reach import Reach

__all__ = ["changes", "functions_of", "is_global", "own_changes", "syntax_tree"]

_MUTATORS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "fill", "insert", "pop", "popitem", "remove"),
        *("reverse", "setdefault", "sort", "update", "merge_from_dict", "merge_from_file", "merge_from_list"),
    }
)
"""Methods that change a container. The last three are methods of yacs and similar libraries."""


def own_changes(found: Reach) -> set[str]:
    """Return labels of the values that the code of a data set itself may change. Such values are caches and counters.

    Args:
        found: The code, and the places of the values that it uses. A place is a global, an attribute of a class, or a
            value in a registered function, such as an attribute of the object that is the collate_fn.
    """
    own: set[str] = set()
    for code, function in functions_of(found.functions):
        for (variable, *attributes), _line in changes(function):
            # ``CACHE.items[0] = 1`` gives the variable CACHE and the attribute items.
            is_outside = is_global(variable, function)
            for place in found.places.values():
                if place.function_code is None:
                    # A global has the module's namespace as owner, which is a dict. Otherwise the owner is a class.
                    # ``settings.COUNT += 1`` may change the global COUNT of an imported module. The class of ``self``
                    # is not known, so ``self.count += 1`` may change the attribute ``count`` of any class.
                    is_attribute = place.name in attributes and (is_outside or isinstance(place.owner, type))
                    is_module_global = is_outside and place.name == variable and isinstance(place.owner, dict)
                    is_own = is_attribute or is_module_global
                else:
                    # The place is a value in a registered function. Count only changes by the function's own code. The
                    # training loop may call other methods of the function's object, to change an option.
                    is_own = place.name in attributes and code in place.function_code
                if is_own:
                    own.add(place.label)
    return own


def functions_of(codes: Iterable[CodeType]) -> Iterator[tuple[CodeType, ast.FunctionDef]]:
    """Yield functions with their source. A function inside another function is part of the outer one."""
    for code in codes:
        function = _functions_in(os.path.realpath(code.co_filename)).get(code.co_firstlineno)
        if function is not None:
            yield code, function


def changes(block: ast.AST) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the names that code assigns or changes, and the lines.

    For example, ``a.b[0] = 1`` and ``a.b.append(1)`` yield ``("a", "b")``.
    """
    for node in ast.walk(block):
        names: tuple[str, ...] = ()
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            names = _path(node)
        elif isinstance(node, ast.Call):
            function = node.func
            # argparse sets attributes of the object that is passed as ``namespace=``.
            namespaces = [each.value for each in node.keywords if each.arg == "namespace"]
            if isinstance(function, ast.Attribute) and function.attr in _MUTATORS:
                names = _path(function.value)
            elif isinstance(function, ast.Name) and function.id == "setattr" and len(node.args) == 3:
                # The name of the attribute is known only if it is a constant.
                name = node.args[1]
                names = (*_path(node.args[0]), str(name.value)) if isinstance(name, ast.Constant) else ()
            elif namespaces:
                names = _path(namespaces[0])
        if names:
            yield names, node.lineno  # type: ignore[attr-defined]


def is_global(name: str, function: ast.FunctionDef) -> bool:
    """Return whether a name in a function is a global, and not an argument or a local variable."""
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Global) and name in node.names for node in nodes):
        return True
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return name not in stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


@functools.lru_cache(maxsize=256)
def syntax_tree(file: str) -> ast.Module:
    """Return the syntax tree of a file, or an empty one if the file cannot be read."""
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


# Without the cache, a file would be searched once for each of its functions. This takes seconds for hundreds of
# functions in large files.
@functools.lru_cache(maxsize=256)
def _functions_in(file: str) -> dict[int, ast.FunctionDef]:
    """Return the functions of a file by their first line. With decorators, this is the line of the first one."""
    functions = [node for node in ast.walk(syntax_tree(file)) if isinstance(node, ast.FunctionDef)]
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in functions}


def _path(node: ast.expr) -> tuple[str, ...]:
    """Return the names in an expression of names, attributes and subscripts, in order. Empty for other expressions."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (path := _path(node.value)):
        return (*path, node.attr)
    return _path(node.value) if isinstance(node, ast.Subscript) else ()
