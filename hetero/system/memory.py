"""How this process's malloc treats memory that is freed: batches come and go in the same megabytes."""

from __future__ import annotations

import ctypes
import logging
import os

__all__ = ["MALLOC_VARIABLE", "keep_freed_memory"]

MALLOC_VARIABLE = "HETERO_MALLOC"
"""Environment: ``default`` leaves malloc as the C library has it."""

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_THRESHOLD_BYTES = 2**30
_OLD_THRESHOLD_BYTES = 2**25  # half a heap: the highest that glibc before 2.35 accepts for the mmap threshold

logger = logging.getLogger(__name__)


def keep_freed_memory() -> bool:
    """Have malloc keep up to 1 GiB of freed memory for what is allocated next, by whichever thread; idempotent.

    glibc gives large blocks back to the kernel when they are freed. The kernel clears every page
    of the next one: 190 page faults per megabyte received, half of the CPU time of a transfer. Raised
    thresholds alone do not help threads: each has an arena made of pieces of 64 MiB, which are given back
    whenever they are empty, and whose free memory no other thread can use. So there is one arena for all.

    Call it at the start of a process: threads that have allocated before keep their arenas.
    Does nothing if the environment says ``HETERO_MALLOC=default``, or without glibc.

    Returns:
        Whether malloc keeps memory now.
    """
    if os.environ.get(MALLOC_VARIABLE) == "default":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.debug("malloc stays as it is: this C library has no mallopt")
        return False
    for mmap_bytes in (_THRESHOLD_BYTES, _OLD_THRESHOLD_BYTES):
        if mallopt(_M_MMAP_THRESHOLD, mmap_bytes) == 1:
            return bool(mallopt(_M_TRIM_THRESHOLD, _THRESHOLD_BYTES) == 1 and mallopt(_M_ARENA_MAX, 1) == 1)
    logger.debug("malloc stays as it is: mallopt refuses a threshold of %d bytes", _OLD_THRESHOLD_BYTES)
    return False
