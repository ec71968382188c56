"""The files, connections and pipes that a process has open, and which of them forked processes must not share."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import stat
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero.documents.text import listing
from hetero.system.waits import END_TIMEOUT_S, POLL_S

__all__ = [
    "close_filesystems",
    "has_path",
    "mapped_files",
    "names_for_message",
    "open_files",
    "opened_since",
    "reopen_files",
]

_REMOVED = " (deleted)"
"""What the kernel adds to the name of a file that was removed. The file is still the same."""
_WORDS = {"socket": "a connection", "pipe": "a pipe"}
"""Words for descriptors without a path, by the first part of the name."""
_KEPT_FLAGS = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | getattr(os, "O_DIRECT", 0)
"""Flags of a descriptor that is opened again."""

_RELEASE_S = 1.0
"""Seconds that the end of fsspec's tasks may take. With none, one of six hosts with 32 endpoints built its data set 32
times (tests/shards/test_object_store.py)."""

logger = logging.getLogger(__name__)


def open_files() -> dict[int, str]:
    """Return the names of the files, connections and pipes that this process has open, by descriptor.

    The name of a file is its path. A connection or a pipe has a unique name such as ``socket:[1234]``.

    The result leaves out what forked processes can share without harm. These are files and ends of pipes that are only
    written, terminals, and devices such as ``/dev/null``. A file that is mapped into memory, and can only be read, is
    left out too. It is read through its map, without a position.
    """
    # For each mapped file, by name: whether this process can write to the file through a map. If a file has several
    # maps, the dictionary keeps the last one. True is sorted after False, so one writable map is enough.
    is_writable_through_map = dict(sorted(mapped_files()))
    found = {}
    for descriptor in _descriptors():
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            may_read = access != os.O_WRONLY
            name = _name(descriptor)
            # The value False means that the file is mapped, and that no map is writable.
            is_only_read_through_map = access == os.O_RDONLY and is_writable_through_map.get(name) is False
            if stat.S_ISSOCK(mode):
                found[descriptor] = name
            elif stat.S_ISFIFO(mode) and may_read:
                found[descriptor] = f"pipe:{name}" if has_path(name) else name
            elif stat.S_ISREG(mode) and may_read and not is_only_read_through_map:
                found[descriptor] = name
    return found


def has_path(name: str) -> bool:
    """Return whether a name that `open_files` returned is the name of a file."""
    return name.startswith("/")


def names_for_message(names: Iterable[str]) -> set[str]:
    """Return names that `open_files` returned as a user would say them: paths, ``a connection`` and ``a pipe``."""
    return {name if has_path(name) else _WORDS[name.split(":")[0]] for name in names}


def opened_since(before: Mapping[int, str]) -> dict[int, str]:
    """Return the files, connections and pipes that this process has opened and not closed, as `open_files` does.

    Args:
        before: What `open_files` returned earlier.
    """
    # If a descriptor was closed and now belongs to another file, it counts as new.
    return {descriptor: name for descriptor, name in open_files().items() if before.get(descriptor) != name}


def mapped_files() -> Iterator[tuple[str, bool]]:
    """Yield the name of each file that this process has mapped into memory.

    The second value says whether this process can write to the file, and other processes see what it writes. Shared
    memory without a file has the name ``anonymous``.
    """
    with contextlib.suppress(OSError):
        # Split at newlines only, because the kernel escapes no other separator in a name.
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]:
            _, rights, _, _, inode, *name = line.split(maxsplit=5)
            # The rights are for example ``rw-s``, where s means shared. Memory without a file has inode 0.
            is_shared = rights.startswith("rw") and rights.endswith("s")
            if is_shared or inode != "0":
                yield name[0].removesuffix(_REMOVED) if name else "anonymous", is_shared


def reopen_files(own: Mapping[int, str] | None = None) -> None:
    """Give this process, which was just forked, separate positions in the files that it reads.

    A forked process shares the position in each open file with its parent. So one process would read at a position that
    another process has set. This function opens each regular file again that is open only for reading, with the same
    descriptor, mode and position. Files that are also written to keep the shared position, because processes may write
    to one log. The standard streams keep it too. A file that cannot be opened again stays shared, and a warning names
    it. A lock that ``flock`` has set stays with the parent.

    Args:
        own: What `opened_since` returned. These files are opened again even if they may be written to.
    """
    failed: dict[str, OSError] = {}
    for descriptor in _descriptors():
        try:
            name = _name(descriptor)
        except OSError:  # the descriptor is closed
            continue
        try:
            _reopen(descriptor, is_own=own is not None and own.get(descriptor) == name)
        except OSError as error:
            failed[name] = error
    if failed:
        logger.warning(
            "process %d cannot open %s again (%s): it shares the position in each file with the process that forked "
            "it, so what they read may be wrong",
            os.getpid(),
            listing(sorted(failed)),
            next(iter(failed.values())).strerror,
        )


def _descriptors() -> list[int]:
    """Return all open descriptors. Empty if the system does not list them.

    The list includes the descriptor of the listing itself, which is closed already.
    """
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - the names alone
    except OSError:
        return []


def _name(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink()).removesuffix(_REMOVED)


def _reopen(descriptor: int, *, is_own: bool) -> None:
    """Open the file of a descriptor again, if it is a regular file that this process may reopen. See `reopen_files`."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    access = flags & os.O_ACCMODE
    may_reopen = access == os.O_RDONLY or (is_own and access == os.O_RDWR)
    # Descriptors 0 to 2 are the standard streams.
    if descriptor <= 2 or not may_reopen or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    position = os.lseek(descriptor, 0, os.SEEK_CUR)
    # Do not use the path of the file, because the file may have been removed or replaced.
    again = os.open(f"/proc/self/fd/{descriptor}", flags & _KEPT_FLAGS)
    try:
        os.lseek(again, position, os.SEEK_SET)
        os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(again)


def close_filesystems() -> None:
    """Close the connections of fsspec, and end its thread. The next call opens others.

    A process with either must not be forked. Each of 32 endpoints then listed the files itself.
    """
    asyn = sys.modules.get("fsspec.asyn")
    if asyn is None:
        return
    kinds = set(_kinds())
    systems = [weakref.ref(system) for kind in kinds for system in kind._cache.values()]
    for kind in kinds:
        kind.clear_instance_cache()
    deadline_s = time.monotonic() + _RELEASE_S
    while True:
        gc.collect()  # closes the connections of file systems that nothing refers to
        if all(system() is None for system in systems):
            break
        # A task that ends in fsspec's thread may hold one for a moment.
        if time.monotonic() > deadline_s:
            return  # the data set itself holds one, which must not be forked
        time.sleep(POLL_S)
    loop, thread = asyn.loop[0], asyn.iothread[0]
    if thread is not None:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_TIMEOUT_S)
        if thread.is_alive():
            return  # its loop still runs, and cannot be closed
        # Joins the threads that look up names. `close` does not wait for them.
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        asyn.loop[0] = asyn.iothread[0] = None


def _kinds() -> Iterator[Any]:
    """Yield the classes of the file systems that were used."""
    waiting = [sys.modules["fsspec"].AbstractFileSystem]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()
