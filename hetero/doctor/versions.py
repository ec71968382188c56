"""Checks the versions of Python and of libraries, and reports versions that are known to be bad."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetero import __version__
from hetero.doctor.snapshot import Snapshot
from hetero.documents.diagnosis import Diagnosis, Level, error, ok

__all__ = ["FLOORS", "KNOWN_BAD", "KnownBad", "examine", "judge"]

FLOORS: Mapping[str, str] = {
    "grpcio": "1.49.1",
    "numpy": "1.24",
    "protobuf": "4.25",
    "psutil": "5.9",
    "PyYAML": "6.0",
    "xxhash": "3.0",
}
"""Lowest versions of the packages that hetero needs, the same as in pyproject.toml."""
_OPTIONAL_FLOORS = {"torch": "2.1", "tensorflow": "2.16"}
_SHOWN = (*FLOORS, *_OPTIONAL_FLOORS, "sagemaker", "sagemaker-training")
_NEEDED_MODULES = ("grpc", "hetero.wire.proto.control_pb2", "hetero.wire.proto.data_pb2")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownBad:
    """Versions of a package that work badly or fail beside versions of another package."""

    package: str
    at_least: str
    below: str
    level: Level
    why: str
    to_do: str
    source: str
    with_package: str
    """The other package."""
    with_at_least: str
    """Lowest version of the other package."""


KNOWN_BAD = (
    KnownBad(
        package="protobuf",
        at_least="7",
        below="8",
        level=Level.WARNING,
        why="the SageMaker SDK excludes protobuf 7",
        to_do="pip install 'protobuf<7'",
        source="https://github.com/aws/sagemaker-python-sdk",
        with_package="sagemaker",
        with_at_least="2.257",
    ),
    KnownBad(
        package="torch",
        at_least="0",
        below="2.3",
        level=Level.ERROR,
        why="it was built for NumPy 1 and cannot exchange arrays with NumPy 2: 'Numpy is not available'",
        to_do="pip install 'numpy<2', or torch 2.3 or newer",
        source="https://numpy.org/doc/stable/user/troubleshooting-importerror.html",
        with_package="numpy",
        with_at_least="2",
    ),
)
"""Each of these versions failed in a test. `KnownBad.source` gives the reason.

Withdrawn versions are not listed, because pip installs one only if a requirement names it.
"""


def examine(snapshot: Snapshot) -> list[Diagnosis]:
    """Compare the installed packages with the required ones and with those known to be bad."""
    installed = {name: version for name in _SHOWN if (version := _version(name)) is not None}
    python = ".".join(map(str, sys.version_info[:3]))
    diagnoses = list(judge(installed))
    for module in _NEEDED_MODULES:
        try:
            importlib.import_module(module)  # allowed: one of the names above
        except Exception as problem:  # noqa: BLE001 - a broken installation may raise anything
            found = f"{module} cannot be imported: {type(problem).__name__}: {problem}"
            diagnoses.append(error(found, "install grpcio and protobuf for this Python and machine again"))
    shown = ", ".join(f"{name} {version}" for name, version in installed.items())
    return [ok(f"hetero {__version__}, Python {python}, {shown}", python=python, packages=installed), *diagnoses]


def judge(installed: Mapping[str, str]) -> Iterator[Diagnosis]:
    """Yield a diagnosis for each package that is missing, too old or known to be bad.

    Args:
        installed: Maps names to versions of the installed packages.
    """
    for name, floor in {**FLOORS, **_OPTIONAL_FLOORS}.items():
        version = installed.get(name)
        if version is None and name in FLOORS:
            yield error(f"{name} is not installed; hetero needs it", f"pip install '{name}>={floor}'")
        elif version is not None and _release(version) < _release(floor):
            yield error(f"{name} is {version}; expected {floor} or newer", f"pip install '{name}>={floor}'")
    for rule in KNOWN_BAD:
        version, other_version = installed.get(rule.package), installed.get(rule.with_package)
        # The rule applies only beside a recent version of the other package.
        if version is None or other_version is None or _release(other_version) < _release(rule.with_at_least):
            continue
        if _release(rule.at_least) <= _release(version) < _release(rule.below):
            found = f"{rule.package} {version} beside {rule.with_package} {other_version}: {rule.why}"
            yield Diagnosis(level=rule.level, found=found, to_do=rule.to_do, details={"source": rule.source})


def _release(version: str) -> tuple[int, ...]:
    """Return a version's release numbers without zeros at the end: 2.3.0+cpu and 2.3.0rc1 give (2, 3)."""
    release = re.split(r"[^0-9.]", version)[0]
    numbers = [int(number) for number in release.split(".") if number]
    # Without this, 2.3 would be less than 2.3.0.
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
