"""The callbacks that a script registers for a stop of the job, and their failures."""

from __future__ import annotations

import errno
import logging
import os
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CallbackFailure", "run_callbacks"]

logger = logging.getLogger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_BYTES = 2**20
"""A disk with less free space counts as full."""
_LOCAL = frozenset(
    {"bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "tmpfs", "vfat", "xfs", "zfs"}
)
"""Kinds of file systems whose free space can be queried. A query of others (Lustre, NFS, Ceph, anything on FUSE) may
block forever if their servers are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackFailure:
    """Why a callback failed."""

    summary: str
    """The reason in one line."""
    detail: str
    """Traceback."""


def run_callbacks(callbacks: Iterable[Callable[[], object]]) -> list[CallbackFailure]:
    """Run all callbacks, even if some of them raise. Log and return the failures."""
    failures = []
    for callback in callbacks:
        try:
            callback()
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code in (None, 0):
                continue
            logger.exception("a stop callback failed")
            failures.append(_described(error))
    return failures


def _described(error: BaseException) -> CallbackFailure:
    line = traceback.format_exception_only(type(error), error)[-1].strip()
    return CallbackFailure(
        summary=f"a stop callback raised {line}{_describe_disks(error)}",
        detail="".join(traceback.format_exception(error)),
    )


def _describe_disks(error: BaseException) -> str:
    """Return the free space of the disks if the error reports a full disk, otherwise an empty text."""
    if not (isinstance(error, OSError) and error.errno in _FULL):
        return ""
    # The error is from open(), because one from write() names no file.
    if isinstance(error.filename, str | bytes):
        paths = [str(Path(os.fsdecode(error.filename)).absolute().parent)]
    else:
        paths = [path for path in _disks() if (_free_bytes(path) or 0) < _FULL_BYTES]
    words = [f"{path}: {free} bytes free" for path in paths for free in (_free_bytes(path),) if free is not None]
    return f" ({'; '.join(words)})" if words else ""


def _disks(mounts: str = "/proc/self/mounts") -> list[str]:
    """Return the mount points of this machine's disks that this process can write to."""
    found = []
    try:
        lines = Path(mounts).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        _, path, kind, options, *_ = line.split(" ")
        # The kernel writes a blank in a path as \040.
        path = path.replace("\\040", " ")
        size = _num_bytes(path) if kind in _LOCAL and "rw" in options.split(",") else 0
        if size and os.access(path, os.W_OK):
            found.append(path)
    return found


def _num_bytes(path: str) -> int:
    try:
        facts = os.statvfs(path)
    except OSError:
        return 0
    return facts.f_blocks * facts.f_frsize


def _free_bytes(path: str) -> int | None:
    try:
        facts = os.statvfs(path)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize
