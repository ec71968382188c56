"""What a rank's session reads of its loaders, and the options that the launcher sends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["SessionOptions", "Timer"]


class Timer(Protocol):
    """The part of a loader's step timer (`hetero.metrics.StepTimer`) that a session reads."""

    @property
    def name(self) -> str:
        """The loader's name. Several loaders may have the same name."""

    @property
    def is_waiting(self) -> bool:
        """Whether a step has begun whose batch has not arrived."""

    def summary(self) -> Any:
        """Return a record that has a method ``to_json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Options that the launcher sends to its ranks."""

    data_timeout_s: float
    prepare_timeout_s: float
    emulate_step_s: float | None
    purity_checks: int
    warmup_steps: int
    max_batch_bytes: int
    stop_grace_s: float = 50.0
    """Seconds from a request to stop to the kill of ranks that have not ended."""
    data_service: str = ""
    """What data hosts run: ``grpc`` (hetero's data plane) or ``tf`` (tf.data.service). Empty without data hosts."""
