"""Private folders, each for one process. If a process was killed, another process removes its folder later."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hetero.errors import ConfigError

__all__ = ["private_folder"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 10


@contextlib.contextmanager
def private_folder(prefix: str, *, parent: str | None = None) -> Iterator[Path]:
    """Make a folder for the duration of a ``with`` block.

    The owner holds a lock on the folder, and the kernel releases the lock when the process ends. A folder without a
    lock belongs to an owner that was killed, and the next call with the same prefix removes it. On a file system
    without locks the folder stays.

    Args:
        prefix: Prefix of the folder's name. Each call removes left-over folders with the same prefix.
        parent: Folder to make it in. Default: the folder for temporary files.

    Raises:
        ConfigError: If the file system cannot make the folder private to this user.
        OSError: If the folder cannot be made.
    """
    base = Path(parent if parent is not None else tempfile.gettempdir())
    path, descriptor = _make(base, prefix)
    _remove_stale(base, prefix, own=path)
    owner = os.getpid()
    try:
        yield path
    finally:
        # A forked child that ends closes this generator too. It must not remove the folder of its parent.
        if os.getpid() == owner:
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _make(base: Path, prefix: str) -> tuple[Path, int]:
    """Make a private folder, and return it with the descriptor that holds its lock."""
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        try:
            return path, _lock(path, is_new=True)
        except (FileNotFoundError, BlockingIOError):
            # Another process saw the folder before it was locked, and removed it as a left-over folder.
            continue
        except OSError as error:
            with contextlib.suppress(OSError):
                path.rmdir()
            # `_lock` raises PermissionError if the file system ignores the mode of the folder.
            if not isinstance(error, PermissionError):
                raise
            hint = "choose a folder on another file system (for temporary folders, set TMPDIR)"
            raise ConfigError(f"a new folder in {base} is not private: {error}\n  {hint}") from error
    raise OSError(f"could not keep a folder {prefix}* in {base}: another process removes them")


def _remove_stale(base: Path, prefix: str, *, own: Path) -> None:
    """Remove the folders that killed owners have left behind.

    Args:
        base: Folder that contains them.
        prefix: Prefix of their names.
        own: The folder that was just made. It is kept.
    """
    for path in base.glob(f"{prefix}*"):
        if path == own:
            continue
        try:
            descriptor = _lock(path)
        except OSError:
            continue  # in use, owned by another user, or gone
        try:
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a run that was killed had left", path)
        finally:
            os.close(descriptor)


def _lock(path: Path, *, is_new: bool = False) -> int:
    """Return a descriptor that holds the lock of a folder of this user.

    Args:
        path: The folder.
        is_new: Whether this process has just made the folder. It then continues without a lock if the file system lacks
            locks, as NFS, Lustre and CIFS may.

    Raises:
        BlockingIOError: If the folder is locked.
        FileNotFoundError: If the folder does not exist.
        PermissionError: If other users have access to it.
        OSError: If the folder cannot be opened or locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # BlockingIOError: another process has the lock. Another error: the file system lacks locks.
            if isinstance(error, BlockingIOError) or not is_new:
                raise
        facts = os.fstat(descriptor)
        # Leave out set-group-id, because it gives nobody access.
        found = f"user {facts.st_uid} with mode {facts.st_mode & 0o777:o}"
        expected = f"user {os.geteuid()} with mode 700"
        if found != expected:
            raise PermissionError(f"it is of {found}, expected {expected}")
        # Another process may have replaced the folder between the open and the lock.
        if not os.path.samestat(facts, path.lstat()):
            raise FileNotFoundError(f"{path} was replaced")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
