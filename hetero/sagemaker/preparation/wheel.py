"""Build a wheel of hetero itself from the files of the running package.

With this wheel, a job needs no registry to install hetero. The build works from an installed package, an editable
installation or a source tree, and uses only the standard library. The same files produce the same bytes.

Source of the format: https://packaging.python.org/specifications/binary-distribution-format/
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hetero import __version__
from hetero.errors import ConfigError
from hetero.system.extensions import OWN

__all__ = ["build_wheel"]

_TAG = "py3-none-any"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Time stamp of all files: the earliest one that a zip archive can store."""
_FILE_MODE = 0o100644
_SUFFIXES = {".css", ".json", ".py", ".pyi", ".txt", ".yaml"}
_FORWARDED = ("Requires-Python", "Summary", "Provides-Extra", "Requires-Dist")


def build_wheel(folder: Path) -> Path:
    """Write a wheel of the running hetero into a folder and return its path.

    Raises:
        ConfigError: If hetero is not installed, and its ``pyproject.toml`` is missing or cannot be read.
    """
    # Collect the files and the metadata.
    package = Path(__file__).parents[2]
    info = f"hetero-{__version__}.dist-info"
    members = dict(_package_files(package))
    members[f"{info}/METADATA"] = "".join(f"{line}\n" for line in _metadata(package)).encode()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: hetero\nRoot-Is-Purelib: true\nTag: {_TAG}\n".encode()
    members[f"{info}/entry_points.txt"] = _entry_points().encode()
    record = ""
    for name, content in members.items():
        # The format demands a digest without padding.
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    # RECORD lists itself too, without digest and size.
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    # Write the archive.
    path = folder / f"hetero-{__version__}-{_TAG}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            entry = zipfile.ZipInfo(name, _EPOCH)
            # A zip archive has Unix modes in the upper 16 bits.
            entry.external_attr = _FILE_MODE << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return path


def _package_files(package: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name in the wheel and the content of each file of the package."""
    # Sorted, so that the same files produce the same bytes.
    for path in sorted(package.rglob("*")):
        if path.is_file() and (path.suffix in _SUFFIXES or path.name == "py.typed"):
            yield f"{package.name}/{path.relative_to(package).as_posix()}", path.read_bytes()


def _entry_points() -> str:
    """Return the content of ``entry_points.txt``: the command `hetero` and the extensions of hetero itself."""
    groups = {"console_scripts": {"hetero": "hetero.cli:main"}, **OWN}
    # Sorted, as setuptools writes them.
    return "\n".join(
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in sorted(entries.items()))
        for group, entries in sorted(groups.items())
    )


def _metadata(package: Path) -> Iterator[str]:
    """Yield the lines of METADATA."""
    yield "Metadata-Version: 2.1"
    yield "Name: hetero"
    yield f"Version: {__version__}"
    project = _read_project(package.parent / "pyproject.toml")
    yield from _installed_metadata(package) if project is None else _declared_metadata(project)


def _read_project(path: Path) -> dict[str, Any] | None:
    """Return the project table of the source tree's ``pyproject.toml``.

    The source tree has priority, because the metadata of an editable installation may be older. Return None if the
    package is not in hetero's source tree, or if this Python has no ``tomllib``.
    """
    try:
        import tomllib
    # Python 3.10 has no tomllib.
    except ModuleNotFoundError:
        return None
    if not path.is_file():
        return None
    project: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == "hetero" else None


def _declared_metadata(project: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the wheel's metadata that follow from pyproject.toml."""
    yield f"Requires-Python: {project['requires-python']}"
    yield f"Summary: {project['description']}"
    for requirement in project["dependencies"]:
        yield f"Requires-Dist: {requirement}"
    for extra, requirements in project.get("optional-dependencies", {}).items():
        yield f"Provides-Extra: {extra}"
        for requirement in requirements:
            # A requirement may have a condition: NAME>=VERSION; python_version < "3.11".
            name, _, marker = requirement.partition(";")
            condition = f'({marker.strip()}) and extra == "{extra}"' if marker else f'extra == "{extra}"'
            yield f"Requires-Dist: {name.strip()} ; {condition}"


def _installed_metadata(package: Path) -> Iterator[str]:
    """Yield the lines of the wheel's metadata that the installed package states."""
    try:
        found = importlib.metadata.metadata("hetero")
    except importlib.metadata.PackageNotFoundError:
        # With Python 3.11 or newer, `_read_project` reads the requirements from pyproject.toml of the source tree
        # instead.
        raise ConfigError(
            f"hetero runs from {package} and is not installed, so its requirements are unknown\n"
            "  to do: pip install -e SOURCE_TREE, or use Python 3.11 or newer"
        ) from None
    for name in _FORWARDED:
        for value in found.get_all(name) or ():
            yield f"{name}: {value}"
