"""What jobs may leave on a machine: ports, shared memory, files."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from pathlib import Path

import psutil

Port = tuple[str, int]
_SHARED = Path("/dev/shm")


def shared_memory() -> set[Path]:
    """Return the files of shared memory, without named semaphores.

    Python unlinks a semaphore as soon as it has opened it. A semaphore that has a name belongs to another program.
    """
    return {path for path in _SHARED.iterdir() if not path.name.startswith("sem.")}


def new_shared_memory(before: set[Path]) -> list[str]:
    """Return the new files, except those that programs have mapped, because the programs of a job have ended."""
    new = sorted(shared_memory() - before)
    in_use = _shared_memory_in_use() if new else set()
    return [str(path) for path in new if path not in in_use and path.exists()]


def listening() -> dict[Port, int | None]:
    """Return where processes listen, and the process of each if it is known."""
    found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return {(each.laddr.ip, each.laddr.port): each.pid for each in found}


def ports_of(pids: Container[int]) -> set[Port]:
    """Return where processes listen."""
    return {port for port, pid in listening().items() if pid is not None and pid in pids}


def files(folder: Path) -> list[str]:
    """Return the names in a folder. Empty if it does not exist."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def _shared_memory_in_use() -> set[Path]:
    """Return the files of shared memory that living processes have mapped."""
    found = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            lines = [line for line in maps.read_text(errors="replace").splitlines() if f" {_SHARED}/" in line]
            found |= {Path(line[line.index(f"{_SHARED}/") :]) for line in lines}
    return found
