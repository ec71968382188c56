"""The HTML file that ``--html`` names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetero.documents.files import write_text
from hetero.errors import ConfigError

__all__ = ["check_page", "write_page"]


def check_page(html: Path | None, inputs: Sequence[Path]) -> None:
    """Reject an HTML file that would replace an input of the command.

    Args:
        html: Value of ``--html``.
        inputs: Files that the command reads, or their folders.

    Raises:
        ConfigError: If the file is one of the inputs.
    """
    from hetero.metrics.profile.profile import PROFILE_FILE_NAME
    from hetero.report.model import REPORT_FILE_NAME

    # An input may be a file, or the folder of a report or a profile.
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
