"""The folders of kept samples, which all processes of a user on a host share. Imports nothing heavy.

    BASE/hetero-cache-UID/data-NAME/          samples of one registered data set, with one limit of bytes
    BASE/hetero-cache-UID/data-NAME/KEY/      samples of one fingerprint, and a lock of each process that uses them

A folder in memory is of no use after the processes that share it have ended. The last process removes the folder
(`sweep_memory`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from pathlib import Path

from hetero.errors import ConfigError
from hetero.system.waits import CALL_TIMEOUT_S, SHORT_POLL_S

__all__ = [
    "INDEX",
    "MEMORY",
    "RESERVE",
    "SharedFolder",
    "folder_bytes",
    "kept_in_memory",
    "lock",
    "remove_unused",
    "sweep_memory",
]

MEMORY = Path("/dev/shm")
"""File system in memory."""
RESERVE = "reserve"
"""Name of a file. A process locks it to reserve bytes for a data set."""
INDEX = "index"
"""Name of the file that contains where each sample is. Only some places in the file are written, so it has gaps."""
_LOCK = "lock"


class SharedFolder:
    """A folder of samples with one fingerprint. This process uses the folder, and holds a shared lock, until `close`.

    Args:
        base: Folder below which all kept samples lie.
        name: Registered name of the data set.
        key: Hexadecimal digest, see `hetero.cache.fingerprint`.

    Raises:
        ConfigError: If another user can write to a folder on the way.
        OSError: If a folder cannot be made or locked.
    """

    def __init__(self, base: Path, name: str, key: str) -> None:
        self.parent = base / _root_name() / f"data-{name}"
        self.path = self.parent / key
        # Do not make the folder ``base``, because it may be the mount point of a disk that is not mounted.
        if not base.is_dir():
            raise OSError(f"there is no folder {base}; make it, or mount its disk")
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        while time.monotonic() < deadline_s:
            # Until this process has the lock, another process may remove the folders. If so, make the folders again.
            with contextlib.suppress(FileNotFoundError):
                for folder in (self.parent.parent, self.parent, self.path):
                    _make_private(folder)
                descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
                try:
                    lock(descriptor, fcntl.LOCK_SH)
                    # If another process has removed the file between the open and the lock, the lock has no effect.
                    if _is_at(descriptor, self.path / _LOCK):
                        # Set the time of the lock file, which shows when the folder was last used.
                        os.utime(descriptor)
                        self._descriptor = descriptor
                        return
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)
        raise OSError(f"could not keep the folder {self.path}: other processes remove it")

    def close(self) -> None:
        """End the use of the folder."""
        # A forked process may still have the descriptor, so closing it here would not release the lock.
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)


def lock(descriptor: int, kind: int) -> None:
    """Lock a file. Wait up to `CALL_TIMEOUT_S` while other processes hold the lock.

    Args:
        descriptor: The file.
        kind: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.

    Raises:
        OSError: If another process has the lock for too long, or the file system lacks locks.
    """
    # flock has no timeout, so try again until the deadline.
    deadline_s = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise OSError(f"another process has had the lock for {CALL_TIMEOUT_S:g} s") from None
            time.sleep(SHORT_POLL_S)


def sweep_memory() -> None:
    """Remove the kept samples in memory that no process uses, and the empty folders above them."""
    root = MEMORY / _root_name()
    # `rmdir` fails if a folder is not empty, or another process has removed the folder. Both are fine.
    with contextlib.suppress(OSError):
        for parent in sorted(root.iterdir()):
            for folder in _folders(parent):
                _remove_unused(folder)
            # Processes that keep samples below this folder lock the file `RESERVE` while they reserve bytes there. So
            # remove the file only after the last of the folders.
            if not _folders(parent):
                with contextlib.suppress(OSError):
                    (parent / RESERVE).unlink(missing_ok=True)
                    parent.rmdir()
        root.rmdir()


def kept_in_memory() -> int:
    """Return the bytes of all kept samples of this user in memory."""
    found = (MEMORY / _root_name()).glob("*/*")
    return sum(folder_bytes(path) for path in found if path.is_dir())


def remove_unused(parent: Path, *, enough: int) -> int:
    """Remove folders of a data set that no process uses. Begin with the folder whose last use began earliest.

    Args:
        parent: The data set's folder.
        enough: Number of bytes. Once the removed folders had this many bytes, no other folder is removed.

    Returns:
        Bytes of the removed folders.
    """
    freed = 0
    for folder in sorted(_folders(parent), key=_used_s):
        if freed >= enough:
            break
        freed += _remove_unused(folder)
    return freed


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in a folder."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                # The file `INDEX` has gaps, which take no space. So count the blocks that it uses, of 512 bytes each.
                total += facts.st_blocks * 512 if entry.name == INDEX else facts.st_size
    return total


def _folders(parent: Path) -> list[Path]:
    """Return the folders with the samples of one fingerprint each, for one data set."""
    return [folder for folder in parent.iterdir() if (folder / _LOCK).exists()]


def _remove_unused(folder: Path) -> int:
    """Remove a folder if no process holds its lock. Return the bytes of its files, 0 if the folder stays."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return 0
    try:
        # Each process that uses the folder holds a shared lock. While there is such a process, this fails.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        freed = folder_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return 0
    finally:
        os.close(descriptor)
    return freed


def _used_s(folder: Path) -> float:
    """Return when a process last began to use a folder, which is the time of the folder's lock file.

    0 if another process has removed the folder.
    """
    try:
        return (folder / _LOCK).lstat().st_mtime
    except OSError:
        return 0.0


def _root_name() -> str:
    return f"hetero-cache-{os.geteuid()}"


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can use. Reject an existing folder that others own or can use."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    # All users can write to /dev/shm, so another user may have made a folder of this name before.
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder of user {os.geteuid()} with mode 700, found user {facts.st_uid} with mode "
            f"{facts.st_mode & 0o777:o}\n  Others could otherwise change the samples that are kept in it. Remove it."
        )


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is still at a path, and was not removed or replaced."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
