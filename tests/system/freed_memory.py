"""Whether threads use freed memory again. malloc's settings stay for good, so a new process finds out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

__all__ = ["FRESH_MEMORY_FAULTS", "needs_glibc", "page_faults_of_threads"]

FRESH_MEMORY_FAULTS = 2500
"""More page faults than of threads that use freed memory again. With new memory for each array they take 128,000."""

needs_glibc = pytest.mark.skipif(
    "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="only glibc has mallopt"
)

_PROGRAM = """
import resource
import threading
import numpy as np

def allocate():
    [np.ones(2**20, np.uint8) for _ in range(100)]  # more than one of the 64 MiB pieces of a thread's own memory

def page_faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        thread = threading.Thread(target=allocate)
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

page_faults()
print(page_faults())
"""


def page_faults_of_threads(before: str, *arguments: str) -> int:
    """Return the page faults of threads that allocate 500 MB, after as much was allocated and freed.

    Args:
        before: A program that runs first in the same process, and starts threads that do not keep the process alive.
        arguments: What it gets as ``sys.argv[1:]``.
    """
    return int(subprocess.check_output([sys.executable, "-c", before + _PROGRAM, *arguments], text=True))
