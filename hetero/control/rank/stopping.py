"""The last resort for a rank that was asked to stop and comes to no step's end."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

from hetero.errors import HeteroError

__all__ = ["LateStop", "StopError"]

_STARVED_S = 2.0
"""How long a rank that is to stop waits for a batch while no endpoint serves: one may be restarting."""
_POLL_BOUND_S = 2.0
"""A wait for a batch that asks more often than this ends by itself."""
_SIGNAL = signal.SIGRTMIN + 8
"""From this process to itself. None of those that scripts and their libraries use."""

logger = logging.getLogger(__name__)


class StopError(HeteroError):
    """The job is to stop, and the thread that learnt it is not the one to end it: passed on to the script's."""


class LateStop:
    """Ends this process where it is, once half of the grace has passed since the request to stop. Thread-safe.

    A rank ends between two steps, when its loader begins the next one. Some never do: the
    script uses no loader, a step takes minutes, or the next batch does not come because
    every data host is gone. The latter wait asks `is_wait_over`. All others are
    interrupted by a signal whose handler, on the main thread, runs the stop
    callbacks: in the midst of a step, and not after the same one on all ranks. What runs
    in native code and does not come back to the interpreter (a collective that
    hangs, for instance) cannot be interrupted, and is killed at the end of the grace.

    Args:
        grace_s: From the request to the kill, seconds.
        end: Runs the callbacks and raises SystemExit, unless that has begun already.
        clock: Monotonic seconds.
    """

    def __init__(
        self, grace_s: float, end: Callable[[], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s = grace_s / 2
        self._end = end
        self._clock = clock
        self._lock = threading.Lock()
        self._requested_s: float | None = None
        self._polled_s = float("-inf")
        self._may_interrupt = False

    def install(self) -> None:
        """Allow the interruption; call it on the main thread."""
        signal.signal(_SIGNAL, self._on_signal)
        self._may_interrupt = True

    def request(self) -> None:
        """Take note that the job was asked to stop; repeats are ignored."""
        with self._lock:
            if self._requested_s is None:
                self._requested_s = self._clock()

    def is_wait_over(self, *, is_starved: bool) -> bool:
        """Tell whether a rank should end that waits for a batch, between two steps; asked while it waits.

        Args:
            is_starved: No endpoint serves at the moment.
        """
        with self._lock:
            self._polled_s = now_s = self._clock()
            if self._requested_s is None:
                return False
            patience_s = min(_STARVED_S, self._patience_s) if is_starved else self._patience_s
            return now_s - self._requested_s >= patience_s

    def interrupt_if_due(self) -> None:
        """Interrupt the main thread, once, if its time is over; call it about once a second."""
        now_s = self._clock()
        with self._lock:
            if not self._may_interrupt or self._requested_s is None or now_s - self._polled_s < _POLL_BOUND_S:
                return
            if now_s - self._requested_s < self._patience_s:
                return
            self._may_interrupt = False
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, _SIGNAL)  # to that very thread: it may be blocked in a system call

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._end()
