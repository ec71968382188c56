"""The files, connections and pipes that a process has open, and what forked processes must not share of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

__all__ = ["UNNAMED", "mapped_files", "open_files", "opened_since", "reopen_files"]

_CONNECTION, _PIPE = UNNAMED = ("a connection", "a pipe")
"""What is open and has no name."""
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_DIRECT", 0)
"""Flags of a descriptor that is opened again."""


def open_files() -> dict[int, str]:
    """Return the names of the files, connections and pipes that this process has open, by descriptor.

    The result leaves out what forked processes can share without harm: files that are mapped into memory to be read,
    because this needs no position, files and ends of pipes that are only written, terminals, and devices such as
    ``/dev/null``.
    """
    mapped = dict(sorted(mapped_files()))  # of several maps of a file, one that is shared comes last
    found = {}
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if stat.S_ISSOCK(mode):
                found[descriptor] = _CONNECTION
            elif stat.S_ISFIFO(mode) and reads:
                found[descriptor] = _PIPE
            elif stat.S_ISREG(mode) and reads:
                name = str(Path(f"/proc/self/fd/{descriptor}").readlink())
                if mapped.get(name, True):
                    found[descriptor] = name
    return found


def opened_since(before: Mapping[int, str], *, ignored: Container[int] = ()) -> set[str]:
    """Return the names of the files, connections and pipes that this process has opened and not closed.

    Args:
        before: What `open_files` returned earlier.
        ignored: Descriptors that do not count.
    """
    found = open_files().items()
    return {name for descriptor, name in found if before.get(descriptor) != name and descriptor not in ignored}


def mapped_files() -> Iterator[tuple[str, bool]]:
    """Yield the name of each file that this process has mapped into memory.

    The second value says whether this process can write to it, and others see what it writes. Shared memory without a
    file has the name ``anonymous``.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]:
            _, rights, _, _, inode, *name = line.split(maxsplit=5)  # the kernel escapes a newline in a name, no other
            is_shared = rights.startswith("rw") and rights.endswith("s")
            if is_shared or inode != "0":
                yield name[0] if name else "anonymous", is_shared


def reopen_files() -> None:
    """Give this process, which was just forked, positions of its own in the files that it reads.

    A forked process shares the position in each open file with its parent. So one would read where another has sought
    to. This function opens each regular file again, with the same descriptor, mode and position. It leaves alone files
    with a name that are written to, because processes that write to one log must share its position, and the standard
    streams. A file that cannot be opened again stays shared.
    """
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            _reopen(descriptor)


def _descriptors() -> list[int]:
    """Return all descriptors, and that of this very listing, which is closed now. Empty if the system does not say."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - the names alone
    except FileNotFoundError:
        return []


def _reopen(descriptor: int) -> None:
    status, flags = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GETFL)
    is_temporary = flags & os.O_ACCMODE == os.O_RDWR and not status.st_nlink
    if descriptor <= 2 or not stat.S_ISREG(status.st_mode) or not (flags & os.O_ACCMODE == os.O_RDONLY or is_temporary):
        return
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    again = os.open(f"/proc/self/fd/{descriptor}", flags & _KEPT_FLAGS)
    try:
        os.lseek(again, position, os.SEEK_SET)
        os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(again)
