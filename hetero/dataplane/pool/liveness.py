"""Tells an endpoint that is stuck from one that is busy, suspended, or building a data set. Pure but for the clock."""

from __future__ import annotations

import enum
from pathlib import Path

__all__ = ["Beats", "Verdict", "is_suspended"]

DUMP_S = 1.0
"""From the request for a stack dump to the kill."""


class Verdict(enum.Enum):
    """What is to be done about an endpoint."""

    NOTHING = enum.auto()
    SUSPENDED = enum.auto()
    """It was stopped from outside for longer than the bound: worth a line, once."""
    DUMP = enum.auto()
    """Have it write its stacks."""
    KILL = enum.auto()


class Beats:
    """When one endpoint process showed last that it is well.

    A beat takes the interpreter and the locks of the service, so a process that
    holds either for ever sends none, however alive its transport is. One that
    is suspended (SIGSTOP) is not stuck: whoever stopped it may continue it, and its readers
    have gone elsewhere.

    Args:
        bound_s: Without a beat, before it counts as stuck.
        build_bound_s: The same while it builds a data set: libraries hold the interpreter when they load.
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
        """Age of the last beat when it was found stuck; None: it never was."""

    def beat(self, now_s: float) -> None:
        """Take note of a beat; the first one begins the watch."""
        self._beat_s = now_s
        self._is_suspended = self._was_said = False

    def build(self, now_s: float, *, has_ended: bool) -> None:
        """Take note that the building of a data set begins or has ended."""
        self._num_builds += -1 if has_ended else 1
        self.beat(now_s)

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the last beat, 0 before the first."""
        return 0.0 if self._beat_s is None else now_s - self._beat_s

    def verdict(self, now_s: float, *, suspended: bool) -> Verdict:
        """Say what is to be done now; call it a few times a second, and do what it says."""
        if self._beat_s is None:
            return Verdict.NOTHING
        if self._dumped_s is not None:
            return Verdict.KILL if now_s - self._dumped_s >= DUMP_S else Verdict.NOTHING
        if suspended:
            return self._suspended(now_s)
        if self._is_suspended:  # just continued: it has the whole bound again
            self.beat(now_s)
        if self.age_s(now_s) <= (self._build_bound_s if self._num_builds else self._bound_s):
            return Verdict.NOTHING
        self.stuck_for_s = self.age_s(now_s)
        self._dumped_s = now_s
        return Verdict.DUMP

    def is_late(self, now_s: float) -> bool:
        """Tell whether beats have failed to come for a while, so that it is worth asking whether it is suspended."""
        return self._beat_s is not None and self.age_s(now_s) > self._bound_s / 2

    def _suspended(self, now_s: float) -> Verdict:
        self._is_suspended = True
        if self._was_said or self.age_s(now_s) <= self._bound_s:
            return Verdict.NOTHING
        self._was_said = True
        return Verdict.SUSPENDED


def is_suspended(pid: int) -> bool:
    """Tell whether a process is stopped by a signal or a debugger; False if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
