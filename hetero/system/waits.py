"""Times to wait that nothing in the situation decides. A time that has a reason of its own stands where it is used."""

from __future__ import annotations

__all__ = ["CALL_TIMEOUT_S", "END_TIMEOUT_S", "LOG_INTERVAL_S", "POLL_S", "SHORT_POLL_S"]

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
