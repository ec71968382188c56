"""Writes, shows and compares report files. The command line and the launcher call these functions.

This is a separate module because the others use no files, except to read a report.
"""

from __future__ import annotations

import json
from pathlib import Path

from hetero.documents.files import write_text
from hetero.report.compare import compare
from hetero.report.markdown import render_comparison, render_report
from hetero.report.model import REPORT_FILE_NAME, Report, load_report

__all__ = ["MARKDOWN_FILE_NAME", "compare_files", "show_file", "write_report"]

MARKDOWN_FILE_NAME = "report.md"


def write_report(report: Report, directory: str | Path) -> tuple[Path, Path]:
    """Write ``report.json`` and ``report.md`` into an existing directory.

    Returns:
        The two paths.
    """
    directory = Path(directory)
    json_path, markdown_path = directory / REPORT_FILE_NAME, directory / MARKDOWN_FILE_NAME
    # JSON has no NaN, so other programs could not read the file.
    text = json.dumps(report.to_json(), indent=2, allow_nan=False)
    write_text(json_path, text + "\n")
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


def compare_files(baseline: str | Path, candidate: str | Path) -> str:
    """Return the Markdown that compares two reports.

    Args:
        baseline: ``report.json``, or the directory that contains it. Usually of the homogeneous run.
        candidate: The same for the other run. Usually of the heterogeneous run.

    Raises:
        ConfigError: If a report is missing, malformed or has no measured step.
    """
    return render_comparison(compare(load_report(baseline), load_report(candidate)))
