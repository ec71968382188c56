"""How often a host restarts what crashed, and how soon. Pure: no threads, no clock.

Both forget: a crash a day is an accident each time, and must neither end a host after weeks nor make the next restart
wait as if it were one of a series.
"""

from __future__ import annotations

import math

__all__ = ["RestartBudget", "backoff_s"]

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0


class RestartBudget:
    """Restarts that a host may still make.

    Args:
        limit: Restarts in a row, >= 0.
        return_s: Without a restart, before one is given back, seconds, > 0.
    """

    def __init__(self, limit: int, return_s: float) -> None:
        self._limit = limit
        self._return_s = return_s
        self._num_used = 0
        self._latest_s = 0.0

    def take(self, now_s: float) -> bool:
        """Use one restart if any is left.

        Args:
            now_s: Monotonic seconds.
        """
        num_returned = int((now_s - self._latest_s) / self._return_s)
        self._num_used = max(0, self._num_used - num_returned)
        if self._num_used >= self._limit:
            return False
        self._num_used += 1
        self._latest_s = now_s
        return True

    @property
    def next_s(self) -> float:
        """When the next restart is given back if none is left, monotonic seconds; infinite if there never is one."""
        return self._latest_s + self._return_s if self._limit else math.inf

    def next_in_words(self, now_s: float) -> str:
        """Return when the next restart is given back, for the end of a sentence; empty if there never is one."""
        return f", the next one in {self.next_s - now_s:.0f} s" if self.next_s < math.inf else ""


def backoff_s(num_crashes: int) -> float:
    """Return the wait before the restart after so many crashes in a row; the first is nearly immediate."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (num_crashes - 1))
