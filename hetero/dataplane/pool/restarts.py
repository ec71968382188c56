"""How often a host restarts crashed processes, and how soon. Pure: no threads, no clock.

Both the budget and the back-off forget. One crash a day is a separate accident each time. It must neither end a host
after weeks nor make the next restart wait as in a series of crashes.
"""

from __future__ import annotations

import math

__all__ = ["RestartBudget", "backoff_s"]

_FIRST_BACKOFF_S = 0.2
_MAX_BACKOFF_S = 10.0


class RestartBudget:
    """The number of restarts that a host may still make.

    Args:
        limit: Restarts in a row, >= 0.
        return_s: Seconds without a restart until one is given back, > 0.
    """

    def __init__(self, limit: int, return_s: float) -> None:
        self._limit = limit
        self._return_s = return_s
        self._num_used = 0
        self._latest_s = 0.0

    def take(self, now_s: float) -> bool:
        """Use one restart. Return whether one was left.

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
        """Monotonic time when the next restart is given back if none is left, infinite if never."""
        return self._latest_s + self._return_s if self._limit else math.inf

    def next_in_words(self, now_s: float) -> str:
        """Return when the next restart is given back, for the end of a sentence, empty if that never happens."""
        return f", the next one in {self.next_s - now_s:.0f} s" if self.next_s < math.inf else ""


def backoff_s(num_crashes: int) -> float:
    """Return the seconds to wait after ``num_crashes`` crashes in a row. The first restart comes nearly at once."""
    return min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2.0 ** (num_crashes - 1))
