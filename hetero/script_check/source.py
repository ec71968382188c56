"""Searches the script's source for lines that make samples differ between processes."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hetero.batches.imported import imported
from hetero.batches.purity.changes import changes, functions_of, is_global, syntax_tree
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
_SEEDING_NAMES = frozenset({"manual_seed", "seed", "on_seed"})
_UNSEEDED_FUNCTIONS = frozenset(
    {
        *("urandom", "token_bytes", "token_hex", "randbelow", "uuid1", "uuid4", "getpid", "gethostname"),
        *("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today", "getrandom"),
    }
)
"""Functions of the standard library whose results no seed decides."""


def static_findings(folder: str) -> list[Finding]:
    """Return what the source alone shows. The script must be imported in this process.

    Args:
        folder: Folder of the script.
    """
    used = _used()
    found = [*_unseeded_generators(used, folder), *_environment(used, folder)]
    return list(dict.fromkeys(found))


def impure_lines(folder: str) -> list[tuple[tuple[str, int], str]]:
    """Return lines of the data sets' code that may make a sample differ when it is computed again.

    Args:
        folder: Folder of the script.

    Returns:
        For each line: its file and number, and the expression that is a possible cause.
    """
    used = _used()
    impure_names = _OWN_GENERATORS | _UNSEEDED_FUNCTIONS
    suspects = [(file, call) for file, call in _calls(used, folder) if _name(call).rpartition(".")[2] in impure_names]
    # A call without arguments is not seeded.
    causes = [((file, call.lineno), f"{_name(call)}()") for file, call in suspects if not call.args]
    # A method that changes an attribute of the data set makes the next sample depend on this one. But `__init__` runs
    # before all samples, and `on_seed` seeds a generator before each sample.
    for file, function in _functions(used, folder):
        if function.name not in ("__init__", "on_seed"):
            # `names` are the parts of the changed expression: ("self", "count") for self.count += 1.
            for names, line in changes(function):
                if len(names) > 1 and not is_global(names[0], function):
                    causes.append(((file, line), f"self.{names[1]}, which {function.name}() changes"))
    # If nothing else is found, return the calls with arguments too. A generator with a seed is a cause if it lives
    # longer than a sample, which this search does not examine.
    causes = causes or [((file, call.lineno), f"{_name(call)}()") for file, call in suspects]
    return list(dict.fromkeys(causes))


def method_line(name: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of a method or function of the data sets' code."""
    codes = [code for code in _used().functions if code.co_name == name and is_user_file(code.co_filename, folder)]
    return (os.path.realpath(codes[0].co_filename), codes[0].co_firstlineno) if codes else None


def change_line(label: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of the code that changes a global, an attribute or an option after the import.

    This is a function, or a block of ``if __name__ == "__main__":``, that assigns a name or changes what it holds. The
    caller knows that the value has changed, but not where. So the first change of something with this name is returned.

    Args:
        label: Label of the global as in `hetero.batches.purity.reach.Place`.
        folder: Folder of the script.
    """
    name = label.rpartition(".")[2]
    for file in _user_files(folder):
        for block in _blocks_of_main(syntax_tree(file)):
            # `names` are the parts of the changed expression: ("config", "size") for config.size = 3.
            for names, line in changes(block):
                # An attribute or option of this name counts on any object. A variable counts only if it is global.
                is_global_name = not isinstance(block, ast.FunctionDef) or is_global(names[0], block)
                if name in names[1:] or (name == names[0] and is_global_name):
                    return file, line
    return None


def call_line(name: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of the first call of a class or function in the user's files."""
    for file in _user_files(folder):
        for node in ast.walk(syntax_tree(file)):
            if isinstance(node, ast.Call) and _name(node).rpartition(".")[2] == name:
                return file, node.lineno
    return None


def nested_factory(script: str, folder: str) -> tuple[str, int] | None:
    """Return file and line of a decorator ``@hetero.dataset`` inside of a function, or None.

    Args:
        script: Path of the script.
        folder: Folder of the script.
    """
    for file in (script, *_user_files(folder)):
        for outer in (node for node in ast.walk(syntax_tree(file)) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(outer):
                if isinstance(node, ast.FunctionDef) and node is not outer:
                    for each in node.decorator_list:
                        if ast.unparse(each).partition("(")[0].rpartition(".")[2] == "dataset":
                            return file, each.lineno
    return None


def is_user_file(file: str, folder: str) -> bool:
    """Return whether a file is in the script's folder, and not an installed library."""
    # A virtual environment may lie in the script's folder.
    path = Path(os.path.realpath(file))
    return path.is_relative_to(folder) and not {"site-packages", "dist-packages"} & set(path.parts)


def _used() -> Reach:
    """Return the functions and names that the registered data sets and the script's samplers use."""
    roots: list[Any] = [get_factory(name) for name in registered()]
    torch_data = imported("torch.utils.data")
    if torch_data is not None:
        for module in user_modules():
            values = [value for value in vars(module).values() if isinstance(value, type)]
            roots += [value for value in values if issubclass(value, torch_data.Sampler)]
    return reach(roots)


def _functions(used: Reach, folder: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions that the data sets use, with their files."""
    for code, function in functions_of(used.functions):
        if is_user_file(code.co_filename, folder):
            yield os.path.realpath(code.co_filename), function


def _calls(used: Reach, folder: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in the functions that the data sets use."""
    for file, function in _functions(used, folder):
        yield from ((file, each) for each in ast.walk(function) if isinstance(each, ast.Call))


def _name(call: ast.Call) -> str:
    """Return the called function as it is written, for example ``np.random.default_rng``."""
    return ast.unparse(call.func)


def _unseeded_generators(used: Reach, folder: str) -> Iterator[Finding]:
    """Yield the calls in the code of the data sets that make a generator without a seed."""
    # Code that seeds any generator may seed these.
    if _SEEDING_NAMES & (used.names | {code.co_name for code in used.functions}):
        return
    for file, call in _calls(used, folder):
        if _name(call).rpartition(".")[2] in _OWN_GENERATORS and not call.args and not call.keywords:
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
    read_names = {name for function in functions for name, _ in _variables(function, is_write=False)}
    for file in _user_files(folder):
        for node in _blocks_of_main(syntax_tree(file)):
            for name, line in _variables(node, is_write=True):
                if name in read_names:
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
        # os.environ["NAME"]
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
            if isinstance(node.ctx, ast.Store) == is_write and isinstance(node.slice, ast.Constant):
                yield str(node.slice.value), node.lineno
        # os.environ.get("NAME"), os.getenv("NAME"), os.environ.setdefault("NAME", ...), os.putenv("NAME", ...)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = _name(node)
            writes = name.endswith(("environ.setdefault", "putenv"))
            if writes == is_write and (writes or name.endswith(("environ.get", "getenv"))):
                yield str(node.args[0].value), node.lineno


def _user_files(folder: str) -> Sequence[str]:
    """Return the files of the imported modules that are in the script's folder."""
    files = [getattr(module, "__file__", None) for module in user_modules()]
    return sorted({os.path.realpath(file) for file in files if file and is_user_file(file, folder)})
