"""Waiting for another thread or process, for the test modules of several folders."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float = 300.0) -> None:
    """Poll until the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.01)
