"""Time limits of the parts of a job that wait for each other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero.config.options import LaunchOptions
from hetero.errors import ConfigError
from hetero.system.waits import LOG_INTERVAL_S, STOP_GRACE_S

__all__ = ["Timings", "time_scale"]

# Lower limits of scaled times. Starting an interpreter or importing a framework can block a process for seconds.
_FLOORS_S = {"lease_s": 3.0, "orphan_s": 6.0, "abort_grace_s": 2.0, "stop_grace_s": 2.0}
_MAX_SCALE = 100.0
_EARLY = 0.9
"""After this share of the stop grace, a host acts on ranks that have not ended. At the end of the grace the job fails
because ranks did not end, and this failure would hide the failure that the host has to report."""


def _default(option: str) -> float:
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(LaunchOptions)}
    return float(defaults[option])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Durations in seconds, each greater than 0 and measured on the monotonic clock."""

    heartbeat_s: float = 2.0
    """Interval between two heartbeats of a launcher, before jitter."""
    suspect_s: float = 6.0
    """A launcher that answers counts as stuck if its main loop has not run for this time."""
    lease_s: float = 15.0
    """A host that is silent for this time counts as lost and gets no new requests. Longer than ``suspect_s``."""
    patience_s: float = LOG_INTERVAL_S
    """Interval between two log lines about the hosts that a host waits for."""
    orphan_s: float = 45.0
    """A data host ends if all trainer hosts are silent for this time."""
    start_timeout_s: float = _default("start_timeout_s")
    """Time limit for all hosts to appear. The platform itself waits equally long until the hosts' names resolve."""
    data_timeout_s: float = _default("data_timeout_s")
    """A rank gives up after this time without an endpoint."""
    prepare_timeout_s: float = _default("prepare_timeout_s")
    """Time limit for the construction of a data set."""
    stable_s: float = 60.0
    """An endpoint is stable after this time without a crash. After 60 times as long, the host gets one restart back."""
    stop_grace_s: float = STOP_GRACE_S
    """Time limit for the ranks to end after a request to stop. Platforms kill ranks later, SageMaker after 120 s."""
    abort_grace_s: float = 8.0
    """Time limit for any process to end after an abort."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{field.name} is {value!r}; expected seconds greater than 0")
        if not self.heartbeat_s < self.suspect_s < self.lease_s:
            found = f"{self.heartbeat_s:g}, {self.suspect_s:g} and {self.lease_s:g}"
            raise ConfigError(f"heartbeat_s, suspect_s and lease_s are {found}; expected each less than the next")

    @property
    def early_grace_s(self) -> float:
        """Seconds from a request to stop until a host no longer waits for ranks, shortly before the grace ends."""
        return _EARLY * self.stop_grace_s

    @classmethod
    def scaled(cls, scale: float, *, kill_after_s: float = math.inf) -> Timings:
        """Return the defaults multiplied by a factor. Some have a lower limit, such as 3 s for the lease.

        Args:
            scale: Factor in (0, 100], see `time_scale`.
            kill_after_s: Seconds from a request to stop until the platform kills the job. Ranks get at most half of
                them, because the hosts need the rest to end. The factor applies to these seconds too.
        """
        defaults: dict[str, float] = dataclasses.asdict(cls())
        defaults["stop_grace_s"] = min(defaults["stop_grace_s"], kill_after_s / 2)
        # No factor makes a time smaller than its lower limit. A default that ``kill_after_s`` has made smaller than the
        # limit is itself the limit, because a longer time would be too long for the platform.
        floors = {name: min(value, _FLOORS_S.get(name, 0.0)) for name, value in defaults.items()}
        return cls(**{name: max(value * scale, floors[name]) for name, value in defaults.items()})

    @classmethod
    def from_options(cls, options: LaunchOptions, env: Mapping[str, str], *, kill_after_s: float = math.inf) -> Timings:
        """Return the timings of a job.

        ``HETERO_TIME_SCALE`` multiplies every default. A timeout that differs from its default is not scaled.

        Args:
            options: Resolved options.
            env: The process environment.
            kill_after_s: See `scaled`.

        Raises:
            ConfigError: If the scale is not a number in (0, 100].
        """
        scaled = cls.scaled(time_scale(env), kill_after_s=kill_after_s)
        # A timeout that is stated with its default cannot be told from one that is not stated.
        timeouts = ("start_timeout_s", "data_timeout_s", "prepare_timeout_s")
        stated = {name: getattr(options, name) for name in timeouts if getattr(options, name) != getattr(cls(), name)}
        return dataclasses.replace(scaled, **stated)


def time_scale(env: Mapping[str, str]) -> float:
    """Return ``HETERO_TIME_SCALE``, the factor for every default, 1 by default.

    Raises:
        ConfigError: If the value is not a number in (0, 100].
    """
    text = env.get("HETERO_TIME_SCALE") or "1"
    # A text that is not a number becomes 0 here, which the check below rejects.
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale <= _MAX_SCALE:
        raise ConfigError(f"HETERO_TIME_SCALE is {text!r:.40}; expected a number in (0, {_MAX_SCALE:g}]")
    return scale
