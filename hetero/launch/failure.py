"""The failure file: the one text that the platform shows when a job failed."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from hetero.control.status import Cause
from hetero.logs import escape_line

__all__ = ["MAX_FAILURE_CHARS", "failure_text", "write_failure"]

logger = logging.getLogger(__name__)

MAX_FAILURE_CHARS = 1024
"""SageMaker shows as many characters as FailureReason."""


def failure_text(cause: Cause) -> str:
    """Return the text for ``cause``: its first line, then the end of its detail."""
    head = cause.first_line[:MAX_FAILURE_CHARS]
    room = MAX_FAILURE_CHARS - len(head) - 1
    # Consoles and terminals show this file: whatever a remote traceback holds, it stays text.
    detail = "\n".join(escape_line(line) for line in cause.detail.strip().split("\n"))
    if room < 20 or not detail:
        return head
    return f"{head}\n{detail if len(detail) <= room else '...' + detail[-(room - 3) :]}"


def write_failure(path: Path, cause: Cause) -> None:
    """Write the failure file; where that fails, say so on stderr and go on."""
    text = failure_text(cause)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        logger.error("could not write the failure file %s (%s); it would say: %s", path, error.strerror, text)
        with contextlib.suppress(OSError):
            os.write(2, f"HETERO_FAILURE {cause.first_line}\n".encode())
