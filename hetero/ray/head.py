"""Watches whether the head of a Ray cluster still answers.

When the head has not answered for a minute, Ray ends the driver with an exit code of Ray. The driver of a job watches
the head itself, on a thread. So the driver ends earlier, with the cause and a documented exit code, even if its main
thread waits for Ray. A head that accepts connections and answers nothing does not count as lost.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from hetero.errors import ExitCode
from hetero.system.waits import LOG_INTERVAL_S

__all__ = ["CHECK_S", "RECONNECT_VARIABLE", "HeadWatch"]

CHECK_S = 2.0
"""Seconds between two looks at events that Ray does not announce: at its head, a node, and the state of a service.
A call to an actor costs Ray milliseconds, and up to 1,000 workers ask the same actor."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Environment variable with the seconds until Ray ends a process that the head does not answer."""
_RECONNECT_S = 60.0
"""Ray's default."""


class HeadWatch:
    """Watches the head of a cluster, while it is open as a context manager.

    Args:
        address: ``ADDRESS:PORT`` of the cluster's global control store. If it is empty, nothing is watched.
        log_line: Called with a line when the head does not answer, when it answers again, and when it is lost.
        clock: Monotonic seconds.
    """

    def __init__(
        self, address: str, *, log_line: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.exit_code = int(ExitCode.ORPHANED)
        """Exit code of this process if the head is lost. The caller sets the job's exit code when the job has ended."""
        self._address = address
        self._log_line = log_line
        self._clock = clock
        self._silent_since_s: float | None = None
        """Time of the first look without an answer, in monotonic seconds. None while the head answers."""
        self._is_silence_logged = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head", daemon=True)
        try:
            reconnect_s = float(os.environ.get(RECONNECT_VARIABLE, ""))
        except ValueError:
            reconnect_s = _RECONNECT_S
        # Ray itself ends this process after ``reconnect_s``, with another exit code. End the process earlier, after 45
        # s by default (F45).
        self._limit_s = 0.75 * reconnect_s

    def __enter__(self) -> HeadWatch:
        if self._address:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()

    def _watch(self) -> None:
        """Check the head again and again. If the head is lost, log the loss and end this process."""
        while not self._is_closed.wait(CHECK_S):
            if (loss := self.loss()) and not self._is_closed.is_set():
                # When the job has ended, its exit code replaces ORPHANED, and the loss no longer changes the result.
                has_job_ended = self.exit_code != ExitCode.ORPHANED
                line = f"the job had ended, but {loss}" if has_job_ended else f"error HET-{self.exit_code}: {loss}"
                self._log_line(line)
                # End this process here, because the main thread may wait for Ray. Ray would go on waiting for the head.
                os._exit(self.exit_code)

    def loss(self) -> str:
        """Ask the head whether it answers. Return why it counts as lost, or an empty text. Blocks up to `CHECK_S`."""
        now_s = self._clock()
        why = self._why_silent()
        if not why:
            if self._is_silence_logged:
                self._log_line("the head of the Ray cluster answers again")
            self._silent_since_s, self._is_silence_logged = None, False
            return ""
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        silent_s = now_s - self._silent_since_s
        if silent_s >= self._limit_s:
            return f"the head of the Ray cluster at {self._address} has not answered for {silent_s:.0f} s: {why}"
        # Log the silence once, but not a short one. If the limit is short, log it well before the limit.
        if silent_s >= min(LOG_INTERVAL_S, self._limit_s / 2) and not self._is_silence_logged:
            self._is_silence_logged = True
            self._log_line(f"the head of the Ray cluster at {self._address} does not answer: {why}; waiting for it")
        return ""

    def _why_silent(self) -> str:
        """Return why the head does not accept a connection. Empty if it accepts one."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CHECK_S).close()
        except (OSError, ValueError) as error:
            return str(error)
        return ""
