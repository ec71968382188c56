"""Jobs with endpoints."""

from __future__ import annotations

from tests.support.batch_path.fixtures import (
    job,
    tools,
)

__all__ = [
    "job",
    "tools",
]
