"""Addresses of the hosts of a job. A host's name may appear minutes after the start, and its address may change."""

from __future__ import annotations

import time
from collections.abc import Callable

from hetero.cluster import resolve_address
from hetero.config import Timings
from hetero.errors import ClusterError
from hetero.system.waits import POLL_S, WaitLog
from hetero.wire.channels import join_address

__all__ = ["Addresses"]


class Addresses:
    """The last known address of each host. Thread-safe.

    Args:
        port: Control port of every launcher.
        timings: Contains the time to wait for a name, and the time between two log lines about the wait.
        check_stop: Called regularly during a wait. It raises an exception to end the wait.
    """

    def __init__(self, port: int, timings: Timings, check_stop: Callable[[], None]) -> None:
        self._port = port
        self._timings = timings
        self._check_stop = check_stop
        self._known: dict[str, str] = {}

    def set(self, host: str, address: str) -> None:
        """State the numeric address of a host whose name need not be resolved."""
        self._known[host] = address

    def known(self, host: str) -> str | None:
        """Return the address of a host, or None if it was not found yet. Does not wait."""
        return self._known.get(host)

    def of(self, host: str) -> str:
        """Return the last known address of a host. If the address is unknown, resolve the name, again and again.

        Raises:
            ClusterError: If the name is not resolved within the start timeout.
        """
        if host in self._known:
            return self._known[host]
        deadline_s = time.monotonic() + self._timings.start_timeout_s
        log = WaitLog(self._timings.patience_s)
        while True:
            try:
                address = self._known[host] = resolve_address(host)
                return address
            # On a platform, a name may be resolved only minutes after the start (F15). Until the timeout, a failed
            # attempt is not an error.
            except ClusterError as error:
                if time.monotonic() > deadline_s:
                    raise
                log.show(f"the address of {host}: {error}")
            self._check_stop()
            time.sleep(POLL_S)

    def launcher_of(self, host: str) -> str:
        """Resolve a host's name again, with one attempt, and return ``address:port`` of its launcher.

        Raises:
            ClusterError: If the name is not resolved.
        """
        address = self._known[host] = resolve_address(host)
        return join_address(address, self._port)
