"""How long the parts of a job wait for each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hetero.config.options import LaunchOptions
from hetero.errors import ConfigError

__all__ = ["Timings", "time_scale"]

# Starting an interpreter or importing a framework can stall a process for seconds, however small the scale.
_FLOORS_S = {"lease_s": 3.0, "orphan_s": 6.0, "abort_grace_s": 2.0, "stop_grace_s": 2.0}
_MAX_SCALE = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in seconds, each greater than 0 and measured on the monotonic clock."""

    heartbeat_s: float = 2.0
    """Between two heartbeats of a launcher, before jitter."""
    suspect_s: float = 6.0
    """After which a launcher that answers, but whose main loop has not turned, is said to stand still."""
    lease_s: float = 15.0
    """Silence after which a host counts as lost and gets no new requests, longer than ``suspect_s``."""
    patience_s: float = 10.0
    """Between two lines that say whom a host waits for."""
    orphan_s: float = 45.0
    """Silence of all trainer hosts after which a data host leaves by itself."""
    start_timeout_s: float = 900.0
    """For all hosts to be there; the platform's own wait for names is as long."""
    data_timeout_s: float = 300.0
    """Without any endpoint, before a rank gives up."""
    prepare_timeout_s: float = 600.0
    """For the construction of a data set."""
    stable_s: float = 60.0
    """In work without a crash, before an endpoint counts as stable; 60 times that gives one restart back."""
    stop_grace_s: float = 50.0
    """For the ranks to end after a request to stop; the platform kills after 120."""
    abort_grace_s: float = 8.0
    """For any process to end after an abort."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{field.name} is {value!r}; expected seconds greater than 0")
        if not self.heartbeat_s < self.suspect_s < self.lease_s:
            found = f"{self.heartbeat_s:g}, {self.suspect_s:g} and {self.lease_s:g}"
            raise ConfigError(f"heartbeat_s, suspect_s and lease_s are {found}; expected each less than the next")

    @classmethod
    def scaled(cls, scale: float) -> Timings:
        """Return the defaults multiplied by a factor; leases stay at 3 s or more.

        Args:
            scale: In (0, 100].

        Raises:
            ConfigError: If ``scale`` is out of range.
        """
        if not 0 < scale <= _MAX_SCALE:
            raise ConfigError(f"the time scale is {scale!r}; expected a number in (0, {_MAX_SCALE:g}]")
        defaults: dict[str, float] = dataclasses.asdict(cls())
        floors = {name: min(value, _FLOORS_S.get(name, 0.0)) for name, value in defaults.items()}
        return cls(**{name: max(value * scale, floors[name]) for name, value in defaults.items()})

    @classmethod
    def from_options(cls, options: LaunchOptions, env: Mapping[str, str]) -> Timings:
        """Return the timings of a job.

        ``HETERO_TIME_SCALE`` multiplies every default. A timeout that the
        options state is taken as it is stated.

        Args:
            options: Resolved options.
            env: The process environment.

        Raises:
            ConfigError: If the scale is not a number in (0, 100].
        """
        scaled = cls.scaled(time_scale(env))
        timeouts = ("start_timeout_s", "data_timeout_s", "prepare_timeout_s")
        stated = {name: getattr(options, name) for name in timeouts if getattr(options, name) != getattr(cls(), name)}
        return dataclasses.replace(scaled, **stated)


def time_scale(env: Mapping[str, str]) -> float:
    """Return ``HETERO_TIME_SCALE``, by which every default is multiplied, 1 by default.

    Raises:
        ConfigError: If it is not a number in (0, 100].
    """
    text = env.get("HETERO_TIME_SCALE") or "1"
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= _MAX_SCALE:
        raise ConfigError(f"HETERO_TIME_SCALE is {text!r:.40}; expected a number in (0, {_MAX_SCALE:g}]")
    return scale
