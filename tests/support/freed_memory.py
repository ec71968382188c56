"""Whether threads use freed memory again. malloc's settings stay for good, so a new process finds out."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

__all__ = ["LIVE_THREADS", "MAX_FAULTS_IF_REUSED", "needs_glibc", "page_faults_of_threads"]

MAX_FAULTS_IF_REUSED = 2500
"""Page faults of threads that use freed memory again. With new memory for each array they take 9,000 to 128,000."""

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt")

LIVE_THREADS = """
import threading

def stay(allocated):
    held = bytearray(2000)
    allocated.set()
    threading.Event().wait()

for _ in range(6):
    allocated = threading.Event()
    threading.Thread(target=stay, args=(allocated,), daemon=True).start()
    allocated.wait()
"""
"""A program that starts threads, which allocate and stay."""

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

for _ in range(5):  # as many threads as arenas, and more
    page_faults()
print(page_faults())
"""


def page_faults_of_threads(before: str, *arguments: str, environment: dict[str, str] | None = None) -> int:
    """Return the page faults of threads that allocate 500 MB, after 2.5 GB were allocated and freed.

    Args:
        before: A program that runs first in the same process, and starts threads that do not keep the process alive.
        arguments: What it gets as ``sys.argv[1:]``.
        environment: Variables to set.
    """
    command = [sys.executable, "-c", before + _PROGRAM, *arguments]
    environment = {**os.environ, "HETERO_MALLOC": "", **(environment or {})}
    return int(subprocess.check_output(command, text=True, timeout=120.0, env=environment))
