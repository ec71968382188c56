"""Jobs with endpoints, and deliveries alone."""

from __future__ import annotations

from tests.support.batch_path.fixtures import (
    job,
    serve,
    streams,
    tools,
)

__all__ = [
    "job",
    "serve",
    "streams",
    "tools",
]
