"""Output of the commands, which may go to a closed stream or a closed pipe, and their HTML pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hetero.errors import ConfigError
from hetero.system.documents import write_text

__all__ = ["check_page", "complain", "discard", "say", "write_page"]


def say(text: str) -> None:
    """Write to standard output and flush it, unless it is closed.

    Without the flush, a failed write would appear only when the interpreter exits, and give status 120.

    Raises:
        BrokenPipeError: If the reader has closed the pipe, or if the write fails for another reason, which is then
            written to standard error.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(1)
        complain(f"hetero: cannot write to standard output: {error.strerror}\n")
        raise BrokenPipeError from error


def complain(text: str) -> None:
    """Write to standard error. Ignore a failed write, because it must not change the exit code."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(2)


def discard(descriptor: int) -> None:
    """Redirect a descriptor to the null device, which drops what is still buffered for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def check_page(html: Path | None, inputs: Sequence[Path]) -> None:
    """Reject an HTML file that would replace an input of the command.

    Args:
        html: Value of ``--html``.
        inputs: Files that the command reads, or their folders.

    Raises:
        ConfigError: If the file is one of them.
    """
    from hetero.planning.profile import PROFILE_FILE_NAME
    from hetero.report.model import REPORT_FILE_NAME

    files = [path / name for path in inputs for name in ("", PROFILE_FILE_NAME, REPORT_FILE_NAME)]
    if html is not None and html.is_file() and any(path.is_file() and html.samefile(path) for path in files):
        raise ConfigError(f"--html {html} is a file that the command reads; give another file to --html")


def write_page(path: Path, page: str) -> None:
    """Write an HTML page.

    Raises:
        ConfigError: If the file cannot be written.
    """
    try:
        write_text(path, page)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; give another file to --html") from error
