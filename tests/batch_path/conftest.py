"""Jobs with endpoints."""

from __future__ import annotations

from tests.support.batch_path.fixtures import (
    job,
    job_of_module,
    shared_job,
    tools,
)

__all__ = [
    "job",
    "job_of_module",
    "shared_job",
    "tools",
]
