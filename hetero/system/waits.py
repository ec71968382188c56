"""Times to wait that nothing in the situation decides. A time that has a reason of its own stands where it is used."""

from __future__ import annotations

__all__ = [
    "CALL_TIMEOUT_S",
    "END_TIMEOUT_S",
    "FIRST_BACKOFF_S",
    "LOG_INTERVAL_S",
    "MAX_BACKOFF_S",
    "POLL_S",
    "SHORT_POLL_S",
    "backoff_s",
]

POLL_S = 0.5
"""Longest wait for news that a wake-up brings sooner. It bounds what a wake-up costs that is lost."""
SHORT_POLL_S = 0.05
"""Seconds between two looks at what no wake-up announces, such as the end of a process that another one started."""
LOG_INTERVAL_S = 10.0
"""Seconds until a wait is logged, and between two log lines about the same thing."""
CALL_TIMEOUT_S = 10.0
"""Time limit of a call that the other side answers without work."""
END_TIMEOUT_S = 5.0
"""Longest wait for threads that were told to end, and for processes that were killed. Then they are left behind."""
FIRST_BACKOFF_S = 0.2
"""Seconds until the second try, and until a busy peer is asked again."""
MAX_BACKOFF_S = 10.0
"""Longest time between two tries, and for which a peer that served badly is avoided."""


def backoff_s(num_failures: int) -> float:
    """Return the seconds to wait after failures in a row: 0.2 after the first, doubled after each other, up to 10."""
    # Without a bound of the exponent, the power overflows after 1,024 failures.
    return min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(num_failures - 1, 16))
