"""CPU pressure of a host: how short its CPUs are, in [0, 1]."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["CpuPressure"]

_WINDOW_S = 5.0
_MIN_WINDOW_S = 1.0
_BUSY = 0.9
"""CPU use above which CPUs count as short, if the kernel does not measure the pressure."""
_WAITED = re.compile(r"^some .*\btotal=(\d+)", re.MULTILINE)


class CpuPressure:
    """The CPU pressure over the last five seconds. For one thread.

    Where the kernel measures it (PSI, since Linux 4.20), it is the share of time when a process waited for a CPU.
    Elsewhere it is 0 up to a CPU use of 90 %, and grows to 1 at 100 %.

    Args:
        proc: Folder of the kernel's files.
        clock: Returns monotonic seconds.
    """

    def __init__(self, proc: Path = Path("/proc"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._has_psi = self._read_psi() is not None
        self._readings: deque[tuple[float, float, float]] = deque()  # when, and a numerator and a denominator

    def share(self) -> float | None:
        """Take a reading. Return the pressure, None before two readings that are a second apart or without figures."""
        now_s = self._clock()
        found = self._read_psi() if self._has_psi else self._read_use()
        if found is None:
            return None
        self._readings.append((now_s, *found))
        while len(self._readings) > 2 and self._readings[1][0] <= now_s - _WINDOW_S:
            self._readings.popleft()
        first_s, first_part, first_whole = self._readings[0]
        part, whole = found[0] - first_part, found[1] - first_whole
        if now_s - first_s < _MIN_WINDOW_S or whole <= 0:
            return None
        share = part / whole if self._has_psi else (part / whole - _BUSY) / (1 - _BUSY)
        return min(1.0, max(0.0, share))

    def _read_psi(self) -> tuple[float, float] | None:
        """Return the seconds when a process waited for a CPU, and the present time."""
        try:
            found = _WAITED.search((self._proc / "pressure" / "cpu").read_text(encoding="ascii"))
        except (OSError, ValueError):  # the kernel may have the file and refuse to read it
            return None
        return None if found is None else (int(found[1]) / 1e6, self._clock())

    def _read_use(self) -> tuple[float, float] | None:
        """Return the busy time and the whole time of all CPUs, in ticks."""
        try:
            line = (self._proc / "stat").read_text(encoding="ascii").partition("\n")[0]
            user, nice, system, idle, iowait, *others = map(float, line.split()[1:9])
        except (OSError, ValueError):
            return None
        busy = user + nice + system + sum(others[:2])  # interrupts, but not the time that other machines took
        return busy, busy + idle + iowait
