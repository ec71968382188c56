"""What a rank and its loaders tell each other and get told when they meet their launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["SessionOptions", "Timer"]


class Timer(Protocol):
    """What a session reads of a loader's step timer (`hetero.metrics.StepTimer`)."""

    @property
    def name(self) -> str:
        """The loader's name; several may have the same."""

    @property
    def is_waiting(self) -> bool:
        """Whether a step has begun whose batch is not there."""

    def summary(self) -> Any:
        """Return a record with ``to_json``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What the launcher tells its ranks."""

    data_timeout_s: float
    prepare_timeout_s: float
    emulate_step_s: float | None
    purity_checks: int
    warmup_steps: int
    max_batch_bytes: int
    stop_grace_s: float = 50.0
    """From a request to stop to the kill of ranks that have not ended."""
    data_service: str = ""
    """What data hosts run: ``grpc``, the data plane of hetero, or ``tf``, tf.data.service; empty: there are none."""
