"""Times to wait that many modules share, and a log of long waits.

A time that one module needs for a reason of its own is defined in that module.
"""

from __future__ import annotations

import logging
import time

__all__ = [
    "CALL_TIMEOUT_S",
    "END_TIMEOUT_S",
    "FIRST_BACKOFF_S",
    "LOG_INTERVAL_S",
    "MAX_BACKOFF_S",
    "POLL_S",
    "SHORT_POLL_S",
    "STOP_GRACE_S",
    "WaitLog",
    "backoff_s",
]

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Longest wait for news, although a wake-up usually ends the wait sooner. A lost wake-up then delays news only this
long."""
SHORT_POLL_S = 0.05
"""Seconds between two polls of an event without a wake-up, such as the end of a process that another one started."""
LOG_INTERVAL_S = 10.0
"""Seconds until a wait is logged, and between two log lines about the same thing."""
CALL_TIMEOUT_S = 10.0
"""Time limit of a call that the other side answers without work."""
END_TIMEOUT_S = 5.0
"""Longest wait for threads that were told to end, and for processes that were killed. After this time they are left
behind."""
FIRST_BACKOFF_S = 0.2
"""Seconds until the second try, and until a busy peer is asked again."""
MAX_BACKOFF_S = 10.0
"""Longest time between two tries. Also the longest time to avoid a peer that served badly."""
STOP_GRACE_S = 50.0
"""Seconds that ranks get to save a checkpoint and end after a request to stop, where the platform gives enough."""


def backoff_s(num_failures: int) -> float:
    """Return the seconds to wait after failures in a row: 0.2 after the first, doubled after each other, up to 10."""
    # Without a bound of the exponent, the power overflows after 1,024 failures.
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))


class WaitLog:
    """Logs what a thread waits for, at most once per interval. The first line comes one interval after the start.

    Args:
        interval_s: The interval in seconds.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._next_s = time.monotonic() + interval_s

    def show(self, what: str) -> None:
        """Log what the thread waits for, if the interval since the last line is over. Ignore an empty text."""
        now_s = time.monotonic()
        if what and now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            logger.info("waiting for %s", what)
