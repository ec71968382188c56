"""Disk space, inodes and write permission in the folders that a job writes to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hetero.doctor.snapshot import Snapshot
from hetero.errors import ConfigError
from hetero.system.diagnosis import Diagnosis, error, ok, warning
from hetero.system.workdir import private_folder

__all__ = ["examine"]

_LEAST_BYTES = 64 * 2**20
_SCARCE_BYTES = 2**30
_SCARCE_INODES = 1000


def examine(snapshot: Snapshot) -> list[Diagnosis]:
    """Write to the folder for temporary files and to the platform's folders, and check their free space."""
    diagnoses = _temporary()
    for folder, what in _folders(snapshot).items():
        if folder.is_dir():
            diagnoses.append(_look(folder, what, is_writable=_is_writable(folder)))
    return diagnoses


def _folders(snapshot: Snapshot) -> dict[Path, str]:
    folders, output = snapshot.platform.folders, snapshot.options.output_dir
    found = {
        folders.failure.parent: "the failure file and the report",
        folders.model: "the model",
        folders.checkpoints: "checkpoints",
    }
    if output is not None:
        found[output.absolute()] = "the report (--output-dir)"
    return found


def _temporary() -> list[Diagnosis]:
    """Make a folder as a launcher does, because some file systems cannot make a folder private to one user."""
    to_do = "set TMPDIR to a folder of this user on a local disk with free space"
    try:
        with private_folder("hetero-doctor-") as folder:
            (folder / "file").write_bytes(b"\0" * 4096)
    except (ConfigError, OSError) as problem:
        return [error(f"cannot make a private folder in {tempfile.gettempdir()}: {problem}", to_do)]
    return [_look(Path(tempfile.gettempdir()), "temporary files", is_writable=True)]


def _look(folder: Path, what: str, *, is_writable: bool) -> Diagnosis:
    facts = os.statvfs(folder)
    free, inodes = facts.f_bavail * facts.f_frsize, facts.f_favail
    found = f"{folder} ({what}) has {free / 2**30:,.1f} GiB free"
    details = {"folder": str(folder), "free_bytes": free, "free_inodes": inodes if facts.f_files else None}
    to_do = f"free space on the file system of {folder}, or give the host a larger volume"
    if not is_writable:
        return error(
            f"{folder} ({what}) cannot be written to", f"give this user the right to write to {folder}", **details
        )
    if free < _LEAST_BYTES:
        return error(f"{found}: a job would end with HET-24, or lose its checkpoint", to_do, **details)
    if free < _SCARCE_BYTES:
        return warning(f"{found}: too little for a checkpoint", to_do, **details)
    if facts.f_files and inodes < _SCARCE_INODES:
        return warning(f"{found}, but only {inodes} more files fit", to_do, **details)
    return ok(found, **details)


def _is_writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * 4096)
    except OSError:
        return False
    return True
