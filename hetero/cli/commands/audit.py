"""``hetero audit``: check whether two runs trained on the same data."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero.cli.arguments import Subparsers
from hetero.cli.output import say

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "audit",
        allow_abbrev=False,
        help="check whether two runs trained on the same data",
        description="Compare the ledgers that two runs wrote with --audit, and show the first difference.",
        epilog="exit status: 0 the same data, 1 different data or a damaged ledger, 2 the ledgers cannot be compared",
    )
    for name in ("A", "B"):
        help_text = "a run's folder, or one of its ledgers"
        parser.add_argument(name.lower(), type=Path, metavar=name, help=help_text)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from hetero.audit import commands

    is_same, text = commands.audit_paths(namespace.a, namespace.b)
    say(f"{text}\n")
    return int(not is_same)
