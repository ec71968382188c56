"""Private folders that do not outlive their process for long, even if that is killed."""

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

__all__ = ["private_folder", "stale_folders"]

logger = logging.getLogger(__name__)

_ATTEMPTS = 10
_NAMED_AFTER_S = 60.0
"""A new folder is locked and gets its name within microseconds; one without a name that is this old was left."""


@contextlib.contextmanager
def private_folder(prefix: str, *, parent: str | None = None) -> Iterator[Path]:
    """Make a folder for the time of a ``with`` block.

    Its owner holds a lock on it, which goes with the process: what an owner that was killed has left is
    told by that, and removed by the next one that comes along. Where the file system has no locks it stays.

    Args:
        prefix: Of its name; folders with the same one are each other's successors.
        parent: Where to make it; by default the folder for temporary files.

    Raises:
        ConfigError: If the file system does not keep it to this user.
        OSError: If it cannot be made.
    """
    base = Path(parent if parent is not None else tempfile.gettempdir())
    path, descriptor = _make(base, prefix)
    _remove_stale(base, prefix, own=path)
    owner = os.getpid()
    try:
        yield path
    finally:
        if os.getpid() == owner:  # a forked child that ends closes this generator, too
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def stale_folders(prefix: str, *, parent: str | None = None) -> list[Path]:
    """Return what owners that were killed have left, as far as it is this user's; the next owner removes it.

    Args:
        prefix: Of their names.
        parent: Where they are; by default in the folder for temporary files.
    """
    found = []
    for path in Path(parent if parent is not None else tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            os.close(_lock(path))
            found.append(path)
    return sorted(found)


def _make(base: Path, prefix: str) -> tuple[Path, int]:
    for _ in range(_ATTEMPTS):
        path = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=base))
        final = base / path.name[1:]
        try:
            descriptor = _lock(path, is_new=True)
            try:
                path.rename(final)  # nobody sees it by that name before it is locked
            except BaseException:
                os.close(descriptor)
                raise
            return final, descriptor
        except (FileNotFoundError, BlockingIOError):
            continue  # something else removed it
        except OSError as error:
            with contextlib.suppress(OSError):
                path.rmdir()
            if not isinstance(error, PermissionError):
                raise
            hint = "choose one on another file system; TMPDIR says where temporary ones are made"
            raise ConfigError(f"a new folder in {base} is not private: {error}\n  {hint}") from error
    raise OSError(f"could not keep a folder {prefix}* in {base}: another process removes them")


def _remove_stale(base: Path, prefix: str, *, own: Path) -> None:
    """Remove what owners that were killed have left.

    Args:
        base: Where the folders are.
        prefix: Of their names.
        own: The folder that was made just now: it is kept, and tells the time by the clock of the file system.
    """
    now_s = own.lstat().st_mtime
    # A folder without its name may belong to a process that is about to lock it: launchers of a job start together.
    unnamed = [path for path in base.glob(f".{prefix}*") if now_s - _changed_s(path, now_s) > _NAMED_AFTER_S]
    for path in (*base.glob(f"{prefix}*"), *unnamed):
        if path == own:
            continue
        try:
            descriptor = _lock(path)
        except OSError:
            continue  # in use, somebody else's, or gone by now
        try:
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, which a run that was killed had left", path)
        finally:
            os.close(descriptor)


def _changed_s(path: Path, now_s: float) -> float:
    """Return when a folder was last changed; now if it is gone."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return now_s


def _lock(path: Path, *, is_new: bool = False) -> int:
    """Return a descriptor that holds the lock of a folder of this user's.

    Args:
        path: The folder.
        is_new: Whether to do without the lock where the file system has none: NFS, Lustre, CIFS may be mounted so.

    Raises:
        BlockingIOError: If it is locked.
        FileNotFoundError: If no such folder is there.
        PermissionError: If others have access to it.
        OSError: If it cannot be opened or locked.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _flock(descriptor, is_needed=not is_new)
        facts = os.fstat(descriptor)
        found = f"user {facts.st_uid} with mode {facts.st_mode & 0o777:o}"  # a set group-id bit lets nobody in
        expected = f"user {os.geteuid()} with mode 700"
        if found != expected:
            raise PermissionError(f"it is of {found}, expected {expected}")
        if not os.path.samestat(facts, path.lstat()):
            raise FileNotFoundError(f"{path} was replaced")
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _flock(descriptor: int, *, is_needed: bool) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        if is_needed:
            raise
