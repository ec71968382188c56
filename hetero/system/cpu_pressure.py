"""CPU pressure of a host: how short its CPUs are, in [0, 1]."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuReading", "TaskWaits", "pressure_between", "read_cpus", "stolen_between"]

_BUSY = 0.9
"""CPU use above which CPUs count as short, if the kernel does not measure the pressure."""
_WAITED = re.compile(r"^some .*\btotal=(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuReading:
    """The kernel's counters of all CPUs of the machine, in ticks unless stated otherwise."""

    at_s: float
    """Monotonic seconds."""
    busy: float
    """Time that all processes used, and interrupts, but not the time that other machines took."""
    idle: float
    stolen: float
    """Time when a process wanted a CPU and the hypervisor gave that CPU to other machines."""
    waited_s: float | None
    """Seconds when a process waited for a CPU (PSI, since Linux 4.20). None if the kernel does not measure them."""


def read_cpus(proc: Path = Path("/proc"), *, clock: Callable[[], float] = time.monotonic) -> CpuReading | None:
    """Return the counters, or None if the kernel lacks them.

    Args:
        proc: Folder of the kernel's files.
        clock: Returns monotonic seconds.
    """
    try:
        line = (proc / "stat").read_text(encoding="ascii").partition("\n")[0]
        user, nice, system, idle, iowait, irq, softirq, stolen = map(float, line.split()[1:9])
    except (OSError, ValueError):
        return None
    return CpuReading(
        at_s=clock(),
        busy=user + nice + system + irq + softirq,
        idle=idle + iowait,
        stolen=stolen,
        waited_s=_waited_s(proc),
    )


def pressure_between(first: CpuReading, last: CpuReading) -> float:
    """Return the pressure between two readings.

    If the kernel measures the pressure, the result is the share of time when a process waited for a CPU. Otherwise the
    result is 0 up to a CPU use of 90 %, and grows to 1 at 100 %.
    """
    if first.waited_s is not None and last.waited_s is not None:
        # 1e-9 avoids a division by 0 if both readings were taken at the same time.
        share = (last.waited_s - first.waited_s) / max(last.at_s - first.at_s, 1e-9)
    else:
        busy, idle = last.busy - first.busy, last.idle - first.idle
        # 0 at a use of `_BUSY`, and 1 if all CPUs were always busy.
        share = (busy / max(busy + idle, 1e-9) - _BUSY) / (1 - _BUSY)
    return min(1.0, max(0.0, share))


def stolen_between(first: CpuReading, last: CpuReading) -> float:
    """Return the share of the wanted CPU time that the hypervisor gave to other machines, in [0, 1]."""
    busy, stolen = last.busy - first.busy, last.stolen - first.stolen
    return min(1.0, max(0.0, stolen / max(busy + stolen, 1e-9)))


class TaskWaits:
    """Sums the seconds that the threads of some processes waited for a CPU. Use one object in one thread.

    Args:
        proc: Folder of the kernel's files.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._waited_ns_of_thread: dict[str, int] = {}
        """The latest reading of each thread, by its id."""
        self._total_ns = 0

    def add(self, pid: int) -> None:
        """Read the threads of a process. Add the time that they have waited since the last reading to the total."""
        for path in (self._proc / str(pid) / "task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
                # The second number is the thread's total wait in nanoseconds.
                waited_ns = int(path.read_text(encoding="ascii").split()[1])
                thread_id = path.parent.name
                # If a new thread has the id of an ended thread, its wait begins at 0 again, so the difference may be
                # negative.
                self._total_ns += max(0, waited_ns - self._waited_ns_of_thread.get(thread_id, 0))
                self._waited_ns_of_thread[thread_id] = waited_ns

    @property
    def total_s(self) -> float | None:
        """The total, or None if the kernel counts no waits."""
        return self._total_ns / 1e9 if self._total_ns else None


def _waited_s(proc: Path) -> float | None:
    """Return the seconds when at least one process waited for a CPU, None if the kernel does not measure them."""
    try:
        found = _WAITED.search((proc / "pressure" / "cpu").read_text(encoding="ascii"))
    except (OSError, ValueError):  # the kernel may have the file and refuse to read it
        return None
    return None if found is None else int(found[1]) / 1e6
