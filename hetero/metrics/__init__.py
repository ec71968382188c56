"""Measurements of a job: steps of its loaders, skipped samples, and resources of its hosts."""

from __future__ import annotations

from hetero.metrics.hosts import HostSampler, HostUsage
from hetero.metrics.skips import SkippedSample
from hetero.metrics.steps import DEFAULT_WARMUP_STEPS, StepSummary, StepTimer

__all__ = ["DEFAULT_WARMUP_STEPS", "HostSampler", "HostUsage", "SkippedSample", "StepSummary", "StepTimer"]
