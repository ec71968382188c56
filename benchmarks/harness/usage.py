"""CPU time and memory of this process and of those below it."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process. Empty if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def supply_usage() -> tuple[float, int]:
    """Return CPU seconds and resident bytes of this process's descendants."""
    family = descendants(os.getpid())
    return cpu_s(family), sum(map(resident_bytes_of, family))


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of processes. Processes that have ended count 0."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            # Ended grandchildren count through their parents.
            total += times.user + times.system + times.children_user + times.children_system
    return total


def own_cpu_s() -> float:
    """Return the CPU seconds of this process, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def resident_bytes() -> int:
    """Return what of this process is in memory now."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most that was in memory since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Forget the most that was in memory."""
    with contextlib.suppress(OSError):  # without it the peak is that since the process began
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def resident_bytes_of(process: psutil.Process) -> int:
    """Return the memory of a process. 0 if it has ended."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0
