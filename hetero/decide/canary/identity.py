"""The identity of a canary study. Runs of an earlier start are used again only if the identity is the same."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from hetero.decide.canary.design import CanaryRequest
from hetero.decide.canary.files import files_of, matches
from hetero.decide.studies.ledger import digest_of_script

__all__ = ["digest_of_modules", "identity_of"]


def identity_of(request: CanaryRequest, data_bytes: float | None, *, is_cold: bool) -> dict[str, object]:
    """Return what must be the same if a killed study goes on.

    Args:
        request: What was asked for.
        data_bytes: Bytes of the files that are divided, if they are known.
        is_cold: Whether files are dropped from the page cache before a run.

    Raises:
        ConfigError: If a file of a channel cannot be read.
    """
    script = request.script_path
    return {
        "script": request.script,
        "content of the script": None if script is None else digest_of_script(script),
        # Modules count too, because runs with other modules were once used again.
        "content of its modules": None if script is None else digest_of_modules(script),
        "bytes of the channels": data_bytes,
        "bytes of files that every run gets": _constant_files(request),
        "cache": "cold" if is_cold else "warm",
        "args": list(request.script_args),
        "clusters": [list(cluster.groups) for cluster in request.clusters],
        "fractions": list(request.fractions),
        "channels": {name: str(path.resolve()) for name, path in sorted(request.channels.items())},
        "seed": request.seed,
    }


def digest_of_modules(script: Path) -> str:
    """Return a digest of the modules in the script's folder that it imports, directly or through each other."""
    digest = hashlib.sha256()
    for path in sorted(_modules(script)):
        digest.update(f"{path.relative_to(script.parent).as_posix()}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _modules(script: Path) -> set[Path]:
    """Return the files in the script's folder that the script imports, directly or indirectly."""
    found: set[Path] = set()
    pending = [script]
    while pending:
        source = pending.pop()
        for name in _imported(source, script.parent):
            for path in _files_of(script.parent.joinpath(*name.split("."))):
                if path not in found and path != script:
                    found.add(path)
                    pending.append(path)
    return found


def _files_of(path: Path) -> Iterator[Path]:
    """Yield the file of a module if ``path.py`` exists, and the first file of a package if ``path`` is one."""
    for each in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if each.is_file():
            yield each


def _imported(source: Path, root: Path) -> Iterator[str]:
    """Yield the full names that a file may import, each after the names of its packages: ``a`` before ``a.b``.

    Args:
        source: The file.
        root: Folder of the script, which relative imports are relative to.
    """
    try:
        tree = ast.parse(source.read_bytes())
    # Skip a module that cannot be read, because the run itself reports it.
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = source.relative_to(root).parent.parts
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            # The level is the number of dots before the name. One dot is the package of the file, two dots are the
            # package that contains this one. Without dots, the name is absolute.
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *filter(None, [node.module])))
            # An imported name may be a module of the package, or a value in it.
            names = [base, *(f"{base}.{each.name}" if base else each.name for each in node.names)]
        for name in names:
            # Skip the star of `from a import *`.
            parts = [part for part in name.split(".") if part.isidentifier()]
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))


def _constant_files(request: CanaryRequest) -> dict[str, list[int]]:
    """Return number and bytes of the files that every run gets, by channel.

    These are all files of a channel that stays whole, and the files of a divided channel that match a pattern of
    ``request.keep``.
    """
    found = {}
    for name, path in sorted(request.channels.items()):
        is_whole = name in request.whole_channels
        # Without patterns, no file of a divided channel counts. So do not list its files, which takes long.
        if is_whole or request.keep:
            sizes = [file.num_bytes for file in files_of(path) if is_whole or matches(file.name, request.keep)]
            found[name] = [len(sizes), sum(sizes)]
    return found
