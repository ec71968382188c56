"""Writes and shows report files. The command line and the launcher call these functions.

The other modules of this folder use no files, except to read a report or a plan.
"""

from __future__ import annotations

from pathlib import Path

from hetero.documents.files import write_text
from hetero.documents.records import json_text
from hetero.report.markdown import render_report
from hetero.report.model import REPORT_FILE_NAME, Report, load_report

__all__ = ["MARKDOWN_FILE_NAME", "show_file", "write_report"]

MARKDOWN_FILE_NAME = "report.md"


def write_report(report: Report, directory: str | Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.md`` into an existing directory.

    Returns:
        The two paths.
    """
    directory = Path(directory)
    json_path, markdown_path = directory / REPORT_FILE_NAME, directory / MARKDOWN_FILE_NAME
    write_text(json_path, json_text(report))
    write_text(markdown_path, render_report(report))
    return json_path, markdown_path


def show_file(path: str | Path) -> str:
    """Return the Markdown of one report.

    Args:
        path: ``report.json``, or the directory that contains it.

    Raises:
        ConfigError: If the report is missing or malformed. The message names the file and the key path.
    """
    return render_report(load_report(path))
