"""The phases of the controller, its decisions, and its inputs other than steps."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Action", "Conditions", "Decision", "Phase"]


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
    """The state of the host and of the job when `Controller.observe` is called."""

    num_used: int
    """Endpoints of this host that ranks use."""
    num_running: int
    """Endpoint processes of this host, without removed ones that have answered their requests."""
    num_slots: int
    """Batches that all endpoints of the job, on all hosts, compute at the same time."""


class Phase(enum.Enum):
    """What the controller is doing.

    Transitions::

        STARTING   --ranks use the endpoints, and removed ones have ended--> MEASURING
        STARTING   --no rank uses the added endpoints--> SETTLED, removes them
        STARTING   --the memory of this host is too small for more endpoints--> SETTLED
        MEASURING  --another number may be better--> STARTING, adds or removes endpoints
        MEASURING  --otherwise--> SETTLED, with the best number
        SETTLED    --conditions have changed--> STARTING, removes all endpoints
        any        --steps of another loader are observed--> STARTING, removes all endpoints

    The first measurement of a search is the one without endpoints.
    """

    STARTING = "starting"
    MEASURING = "measuring"
    SETTLED = "settled"
