"""Finds the user's training script: a file, or a module that is located without an import."""

from __future__ import annotations

import ast
import importlib.util
import os
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hetero.errors import ConfigError

__all__ = [
    "SCRIPT_MODULE",
    "find_script",
    "is_in_main_block",
    "main_blocks",
    "python_path",
    "script_label",
    "script_words",
]

SCRIPT_MODULE = "__hetero_script__"
"""Name of the script's module on endpoints. The script's ``if __name__ == "__main__"`` block must not run there, so the
name is not ``__main__``."""


def python_path(stated: str = "") -> str:
    """Return the PYTHONPATH of a job: the stated folders, the folders of this process, and hetero's source tree.

    The source tree is left out if hetero is installed in ``site-packages``.
    """
    paths = [stated, os.environ.get("PYTHONPATH", "")]
    source_tree = Path(__file__).resolve().parents[2]
    if source_tree.name not in ("site-packages", "dist-packages"):
        paths.append(str(source_tree))
    # `dict.fromkeys` keeps the first of equal folders, and the order.
    return os.pathsep.join(dict.fromkeys(folder for path in paths for folder in path.split(os.pathsep) if folder))


def find_script(script: str, *, is_module: bool = False, host: str = "") -> Path:
    """Return the file of the user's script.

    Nothing is imported, because a launcher must not run the user's packages.

    Args:
        script: Path of the script, or the name of a module, which may be a package with a ``__main__``.
        is_module: Whether ``script`` is the name of a module.
        host: Name of this host for error messages. If it is empty, they name the current folder instead.

    Raises:
        ConfigError: If the file or module does not exist.
    """
    base = Path.cwd()
    place = f"on {host}" if host else f"in {base}"
    if is_module:
        return _find_module(script, base, place)
    path = Path(script)
    if path.is_dir():
        raise ConfigError(f"the training script {script!r} is a folder; expected a file\n  to do: {_advice(path)}")
    if not path.is_file():
        is_module_name = all(part.isidentifier() for part in script.split(".")) and _origin(script, base) is not None
        hint = f"; {script} is a module: put -m before it" if is_module_name else "; give its path"
        raise ConfigError(f"the training script {script!r} does not exist {place}{hint}")
    return path


def script_words(script: str, *, is_module: bool) -> list[str]:
    """Return the words that name the script on a command line: its path, or ``-m`` and its name."""
    return ["-m", script] if is_module else [script]


def script_label(script: str, *, is_module: bool) -> str:
    """Return a short name for folders and jobs: ``train`` for ``src/train.py`` and for ``package.train``."""
    return script.rpartition(".")[2] if is_module else Path(script).stem


def main_blocks(tree: ast.Module) -> list[ast.If]:
    """Return the blocks of ``if __name__ == "__main__":`` in a module. Data hosts do not run them."""
    return [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]


def is_in_main_block(file: str, line: int) -> bool:
    """Return whether a line of a source file is in a block of ``if __name__ == "__main__":``."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return False
    return any(node.lineno <= line <= (node.body[-1].end_lineno or 0) for node in main_blocks(tree))


def _find_module(name: str, base: Path, place: str) -> Path:
    """Return the source file of a module.

    Raises:
        ConfigError: If there is no such module. The message gives advice.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        hint = f"; {name} is a file: leave out -m" if (base / name).is_file() else ""
        raise ConfigError(f"{name!r} is not the name of a module; expected for example package.train{hint}")
    origin = _origin(name, base)
    if origin is not None:
        return origin
    if (base / name).is_file():
        raise ConfigError(f"there is no module {name!r} {place}; {name} is a file: leave out -m")
    spec = _locate(name, base)
    if spec is not None and spec.submodule_search_locations is not None:
        example = f"{name}.{_example(spec.submodule_search_locations)}"
        raise ConfigError(f"{name} is a package without __main__.py; name a module in it, for example {example}")
    raise ConfigError(
        f"there is no module {name!r} with Python source {place} or on Python's path\n"
        f"  to do: start hetero in the folder that holds {name.partition('.')[0]}, or set PYTHONPATH"
    )


def _origin(name: str, base: Path) -> Path | None:
    """Return the source file of a module, or of the ``__main__`` of a package. None if there is no such source file."""
    spec = _locate(name, base)
    # Only a package has search locations. Python runs the ``__main__`` of a package.
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _inside(spec, "__main__")
    if spec is None or not str(spec.origin).endswith(".py"):
        return None
    return Path(str(spec.origin))


def _example(package_folders: Sequence[str]) -> str:
    """Return the name of a module in a package, as an example for advice. Prefer ``train``."""
    files = [path for folder in package_folders for path in Path(folder).glob("[!_]*.py")]
    names = sorted(path.stem for path in files if path.stem.isidentifier())
    return names[0] if names and "train" not in names else "train"


def _locate(name: str, base: Path) -> ModuleSpec | None:
    """Find a module below ``base``, or else an installed module, without importing the module."""
    top_name, *inner_names = name.split(".")
    spec = PathFinder.find_spec(top_name, [str(base)])
    # A folder without ``__init__.py`` has no loader. It ranks after an installed package of the same name.
    if spec is None or spec.loader is None:
        spec = _installed(top_name) or spec
    for inner_name in inner_names:
        spec = _inside(spec, inner_name)
    return spec


def _installed(top: str) -> ModuleSpec | None:
    """Find an installed package or module, without importing it."""
    try:
        return importlib.util.find_spec(top)  # imports nothing, because the name lacks a dot
    except ValueError:  # the module is in sys.modules without a spec
        return None


def _inside(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    """Find a module directly inside a package. None if ``package`` is None or a plain module, or lacks the module."""
    locations: Sequence[str] | None = None if package is None else package.submodule_search_locations
    # Pass only the last part of the name. Otherwise a folder without __init__.py looks for its parent in sys.modules.
    return None if locations is None else PathFinder.find_spec(name, list(locations))


def _advice(folder: Path) -> str:
    """Return advice to name a file or a module instead of a folder."""
    if (folder / "__main__.py").is_file():
        return f"run it as a module (-m {folder.name}), or name {folder / '__main__.py'}"
    # Name train.py if the folder has it, or if the folder has no Python file.
    files = sorted(path.name for path in folder.glob("*.py"))
    name = files[0] if files and "train.py" not in files else "train.py"
    return f"name the file in it, for example {folder / name}"
