"""The failure file. The platform shows only this text when a job has failed."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hetero.control.status import MAX_SUMMARY_CHARS, Cause
from hetero.documents.text import escape_line
from hetero.errors import ExitCode
from hetero.system import logs

__all__ = [
    "detail_lines",
    "failure_text",
    "reserved_space",
    "shown_detail",
    "stated_code",
    "write_failure",
]

logger = logging.getLogger(__name__)

_MAX_SHOWN_LINES = 40
_RESERVE_NAME = ".hetero-reserve"
# A character takes at most 4 bytes.
_RESERVE_BYTES = 4 * MAX_SUMMARY_CHARS
_CODE = re.compile(r"\bHET-(\d\d)\b")
_FAILURES = frozenset(code.value for code in ExitCode if code)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def failure_text(cause: Cause) -> str:
    """Return the text of the failure file: the cause's first line, and the end of its detail."""
    head = cause.first_line[:MAX_SUMMARY_CHARS]
    # Platforms show only `MAX_SUMMARY_CHARS` characters. One of them is for the line break after the first line.
    room = MAX_SUMMARY_CHARS - len(head) - 1
    # Consoles and terminals show this file, so control characters in a remote traceback are escaped.
    detail = "\n".join(map(escape_line, detail_lines(cause)))
    # A few characters of the detail would say nothing.
    if room < 20 or not detail:
        return head
    if len(detail) > room:
        detail = "..." + detail[-(room - 3) :]
    return f"{head}\n{detail}"


def detail_lines(cause: Cause) -> list[str]:
    """Return the lines of a cause's detail, without a first line that repeats the end of its summary."""
    lines = cause.detail.strip().split("\n")
    return lines[1:] if cause.summary.endswith(lines[0].strip()) else lines


def shown_detail(cause: Cause, host: str) -> list[str]:
    """Return the lines that a host logs after a cause's first line.

    Only the host where the failure happened logs the detail. If a rank failed, this host refers to the rank's output,
    which already contains the detail. The other hosts refer to the log of this host.

    Args:
        cause: The root cause of the job's end.
        host: The host that logs it.
    """
    lines = detail_lines(cause)[-_MAX_SHOWN_LINES:]
    if not any(lines):
        return []
    if cause.host != host:
        lines = [f"see the log of {cause.host} for details"]
    elif cause.of_rank:
        lines = ["see the lines of that rank above for details"]
    return [f"    {line}" for line in lines]


def stated_code(text: str) -> int | None:
    """Return the first exit code of a failure that a text contains (``HET-31 ...``), or None.

    Args:
        text: The text of a failure file, or the part of it that a platform shows.
    """
    codes = (int(code) for code in _CODE.findall(text))
    return next((code for code in codes if code in _FAILURES), None)


@contextlib.contextmanager
def reserved_space(path: Path) -> Iterator[None]:
    """Reserve disk space for the failure file ``path``, because a job may fail when the disk is full.

    The space is reserved until the context ends. Nothing is reserved if the folder does not exist or the disk is
    already full.
    """
    reserve = path.with_name(_RESERVE_NAME)
    with contextlib.suppress(OSError):
        if path.parent.is_dir():
            # A killed run may have left this file, and the file may be a link. The reserve was once written through
            # such a link.
            reserve.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(reserve, flags, 0o600), "wb", buffering=0) as file:
                file.write(b"\0" * _RESERVE_BYTES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            reserve.unlink(missing_ok=True)


def write_failure(path: Path, cause: Cause) -> None:
    """Write the failure file. If that fails, log the error and the text, and print a ``HETERO_FAILURE`` line."""
    text = failure_text(cause)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(path, text)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            # Free the space that `reserved_space` holds. Then the text fits even onto a full disk (F26).
            path.with_name(_RESERVE_NAME).unlink(missing_ok=True)
            _write(path, text)
    except OSError as error:
        logger.error("could not write the failure file %s (%s); its text is: %s", path, error.strerror, text)
        logs.write_line(f"HETERO_FAILURE {cause.first_line}")


def _write(path: Path, text: str) -> None:
    """Write a text to a file. An existing file is overwritten in place, because this works even if the disk is full."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "replace"))
        # Remove the rest of a longer text of an earlier run.
        file.truncate()
        # Some file systems report only here that they are full.
        os.fsync(descriptor)
