"""The phases of the search for a number of endpoints."""

from __future__ import annotations

import enum

__all__ = ["Phase"]


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
