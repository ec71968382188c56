"""What a job measures: steps of its loaders and resources of its hosts."""

from __future__ import annotations

from hetero.metrics.hosts import HostSampler, HostUsage
from hetero.metrics.steps import DEFAULT_WARMUP_STEPS, StepSummary, StepTimer

__all__ = ["DEFAULT_WARMUP_STEPS", "HostSampler", "HostUsage", "StepSummary", "StepTimer"]
