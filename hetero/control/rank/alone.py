"""A request to stop in a process that no launcher started: SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable

from hetero.control.rank.callbacks import run_callbacks
from hetero.errors import ExitCode
from hetero.system.stop_signals import SHIELD_VARIABLE

__all__ = ["EXIT_SIGTERM", "end_if_requested", "record_requests"]

EXIT_SIGTERM = 143
"""Status of a process that SIGTERM has ended, as a shell gives it: 128 + 15."""

_requested = threading.Event()


def record_requests() -> None:
    """Record SIGTERM instead of ending by it, from now on. Call this once, on the main thread."""
    signal.signal(signal.SIGTERM, _on_sigterm)
    os.register_at_fork(after_in_child=_restore)
    # Shield loader workers, which may get the same signal, because they must serve the last step.
    os.environ[SHIELD_VARIABLE] = "1"


def end_if_requested(callbacks: Iterable[Callable[[], object]]) -> None:
    """Run the stop callbacks and end this process if SIGTERM was received.

    Raises:
        SystemExit: With status 143, or 30 if a callback failed.
    """
    if _requested.is_set():
        failures = run_callbacks(callbacks)
        raise SystemExit(int(ExitCode.SCRIPT_FAILED) if failures else EXIT_SIGTERM)


def _on_sigterm(*_: object) -> None:
    _requested.set()


def _restore() -> None:
    """Let SIGTERM end a process that the script forks, because no loader there looks for the recorded request."""
    # The script may have set another handler.
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
