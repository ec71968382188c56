"""The inputs of the controller beside the steps, and its decisions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Action", "Conditions", "Decision"]


class Action(enum.Enum):
    """What a decision changes."""

    ADD = "add"
    REMOVE = "remove"
    SETTLE = "settle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision, and the figures that led to it."""

    action: Action
    step: int
    """Steps of the job so far."""
    before: int
    """Endpoints per trainer host until now."""
    endpoints: int
    """Endpoints per trainer host from now on."""
    reason: str

    @property
    def text(self) -> str:
        """The decision as one line."""
        if self.action is Action.SETTLE and self.before == self.endpoints:
            return f"step {self.step}: stays at {self.endpoints}, because {self.reason}"
        ending = ", and stays there" if self.action is Action.SETTLE else ""
        return f"step {self.step}: from {self.before} to {self.endpoints}{ending}, because {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The state of the host and of the job at the time of a call."""

    num_used: int
    """Endpoints of this host that ranks use."""
    num_running: int
    """Endpoint processes of this host, without removed ones that have answered their requests."""
    num_slots: int
    """Batches that all endpoints of the job, on all hosts, compute at the same time."""
    pressure: float | None = None
    """CPU pressure of this host in [0, 1], see `hetero.system.cpu_pressure`. None if it is not known."""
