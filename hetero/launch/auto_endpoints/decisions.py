"""The phases of the controller, its inputs beside the steps, and its decisions."""

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
    """The state of the host and of the job at the time of a call."""

    num_used: int
    """Endpoints of this host that ranks use."""
    num_running: int
    """Endpoint processes of this host, without removed ones that have answered their requests."""
    num_slots: int
    """Batches that all endpoints of the job, on all hosts, compute at the same time."""
    pressure: float | None = None
    """CPU pressure of this host in [0, 1], see `hetero.system.cpu_pressure`. None if it is not known."""


class Phase(enum.Enum):
    """What the controller is doing.

    Transitions::

        WARMUP    --some steps--> BASELINE
        BASELINE  --steps do not wait for data--> SETTLED
        BASELINE  --steps wait--> STARTING, adds an endpoint
        STARTING  --ranks use the added endpoints--> TRIAL
        STARTING  --no rank uses them--> SETTLED, removes them
        TRIAL     --steps are longer--> RECHECK, removes the added endpoints
        TRIAL     --steps still wait, and more endpoints are possible--> STARTING, adds endpoints
        TRIAL     --otherwise, or steps are not shorter and CPUs are short--> CHECK
        RECHECK   --more endpoints are possible--> STARTING, adds endpoints
        RECHECK   --otherwise--> CHECK, or SETTLED without endpoints
        CHECK     --steps are shorter than in BASELINE, but still wait--> STARTING, adds endpoints
        CHECK     --steps are shorter, and more endpoints are not possible or not needed--> SETTLED
        CHECK     --steps are not surely shorter, and still wait--> SETTLED, which checks again later
        CHECK     --otherwise--> REVIEW, removes all endpoints
        STARTING  --this host has no memory for any of the added endpoints--> CHECK, or SETTLED without endpoints
        REVIEW    --steps are longer without them--> SETTLED, adds them again
        REVIEW    --otherwise--> SETTLED
        SETTLED   --the later check finds that steps are not shorter--> SETTLED, removes all endpoints
        SETTLED   --the step time has changed much--> WARMUP, removes all endpoints
        any       --steps of another loader are observed--> WARMUP, removes all endpoints
    """

    WARMUP = "warm-up"
    BASELINE = "baseline"
    STARTING = "starting"
    TRIAL = "trial"
    RECHECK = "recheck"
    CHECK = "check"
    REVIEW = "review"
    SETTLED = "settled"
