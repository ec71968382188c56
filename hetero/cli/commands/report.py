"""``hetero report``: show one run, or compare two."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero.cli.arguments import Subparsers
from hetero.cli.html_file import check_page, write_page
from hetero.cli.output import say
from hetero.errors import ExitCode

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("report", allow_abbrev=False, help="show a run, or compare it with its baseline")
    parser.add_argument("baseline", type=Path, metavar="A", help="report.json or its folder: the run, or the baseline")
    parser.add_argument("candidate", type=Path, nargs="?", metavar="B", help="the run to compare with A")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help='also write an HTML page, with plots if "hetero[plots]" is installed'
    )
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Show a run, or compare it with its baseline. Write a page if ``--html`` is given."""
    from hetero.decide.pages.run_page import comparison_page, run_page
    from hetero.report.compare import compare
    from hetero.report.markdown import render_comparison, render_report
    from hetero.report.model import load_report

    check_page(namespace.html, [path for path in (namespace.baseline, namespace.candidate) if path is not None])
    report = load_report(namespace.baseline)
    comparison = None if namespace.candidate is None else compare(report, load_report(namespace.candidate))
    if namespace.html is not None:
        write_page(namespace.html, run_page(report) if comparison is None else comparison_page(comparison))
    say(render_report(report) if comparison is None else render_comparison(comparison))
    return int(ExitCode.OK)
