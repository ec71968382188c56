"""The memory of processes: how much they use, and how malloc keeps what they free.

Batches allocate and free the same megabytes again and again. Therefore endpoints, ranks, servers of tf.data.service,
and all other processes that send or receive batches call `keep_freed_memory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MALLOC_VARIABLE",
    "ProcessMemory",
    "be_killed_first",
    "keep_freed_memory",
    "no_garbage_collection",
    "prepare_to_fork",
    "process_memory",
]

MALLOC_VARIABLE = "HETERO_MALLOC"
"""Environment variable. ``default`` leaves malloc unchanged."""

_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_HEAP_BYTES = 2**26  # the pieces that the arenas of threads are made of
_THRESHOLD_BYTES = 2**30
# glibc before 2.35 accepts no higher mmap threshold.
_OLD_THRESHOLD_BYTES = _HEAP_BYTES // 2
_SETTINGS = (
    (_M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", "mmap_threshold", (_THRESHOLD_BYTES, _OLD_THRESHOLD_BYTES)),
    (_M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", "trim_threshold", (_THRESHOLD_BYTES,)),
    # Without this setting, arenas of earlier threads return their empty pieces: 38,000 page faults in 500 MB with six
    # threads, not 5.
    (_M_TOP_PAD, "MALLOC_TOP_PAD_", "top_pad", (_HEAP_BYTES,)),
    (_M_ARENA_MAX, "MALLOC_ARENA_MAX", "arena_max", (1,)),
)
"""Each setting, its environment variable, its name in ``GLIBC_TUNABLES``, and values to try."""

_GAP_SIZES = (*(2**exponent for exponent in range(20, 12, -1)), *range(4096, 0, -16))
"""Sizes of the blocks that fill gaps, in bytes: the largest first, since a small block may come from a large gap."""
_MAX_GAPS = 200_000
"""Largest number of blocks that fill gaps. They take 0.4 s."""
_HEAP = re.compile(rb"^([0-9a-f]+)-\S+ \S+ \S+ \S+ 0 +\[heap\]$", re.MULTILINE)
"""The line of the heap in ``/proc/self/maps``, with its first address."""

_OOM_SCORE = 500
"""Added to the score of endpoints in thousandths of the memory, as in proc(5). The kernel then kills an endpoint before
a process that uses half of the memory more. Without it, an endpoint that leaked in a control group of 900 MB took fork
server and launcher along within 0.6 s."""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection during imports, which saves a tenth of their time.

    Nearly all objects that an import makes stay in use, so collections would free almost nothing.
    """
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        if gc.get_threshold()[0] == 0:  # an import may have set its own threshold
            gc.set_threshold(*before)


def prepare_to_fork() -> None:
    """Arrange the memory of this process for sharing with processes that are forked from now on.

    A page is shared until one of the processes writes to it. Therefore the garbage collector ignores all present
    objects, because it writes to each object that it visits. Malloc no longer uses the gaps between present blocks,
    because writing into a gap copies a page full of other objects. ``HETERO_MALLOC=default`` leaves malloc unchanged.
    """
    # Collect garbage before `freeze`, because frozen garbage is never collected.
    gc.collect()
    if os.environ.get(MALLOC_VARIABLE) != "default":
        _fill_gaps()
    gc.freeze()


def _fill_gaps() -> None:
    """Allocate the gaps of malloc's heap and keep them, so later blocks get new pages. Needs glibc.

    Blocks outside the heap, for example of another malloc that was loaded instead, are not kept.
    """
    heap_begin = _heap_begin()
    if not heap_begin:
        return
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        malloc, free, sbrk = library.malloc, library.free, library.sbrk
    except (OSError, AttributeError):
        return
    malloc.argtypes, malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
    free.argtypes, free.restype = (ctypes.c_void_p,), None
    sbrk.argtypes, sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_void_p
    # After `malloc_trim`, less than a page is free at the end of the heap. A block in the last page comes from this
    # end, and not from a gap.
    last_page = sbrk(0) - os.sysconf("SC_PAGESIZE")
    num_left = _MAX_GAPS
    for size in _GAP_SIZES:
        # Malloc takes a gap of this size while there is one. The first block that is not in a gap shows that none is
        # left. Only this block is freed, and the others stay in their gaps for good.
        while heap_begin <= (block := malloc(size) or 0) < last_page and num_left:
            num_left -= 1
        free(block)


def _heap_begin() -> int:
    """Return the first address of the heap, 0 if the system does not say."""
    try:
        found = _HEAP.search(Path("/proc/self/maps").read_bytes())
    except OSError:
        return 0
    return int(found[1], 16) if found else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """Memory of one process."""

    private_bytes: int
    """Memory that no other process shares."""
    shared_bytes: int


def be_killed_first() -> None:
    """Let the kernel kill this process before its parent if memory runs out. Do nothing if ``/proc`` is read-only."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        score.write_text(str(min(1000, int(score.read_text(encoding="ascii")) + _OOM_SCORE)), encoding="ascii")


def process_memory(process: Path = Path("/proc/self")) -> ProcessMemory | None:
    """Return the memory of a process, or None if it has ended or the system does not say.

    The kernel visits all pages of the process, which takes milliseconds per gigabyte.

    Args:
        process: The process's folder under ``/proc``.
    """
    try:
        # The first line has the addresses, and each other line a kind of memory with its size.
        lines = (process / "smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
        sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    except (OSError, ValueError, IndexError):
        return None
    if "Rss" not in sizes:  # a process that has ended and was not reaped lacks pages
        return None
    private = sum(sizes.get(f"Private_{kind}", 0) for kind in ("Clean", "Dirty", "Hugetlb"))
    return ProcessMemory(private_bytes=private, shared_bytes=max(0, sizes["Rss"] - private))


@functools.cache
def _warn_of(choice: str) -> None:
    """Log once that ``HETERO_MALLOC`` has a value without a meaning."""
    logger.warning("%s=%.40r has no meaning, expected 'default' or no value", MALLOC_VARIABLE, choice)


def keep_freed_memory() -> bool:
    """Let malloc keep up to 1 GiB of freed memory for the next allocations of any thread. Idempotent.

    glibc returns large blocks to the kernel when they are freed. The kernel then clears every page of the next block.
    This costs 190 page faults per megabyte received and half of the CPU time of a transfer. Two thresholds of malloc
    decide which blocks are returned. Higher thresholds help only in the main arena.

    By default each thread has its own arena, which is made of pieces of 64 MiB. No other thread can use the free memory
    of an arena, and an empty piece is returned to the kernel. Therefore this function allows only one arena, the main
    arena. Arenas that exist already stay, and all threads share them. This function also sets malloc's padding
    (``top_pad``) to the size of one piece. Then each arena keeps its empty pieces and all freed blocks of less than
    64 MiB.

    Call this at the start of a process, before its threads, because one arena needs the least memory. Native code that
    allocates in several threads at the same time is slower with one arena: four threads of a C program that only
    allocate blocks of 1 to 9 KB needed four to seven times as long.

    Settings of malloc in the environment stay unchanged. The function does nothing if the environment has
    ``HETERO_MALLOC=default``, or without glibc.

    Returns:
        Whether malloc keeps memory now.
    """
    choice = os.environ.get(MALLOC_VARIABLE, "")
    if choice == "default":
        return False
    if choice:
        _warn_of(choice)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("malloc stays as it is: this C library has no mallopt")
        return False
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    for setting, variable, tunable, values in _SETTINGS:
        if variable in os.environ or f"glibc.malloc.{tunable}=" in tunables:
            continue  # the user's choice
        # Old versions of glibc refuse large values, so a setting may have a smaller second value. Use the first value
        # that is accepted.
        if not any(mallopt(setting, value) == 1 for value in values):
            logger.debug("malloc stays as it is: mallopt refuses %s=%d", variable, values[-1])
            return False
    return True
