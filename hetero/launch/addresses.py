"""Where the hosts of a job are reached: names that may appear minutes after the start, and may change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hetero.cluster import resolve_address
from hetero.config import Timings
from hetero.errors import ClusterError
from hetero.wire.channels import join_address

__all__ = ["Addresses"]

logger = logging.getLogger(__name__)

_INTERVAL_S = 0.5


class Addresses:
    """What the names of hosts said last. Thread-safe.

    Args:
        port: Of every launcher.
        timings: How long names are waited for, and after which time that is said.
        check_stop: Called while a name is waited for; raises what ends that.
    """

    def __init__(self, port: int, timings: Timings, check_stop: Callable[[], None]) -> None:
        self._port = port
        self._timings = timings
        self._check_stop = check_stop
        self._known: dict[str, str] = {}

    def has(self, host: str) -> bool:
        """Whether the address of a host was found."""
        return host in self._known

    def known(self, host: str) -> str | None:
        """Return the address of a host if it was found; does not wait."""
        return self._known.get(host)

    def of(self, host: str) -> str:
        """Return the address of a host; needs no name service where one was found before, else waits for its name.

        Raises:
            ClusterError: If it is not resolved within the start timeout.
        """
        return self._known.get(host) or self._wait_for(host, self._timings.start_timeout_s)

    def launcher_of(self, host: str) -> str:
        """Return where the launcher of a host listens, as the name says now; does not wait.

        Raises:
            ClusterError: If it is not resolved.
        """
        address = self._known[host] = resolve_address(host)
        return join_address(address, self._port)

    def _wait_for(self, host: str, timeout_s: float) -> str:
        begin_s = said_s = time.monotonic()
        while True:
            try:
                address = self._known[host] = resolve_address(host)
                return address
            except ClusterError as error:
                now_s = time.monotonic()
                if now_s - begin_s > timeout_s:
                    raise
                if now_s - said_s >= (self._timings.patience_s if said_s > begin_s else _INTERVAL_S):
                    said_s = now_s
                    logger.info("waiting for the address of %s: %s", host, error)
            self._check_stop()
            time.sleep(_INTERVAL_S)
