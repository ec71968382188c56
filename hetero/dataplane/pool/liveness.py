"""Tells a stuck endpoint from one that is busy, suspended, or building a data set. Pure except `is_suspended`."""

from __future__ import annotations

import enum
from pathlib import Path

__all__ = ["Beats", "Verdict", "is_suspended"]

DUMP_S = 1.0
"""Seconds from the request for a stack dump to the kill."""


class Verdict(enum.Enum):
    """What to do about an endpoint."""

    NOTHING = enum.auto()
    SUSPENDED = enum.auto()
    """The process was stopped from outside for longer than the bound. Log this once."""
    DUMP = enum.auto()
    """Make the process write its stacks."""
    KILL = enum.auto()


class Beats:
    """The last signs of life of one endpoint process.

    A beat needs the interpreter and the locks of the service. Therefore a process that holds either for ever sends no
    beat, even if its transport still works. A suspended process (SIGSTOP) is not stuck. It may be continued, and its
    readers have gone elsewhere.

    Args:
        bound_s: Seconds without a beat until the process counts as stuck.
        build_bound_s: The same while it builds a data set, because libraries hold the interpreter while they load.
    """

    def __init__(self, *, bound_s: float, build_bound_s: float) -> None:
        self._bound_s = bound_s
        self._build_bound_s = max(bound_s, build_bound_s)
        self._beat_s: float | None = None
        self._num_builds = 0
        self._dumped_s: float | None = None
        self._is_suspended = False
        self._was_said = False
        self.stuck_for_s: float | None = None
        """Age of the last beat when the process was found stuck, None if it never was."""

    def beat(self, now_s: float) -> None:
        """Record a beat. The first one begins the watch."""
        self._beat_s = now_s
        self._is_suspended = self._was_said = False

    def build(self, now_s: float, *, has_ended: bool) -> None:
        """Record that the building of a data set begins or has ended."""
        self._num_builds += -1 if has_ended else 1
        self.beat(now_s)

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the last beat, 0 before the first."""
        return 0.0 if self._beat_s is None else now_s - self._beat_s

    def verdict(self, now_s: float, *, suspended: bool) -> Verdict:
        """Return what to do now. Call this a few times a second, and do what it returns."""
        if self._beat_s is None:
            return Verdict.NOTHING
        if self._dumped_s is not None:
            return Verdict.KILL if now_s - self._dumped_s >= DUMP_S else Verdict.NOTHING
        if suspended:
            return self._suspended(now_s)
        if self._is_suspended:  # the process was just continued, and gets the whole bound again
            self.beat(now_s)
        if self.age_s(now_s) <= (self._build_bound_s if self._num_builds else self._bound_s):
            return Verdict.NOTHING
        self.stuck_for_s = self.age_s(now_s)
        self._dumped_s = now_s
        return Verdict.DUMP

    def is_late(self, now_s: float) -> bool:
        """Return whether beats are overdue for so long that the caller should check for a suspension."""
        return self._beat_s is not None and self.age_s(now_s) > self._bound_s / 2

    def _suspended(self, now_s: float) -> Verdict:
        self._is_suspended = True
        if self._was_said or self.age_s(now_s) <= self._bound_s:
            return Verdict.NOTHING
        self._was_said = True
        return Verdict.SUSPENDED


def is_suspended(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process, False if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
