"""``hetero check``: find mistakes in the request for a SageMaker training job."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero.cli.arguments import Subparsers
from hetero.cli.output import say

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="find mistakes in a SageMaker training job before it starts",
        description="Check the request of a SageMaker training job (CreateTrainingJob) for mistakes that cost money.",
        epilog="exit status: 0 no errors (there may be warnings), 1 errors, 2 the request cannot be read",
    )
    parser.add_argument(
        "request", type=Path, metavar="REQUEST.json", help="request, or output of describe-training-job"
    )
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from hetero.sagemaker import check_request, findings_json, findings_text, read_request

    findings = check_request(read_request(namespace.request))
    say((findings_json(findings) if namespace.json else findings_text(findings)) + "\n")
    return int(any(finding.severity == "error" for finding in findings))
