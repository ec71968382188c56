"""Search of the script's source for lines that make samples differ between processes."""

from __future__ import annotations

import ast
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero.batches.imported import imported
from hetero.batches.purity.reach import Reach, reach, user_modules
from hetero.datasets import get_factory, registered
from hetero.script_check.findings import Finding
from hetero.system.scripts import main_blocks

__all__ = [
    "call_line",
    "change_line",
    "impure_lines",
    "is_user_file",
    "method_line",
    "nested_factory",
    "static_findings",
]

_OWN_GENERATORS = frozenset({"default_rng", "RandomState", "Random", "SystemRandom", "Generator"})
_SETS_SEED = frozenset({"manual_seed", "seed", "on_seed"})
_OUTSIDE = frozenset(
    {
        *("urandom", "token_bytes", "token_hex", "randbelow", "uuid1", "uuid4", "getpid", "gethostname"),
        *("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today", "getrandom"),
    }
)
"""Functions of the standard library whose results no seed decides."""
_MUTATORS = frozenset(
    {
        *("add", "append", "appendleft", "clear", "discard", "extend", "fill", "insert", "pop", "popitem", "remove"),
        *("reverse", "setdefault", "sort", "update", "merge_from_dict", "merge_from_file", "merge_from_list"),
    }
)
"""Methods that change a container. The last three are those of yacs and similar libraries."""


def static_findings(folder: str) -> list[Finding]:
    """Return what the source alone shows. The script must be imported in this process.

    Args:
        folder: Folder of the script.
    """
    used = _used()
    found = [*_unseeded_generators(used, folder), *_environment(used, folder)]
    return list(dict.fromkeys(found))


def impure_lines(folder: str) -> list[tuple[tuple[str, int], str]]:
    """Return file and line, and the reason, of code that may make a sample differ when it is computed again."""
    used = _used()
    calls = [(file, node) for file, node in _calls(used, folder) if _is_impure(node)]
    found = [((file, node.lineno), f"{_name(node)}()") for file, node in calls if not node.args]
    for file, function in _functions(used, folder):
        if function.name not in ("__init__", "on_seed"):
            for names, line in _changes(function):
                if len(names) > 1 and not _is_global(names[0], function):
                    found.append(((file, line), f"self.{names[1]}, which {function.name}() changes"))
    # A generator with a seed is only a cause if it lives longer than a sample.
    found = found or [((file, node.lineno), f"{_name(node)}()") for file, node in calls]
    return list(dict.fromkeys(found))


def method_line(name: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of a method or function of the data sets' code."""
    codes = [code for code in _used().functions if code.co_name == name and is_user_file(code.co_filename, folder)]
    return (os.path.realpath(codes[0].co_filename), codes[0].co_firstlineno) if codes else None


def change_line(label: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of the code that changes a global, an attribute or an option after the import.

    This is a function, or a block of ``if __name__ == "__main__":``, that assigns a name or changes what it holds. Only
    names are compared, because it is known that the value has changed.

    Args:
        label: Label of the global as in `hetero.batches.purity.reach.Place`.
        folder: Folder of the script.
    """
    name = label.rpartition(".")[2]
    for file in _user_files(folder):
        for block in _blocks_of_main(_tree(file)):
            for names, line in _changes(block):
                is_outside = not isinstance(block, ast.FunctionDef) or _is_global(names[0], block)
                if name in names[1:] or (name == names[0] and is_outside):
                    return file, line
    return None


def call_line(name: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of the first call of a class or function in the user's files."""
    for file in _user_files(folder):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Call) and _name(node).rpartition(".")[2] == name:
                return file, node.lineno
    return None


def nested_factory(script: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of a factory that is registered inside of a function."""
    for file in (script, *_user_files(folder)):
        for outer in (node for node in ast.walk(_tree(file)) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(outer):
                if isinstance(node, ast.FunctionDef) and node is not outer:
                    for each in node.decorator_list:
                        if ast.unparse(each).partition("(")[0].rpartition(".")[2] == "dataset":
                            return file, each.lineno
    return None


def is_user_file(file: str, folder: str) -> bool:
    """Return whether a file is in the script's folder, and not an installed library."""
    path = Path(os.path.realpath(file))
    return path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts)


def _used() -> Reach:
    """Return the code of all registered data sets, and of the script's samplers."""
    roots: list[Any] = [get_factory(name) for name in registered()]
    torch_data = imported("torch.utils.data")
    if torch_data is not None:
        for module in user_modules():
            values = [value for value in vars(module).values() if isinstance(value, type)]
            roots += [value for value in values if issubclass(value, torch_data.Sampler)]
    return reach(roots)


@functools.lru_cache(maxsize=256)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _functions(used: Reach, folder: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions that the data sets use, with their files. Functions inside others are a part of them."""
    places = {(os.path.realpath(code.co_filename), code.co_firstlineno) for code in used.functions}
    for file in sorted({file for file, _ in places if is_user_file(file, folder)}):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.FunctionDef) and (file, _first_line(node)) in places:
                yield file, node


def _calls(used: Reach, folder: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in the functions that the data sets use."""
    for file, function in _functions(used, folder):
        yield from ((file, each) for each in ast.walk(function) if isinstance(each, ast.Call))


def _changes(block: ast.AST) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield what code assigns or changes, and the lines. ``a.b[0] = 1`` and ``a.b.append(1)`` yield ``("a", "b")``."""
    for node in ast.walk(block):
        names: tuple[str, ...] = ()
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            names = _path(node)
        elif isinstance(node, ast.Call):
            function = node.func
            filled = [each.value for each in node.keywords if each.arg == "namespace"]  # argparse fills this object
            if isinstance(function, ast.Attribute) and function.attr in _MUTATORS:
                names = _path(function.value)
            elif _name(node) == "setattr" and len(node.args) == 3 and isinstance(node.args[1], ast.Constant):
                names = (*_path(node.args[0]), str(node.args[1].value))
            elif filled:
                names = _path(filled[0])
        if names:
            yield names, node.lineno  # type: ignore[attr-defined]


def _path(node: ast.expr) -> tuple[str, ...]:
    """Return the names in an expression of names, attributes and subscripts, the first one first. Else nothing."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (path := _path(node.value)):
        return (*path, node.attr)
    return _path(node.value) if isinstance(node, ast.Subscript) else ()


def _is_global(name: str, function: ast.FunctionDef) -> bool:
    """Return whether a name in a function is a global, and not an argument or a local variable."""
    nodes = list(ast.walk(function))
    if any(isinstance(node, ast.Global) and name in node.names for node in nodes):
        return True
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return name not in stored | {node.arg for node in nodes if isinstance(node, ast.arg)}


def _first_line(node: ast.FunctionDef) -> int:
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func)


def _is_impure(call: ast.Call) -> bool:
    last = _name(call).rpartition(".")[2]
    return last in _OWN_GENERATORS or last in _OUTSIDE


def _unseeded_generators(used: Reach, folder: str) -> Iterator[Finding]:
    for file, call in _calls(used, folder):
        if _name(call).rpartition(".")[2] in _OWN_GENERATORS and not call.args and not call.keywords:
            if _SETS_SEED & (used.names | {code.co_name for code in used.functions}):
                continue
            yield Finding(
                file,
                call.lineno,
                f"{_name(call)}() is seeded by the machine: every process draws other numbers",
                "Draw from the global generators of random, NumPy or torch, which hetero seeds for each sample. Or "
                "seed this one in a method on_seed(self, key) of the data set.",
            )


def _environment(used: Reach, folder: str) -> Iterator[Finding]:
    """Yield variables of the environment that the script sets after its import and that the data sets' code reads."""
    functions = (function for _, function in _functions(used, folder))
    read = {name for function in functions for name, _ in _variables(function, is_write=False)}
    for file in _user_files(folder):
        for node in _blocks_of_main(_tree(file)):
            for name, line in _variables(node, is_write=True):
                if name in read:
                    yield Finding(
                        file,
                        line,
                        f"the script sets the environment variable {name} here, and the data set's code reads it",
                        "Data hosts only import the script, so they do not have the value. Make it an argument of the "
                        "factory, or set it at the top level of the script.",
                    )


def _blocks_of_main(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the functions of a module, and the blocks of ``if`` at its top level, which an import may not run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
    yield from main_blocks(tree)


def _variables(tree: ast.AST, *, is_write: bool) -> Iterator[tuple[str, int]]:
    """Yield names and lines of environment variables that code reads or sets by a constant name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            if isinstance(node.ctx, ast.Store) == is_write and isinstance(node.slice, ast.Constant):
                yield str(node.slice.value), node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = _name(node)
            writes = name.endswith(("environ.setdefault", "putenv"))
            if writes == is_write and (writes or name.endswith(("environ.get", "getenv"))):
                yield str(node.args[0].value), node.lineno


def _user_files(folder: str) -> Sequence[str]:
    files = [getattr(module, "__file__", None) for module in user_modules()]
    return sorted({os.path.realpath(file) for file in files if file and is_user_file(file, folder)})
