"""Decides how many data hosts a service should have. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hetero.errors import ConfigError

__all__ = ["Bounds", "Scaler"]

_SHRINK_AFTER = 6
"""After this number of estimates in a row that wanted fewer hosts, a host leaves. One new host may make a job slower at
first, because each endpoint builds the data set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of the number of data hosts."""

    min_hosts: int
    """At least 1."""
    max_hosts: int
    """At least ``min_hosts``."""

    def __post_init__(self) -> None:
        if self.min_hosts < 1:
            raise ConfigError(f"min_hosts is {self.min_hosts}; expected at least 1")
        if self.max_hosts < self.min_hosts:
            raise ConfigError(f"max_hosts is {self.max_hosts}; expected at least min_hosts, which is {self.min_hosts}")


class Scaler:
    """Follows the estimates of `hetero.launch.wanted_hosts.WantedHosts`.

    The scaler adds hosts as soon as the whole interval of an estimate is above the present number. It removes one host
    at a time, and only after the intervals of several estimates in a row were below the present number.

    Args:
        bounds: Bounds of the number of hosts.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._num_too_many = 0

    def target(self, *, low: int, high: int, present: int) -> int:
        """Return the number of hosts to have.

        Args:
            low: Lower end of the interval of the estimate.
            high: Upper end.
            present: Number of hosts that the service has or has asked Ray for.
        """
        bounds = self._bounds
        # Successive estimates whose whole interval is below the present number.
        self._num_too_many = self._num_too_many + 1 if high < present else 0
        least_wanted = max(low, bounds.min_hosts)
        if least_wanted > present:
            # Never fewer than now, because only the branch below removes hosts.
            return max(present, min(least_wanted, bounds.max_hosts))
        if self._num_too_many >= _SHRINK_AFTER and present > bounds.min_hosts:
            self._num_too_many = 0
            return present - 1
        return present
