"""Whether the head of a Ray cluster still answers.

Ray ends the driver and all actors when the head has not answered for a minute, and says so only in its own words. The
driver of a job watches the head itself, so that the job ends with its cause and exit code before that.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

__all__ = ["HeadWatch"]

_CHECK_S = 2.0
_CONNECT_S = 1.0
_PATIENCE_S = 10.0
_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_RECONNECT_S = 60.0
"""Ray's default."""


class HeadWatch:
    """Watches the head of a cluster.

    Args:
        address: ``ADDRESS:PORT`` of its global control store. Empty: nothing is watched.
        say: Called with a line when the head does not answer, and when it answers again.
        clock: Monotonic seconds.
    """

    def __init__(
        self, address: str, *, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._address = address
        self._say = say
        self._clock = clock
        self._next_s = clock() + _CHECK_S
        self._silent_since_s: float | None = None
        self._is_reported = False
        try:
            reconnect_s = float(os.environ.get(_RECONNECT_VARIABLE, ""))
        except ValueError:
            reconnect_s = _RECONNECT_S
        self._limit_s = 0.75 * reconnect_s

    def loss(self) -> str:
        """Return why the head counts as lost. Empty while it does not. May block for a second."""
        now_s = self._clock()
        if not self._address or now_s < self._next_s:
            return ""
        self._next_s = now_s + _CHECK_S
        why = self._why_silent()
        if not why:
            if self._is_reported:
                self._say("the head of the Ray cluster answers again")
            self._silent_since_s, self._is_reported = None, False
            return ""
        if self._silent_since_s is None:
            self._silent_since_s = now_s
        silent_s = now_s - self._silent_since_s
        if silent_s >= self._limit_s:
            return f"the head of the Ray cluster at {self._address} has not answered for {silent_s:.0f} s: {why}"
        if silent_s >= min(_PATIENCE_S, self._limit_s / 2) and not self._is_reported:
            self._is_reported = True
            self._say(f"the head of the Ray cluster at {self._address} does not answer: {why}; waiting for it")
        return ""

    def _why_silent(self) -> str:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
        except (OSError, ValueError) as error:
            return str(error)
        return ""
