"""A clock that a test sets."""

from __future__ import annotations


class Clock:
    """Seconds that pass only when the test sets them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s
