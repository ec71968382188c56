"""Private folders that do not outlive their process for long, even if that is killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["private_folder"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 10


@contextlib.contextmanager
def private_folder(prefix: str, *, parent: str | None = None) -> Iterator[Path]:
    """Make a folder for the time of a ``with`` block.

    Its owner holds a lock on it, which goes with the process: what an owner that was killed has left is
    told by that, and removed by the next one that comes along.

    Args:
        prefix: Of its name; folders with the same one are each other's successors.
        parent: Where to make it; by default the folder for temporary files.

    Raises:
        OSError: If it cannot be made.
    """
    base = Path(parent if parent is not None else tempfile.gettempdir())
    _remove_stale(base, prefix)
    path, descriptor = _make(base, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _make(base: Path, prefix: str) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        with contextlib.suppress(OSError):  # another process took it for stale before it was locked
            return path, _lock(path)
    raise OSError(f"could not keep a folder {prefix}* in {base}: another process removes them")


def _remove_stale(base: Path, prefix: str) -> None:
    for path in base.glob(f"{prefix}*"):
        try:
            descriptor = _lock(path)
        except OSError:
            continue  # in use, somebody else's, or gone by now
        try:
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a run that was killed had left", path)
        finally:
            os.close(descriptor)


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock of a folder of this user's.

    Raises:
        OSError: If it is locked, or no such folder is there.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        facts = os.fstat(descriptor)
        if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) != 0o700:
            raise PermissionError(f"{path} is not a private folder of this user")
        if not os.path.samestat(facts, path.lstat()):
            raise FileNotFoundError(f"{path} was replaced")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
