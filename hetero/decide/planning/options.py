"""What the user asks of a plan (`PlanOptions`), with the bounds of each option."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero.config import LaunchOptions
from hetero.errors import ConfigError
from hetero.pricing.catalog import MAX_HOURLY_USD
from hetero.report.plan import GOALS

__all__ = ["MAX_VCPU_SPEED", "MIN_VCPU_SPEED", "PlanOptions", "WrongOption"]

MIN_VCPU_SPEED, MAX_VCPU_SPEED = 0.001, 100.0
"""Bounds of a relative speed. Both are far away from real processors."""
_ENDPOINTS_PER_HOST = LaunchOptions.__dataclass_fields__["endpoints_per_host"].metadata
"""Bounds of the launcher's option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongOption:
    """What `PlanOptions` found wrong. It is the ``record`` of the `ConfigError`."""

    name: str
    """Name of the field. The command line replaces it with its option."""
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.name} is {self.found}; expected {self.expected}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the user asks for.

    Raises:
        ConfigError: If a value has the wrong type or is out of range. Its ``record`` is then a `WrongOption`. Also if
            only one of `num_steps` and `max_hours` is given.
    """

    menu: tuple[str, ...] = ()
    """Instance types that may become data hosts. Empty means all priced types without accelerators."""
    trainer_type: str = ""
    """Type of the trainer hosts. Empty means the type in the profile."""
    num_trainer_hosts: int | None = None
    """None means the number in the profile."""
    num_ranks: int | None = None
    """Ranks of all trainer hosts together. None means as many per host as in the profile."""
    goal: str = "cost"
    """One of `GOALS`."""
    num_steps: int | None = None
    """Steps of the whole job, for `max_hours`."""
    max_hours: float | None = None
    """Longest time of the whole job. It needs `num_steps`."""
    max_usd_per_1k_steps: float | None = None
    spot_usd: Mapping[str, float] = field(default_factory=dict)
    """Spot prices by instance type in USD per hour."""
    endpoints_per_host: int | None = None
    """Endpoints per data host. None means one per vCPU, or more if they wait for storage."""
    vcpu_speeds: Mapping[str, float] = field(default_factory=dict)
    """Relative speed of a vCPU by instance type, compared with the type that the profile measured first. Above
    `MIN_VCPU_SPEED`, at most `MAX_VCPU_SPEED`."""

    def __post_init__(self) -> None:
        if self.goal not in GOALS:
            raise _wrong("goal", self.goal, f"one of {', '.join(GOALS)}")
        # Check the type here, because a caller in Python may pass anything. A number as menu was once a TypeError.
        menu: Any = self.menu
        trainer_type: Any = self.trainer_type
        if not isinstance(menu, (tuple, list)) or not all(isinstance(name, str) for name in menu):
            raise _wrong("menu", menu, "a list of instance types, such as ['ml.c5.9xlarge']")
        if not isinstance(trainer_type, str):
            raise _wrong("trainer_type", trainer_type, "an instance type, such as 'ml.p3.2xlarge'")
        for name in ("num_steps", "num_ranks", "num_trainer_hosts", "endpoints_per_host"):
            _check(name, getattr(self, name), is_whole=True)
        if self.endpoints_per_host is not None and self.endpoints_per_host > _ENDPOINTS_PER_HOST["high"]:
            raise _wrong(
                "endpoints_per_host", self.endpoints_per_host, f"at most {_ENDPOINTS_PER_HOST['high']}, as in a job"
            )
        for name in ("max_hours", "max_usd_per_1k_steps"):
            _check(name, getattr(self, name), is_whole=False)
        _check_by_type("spot_usd", self.spot_usd, low=0.0, high=MAX_HOURLY_USD, what="USD per hour")
        # Check the bounds here. A speed of 0 was once a ZeroDivisionError, and a speed of -1 gave a plan.
        _check_by_type("vcpu_speeds", self.vcpu_speeds, low=MIN_VCPU_SPEED, high=MAX_VCPU_SPEED, what="relative speed")
        if self.max_hours is not None and self.num_steps is None:
            raise ConfigError(
                "max_hours is given without num_steps; also give the number of steps of the whole job (--steps N)"
            )
        if self.num_steps is not None and self.max_hours is None:
            raise ConfigError(
                "num_steps is given without max_hours, so nothing uses it; also give the longest time of the whole job "
                "(--max-hours HOURS), or leave it out"
            )


def _check(name: str, value: Any, *, is_whole: bool) -> None:
    """Raise `ConfigError` unless a value is None or a finite number above 0, without decimals if ``is_whole``."""
    # True is a number in Python, but not an amount.
    is_number = isinstance(value, numbers.Integral if is_whole else numbers.Real) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise _wrong(name, value, "a number above 0 without decimals" if is_whole else "a number above 0")


def _check_by_type(name: str, values: Any, low: float, high: float, what: str) -> None:
    """Raise `ConfigError` unless a value is a dict from instance types to numbers above ``low`` and at most ``high``.

    Args:
        name: Name of the field.
        values: Its value.
        low: Largest number that is too small.
        high: Largest number that is allowed.
        what: What the numbers are, for the message.
    """
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise _wrong(name, values, f"a dict from instance type to {what}, such as {{'ml.c5.9xlarge': 1.2}}")
    for key, value in values.items():
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and low < value <= high):
            raise _wrong(f"{name}[{key!r}]", value, f"a number above {low:g} and at most {high:g}")


def _wrong(name: str, value: object, expected: str) -> ConfigError:
    return ConfigError(WrongOption(name=name, found=f"{value!r:.100}", expected=expected))
