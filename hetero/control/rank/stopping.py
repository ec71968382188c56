"""How a rank ends if it was asked to stop and does not reach the end of a step."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable

from hetero.errors import HeteroError

__all__ = ["LateStop", "StopError"]

_STARVED_S = 2.0
"""Time that a stopping rank waits for a batch although no endpoint serves, because an endpoint may be restarting."""
_POLL_BOUND_S = 2.0
"""A rank that polled `LateStop.is_wait_over` within this time is not interrupted, because its wait ends by itself."""
_SIGNAL = signal.SIGRTMIN + 8
"""Signal from this process to itself. Scripts and their libraries do not use it."""

logger = logging.getLogger(__name__)


class StopError(HeteroError):
    """The job is to stop. The thread that notices passes this error to the script's thread, which ends the job."""


class LateStop:
    """Interrupts this process when half of the grace after a request to stop has passed. Thread-safe.

    A rank normally ends between two steps, when its loader begins the next one. Some ranks do not get there: the script
    uses no loader, a step takes minutes, or the next batch does not come because every data host is gone. A rank that
    waits for a batch asks `is_wait_over`. A signal interrupts all others. Its handler runs the stop callbacks on the
    main thread, in the middle of a step, and not after the same step on all ranks. Native code that does not return to
    the interpreter (a collective that hangs, for example) cannot be interrupted. The launcher kills such a rank at the
    end of the grace.

    Args:
        grace_s: Time from the request to the kill, seconds.
        end: Runs the callbacks and raises SystemExit, unless that has already begun.
        clock: Monotonic seconds.
    """

    def __init__(
        self, grace_s: float, end: Callable[[], object], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # The other half of the grace is for the stop callbacks, which may save a checkpoint.
        self._patience_s = grace_s / 2
        self._end = end
        self._clock = clock
        self._lock = threading.Lock()
        self._requested_s: float | None = None
        """Time of the first request to stop."""
        self._polled_s = float("-inf")
        """Time of the last call of `is_wait_over`."""
        self._may_interrupt = False
        """Whether `install` has set the handler of `_SIGNAL`, and `interrupt_if_due` has not sent this signal yet."""

    def install(self) -> None:
        """Allow the interrupt. Call this on the main thread."""
        signal.signal(_SIGNAL, self._on_signal)
        self._may_interrupt = True

    def request(self) -> None:
        """Record that the job was asked to stop. Ignore repeated requests."""
        with self._lock:
            if self._requested_s is None:
                self._requested_s = self._clock()

    def is_wait_over(self, *, is_starved: bool) -> bool:
        """Return whether a rank that waits for a batch between two steps should end. Poll this during the wait.

        Args:
            is_starved: Whether no endpoint serves at the moment.
        """
        with self._lock:
            self._polled_s = now_s = self._clock()
            if self._requested_s is None:
                return False
            # Without an endpoint the batch will hardly come, so wait only until one may have been restarted.
            patience_s = min(_STARVED_S, self._patience_s) if is_starved else self._patience_s
            return now_s - self._requested_s >= patience_s

    def interrupt_if_due(self) -> None:
        """Interrupt the main thread once if half of the grace has passed. Call this about once a second."""
        now_s = self._clock()
        with self._lock:
            if not self._may_interrupt or self._requested_s is None:
                return
            # A rank that polls `is_wait_over` waits between two steps and ends there by itself. That is better than in
            # the middle of a step.
            if now_s - self._polled_s < _POLL_BOUND_S or now_s - self._requested_s < self._patience_s:
                return
            self._may_interrupt = False
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        # Signal exactly this thread, because it may be blocked in a system call.
        signal.pthread_kill(main_thread, _SIGNAL)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._end()
