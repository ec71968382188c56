"""Jobs with endpoints, and endpoints in this process or of a test's own making."""

from __future__ import annotations

from tests.support.batch_path.fixtures import (
    asked,
    job,
    job_of_module,
    link_to,
    shared_job,
    stage,
    start_endpoint,
    tools,
)

__all__ = [
    "asked",
    "job",
    "job_of_module",
    "link_to",
    "shared_job",
    "stage",
    "start_endpoint",
    "tools",
]
