"""Copies code, except what the ignore file ``.heteroignore`` of its folder names.

Its patterns have the syntax and the meaning of a ``.gitignore``. This is a separate module, because both `prepare` and
the rehearsal of a prepared job from its original code read the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from hetero.documents.files import read_bounded
from hetero.errors import ConfigError
from hetero.simulate.opt_ml import has_opt_ml

__all__ = ["IGNORE_FILE", "Ignored", "copy_code", "ignored_files"]

Ignored = Callable[[str, list[str]], Iterable[str]]
"""Returns the names in a folder that are not copied. It is the argument ``ignore`` of `shutil.copytree`."""
IGNORE_FILE = ".heteroignore"
_ALWAYS = (".git", "__pycache__", ".venv", IGNORE_FILE)
"""Patterns that come before the patterns of the file. The file can include these names again with ``!``."""


def copy_code(
    source: Path,
    target: Path,
    *,
    left_out: Path,
    ignored: Iterable[Ignored],
    copy: Callable[[str, str], object] = shutil.copy2,
) -> None:
    """Copy code, except ignored files and the output of rehearsals.

    That output contains links to the data, and copies of the code with tokens.

    Args:
        source: The folder with the code.
        target: Folder of the copy.
        left_out: A folder that is not copied.
        ignored: Functions that name the files that are not copied.
        copy: Function that copies a file.

    Raises:
        ConfigError: If a file or folder cannot be copied.
    """

    def all_ignored(folder: str, names: list[str]) -> set[str]:
        """Return the names in a folder that are not copied. `shutil.copytree` calls this for each folder."""
        folder_path = Path(folder).resolve()
        output = {name for name in names if folder_path / name == left_out or has_opt_ml(folder_path / name)}
        return output.union(*(each(folder, names) for each in ignored))

    try:
        shutil.copytree(source, target, ignore=all_ignored, copy_function=copy, dirs_exist_ok=True)
    # shutil.Error is an OSError. Its argument is a list of (source, target, reason).
    except OSError as error:
        path, _, why = error.args[0][0] if isinstance(error, shutil.Error) else (source, target, error)
        raise ConfigError(f"cannot copy {path} with the code: {why}; make it readable, or remove it") from error


def ignored_files(source: Path) -> Ignored:
    """Return the function that names the files of a source folder that are not copied.

    Args:
        source: The source folder. Its ignore file is optional.

    Raises:
        ConfigError: If the ignore file cannot be read, has an invalid pattern, or pathspec is not installed.
    """
    path = source / IGNORE_FILE
    if not path.exists():
        return shutil.ignore_patterns(*_ALWAYS)
    try:
        from pathspec import GitIgnoreSpec
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs pathspec, which is not installed; pip install pathspec") from None
    try:
        lines = read_bounded(path, f"the ignore file {path}").decode("utf-8").splitlines()
        spec = GitIgnoreSpec.from_lines([*_ALWAYS, *lines])
    except ValueError as error:
        raise ConfigError(f"{path}: {str(error)[:200]}; expected patterns as in a .gitignore") from error

    def ignored(folder: str, names: list[str]) -> set[str]:
        """Return the names in a folder that match a pattern."""
        found = set()
        for name in names:
            entry = Path(folder, name)
            # As in git, the path of a folder ends with a slash. A pattern that ends with a slash matches only folders.
            end = "/" if entry.is_dir() else ""
            if spec.match_file(entry.relative_to(source).as_posix() + end):
                found.add(name)
        return found

    return ignored
