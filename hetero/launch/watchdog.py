"""Watches the launcher's main loop. It logs the stack of a stuck loop, and ends a launcher that cannot end itself."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable

__all__ = ["Watchdog"]

_INTERVAL_S = 1.0
_SUSPENDED_S = 3 * _INTERVAL_S

logger = logging.getLogger(__name__)


class Watchdog:
    """A thread that checks whether the main loop calls `tick`, as a context manager.

    The main loop counts as stuck if it does not call `tick` for ``lease_s``. By then peers consider the launcher lost,
    and the watchdog logs the main thread's stack once. If the interpreter is blocked, no Python thread can run. Then
    the timer of `faulthandler` writes the stacks to standard error.

    After three times ``lease_s``, or when the time given to `expect_end` is over, the watchdog ends this process.
    Parent-death signals then end the processes that this process started. Time during which this whole process was
    suspended does not count.

    Args:
        lease_s: Seconds without a tick until the main loop counts as stuck.
        status: Returns the exit status of a stuck launcher. It must not take a lock that the main loop may hold.
        exit_process: Ends this process at once with a status.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        lease_s: float,
        *,
        status: Callable[[], int],
        exit_process: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease_s = lease_s
        self._status_if_stuck = status
        """Returns the exit status of this process. Called when the main loop has stood still for too long."""
        self._exit_process = exit_process
        self._clock = clock
        self._main_id = threading.get_ident()
        self._ticked_s = self._checked_s = clock()
        """Times of the last `tick` and of the last `check`."""
        self._end: tuple[float, int] | None = None
        """Time at which the watchdog ends this process, and the exit status. None before `expect_end`."""
        self._is_dumped = False
        """Whether the stack was logged since the last tick."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(2 * _INTERVAL_S)
        faulthandler.cancel_dump_traceback_later()

    def tick(self) -> None:
        """Record that the main loop is running."""
        self._ticked_s = self._clock()
        self._is_dumped = False

    def expect_end(self, within_s: float, status: int) -> None:
        """End this process with ``status`` if it has not ended by itself within ``within_s`` seconds."""
        self._end = self._clock() + within_s, status

    def check(self) -> None:
        """Log the stack of a stuck main loop, or end this process after the time given to `expect_end`."""
        now_s = self._clock()
        # This method is called every second. If the gap is longer, the whole process was suspended. Do not count that
        # time.
        if now_s - self._checked_s > _SUSPENDED_S:
            self._ticked_s = now_s
        self._checked_s = now_s
        if self._end is not None:
            deadline_s, status = self._end
            if now_s > deadline_s:
                self._dump("this host takes too long to end; the launcher exits now")
                self._exit_process(status)
            return
        still_s = now_s - self._ticked_s
        if still_s > self._lease_s and not self._is_dumped:
            self._is_dumped = True
            self._dump(f"the main loop of this launcher has stood still for {still_s:.0f} s")
        if still_s > 3 * self._lease_s:
            self.expect_end(within_s=0.0, status=self._status_if_stuck())

    def _run(self) -> None:
        """Check the main loop about once per second.

        If the interpreter is blocked, this thread does not run either. Therefore each pass sets a timer of
        `faulthandler`, which works without Python threads, anew. The timer runs out only if there is no next pass, and
        then writes the stacks of all threads to standard error.
        """
        while not self._stopping.wait(_INTERVAL_S):
            # `faulthandler` raises if a program has replaced standard error by an object that is not a file.
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                faulthandler.dump_traceback_later(self._lease_s + 2 * _INTERVAL_S)
            self.check()

    def _dump(self, why: str) -> None:
        frame = sys._current_frames().get(self._main_id)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "the main thread has ended"
        logger.error("%s. Stack of the main thread:\n%s", why, stack)
