"""``hetero check``: find mistakes in a training script, or in the request for a SageMaker training job."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero.cli.arguments import Subparsers
from hetero.cli.output import complain, say
from hetero.system import extensions

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        allow_abbrev=False,
        help="find what would go wrong with a script, or with a SageMaker request, before a job starts",
        description=(
            "Run a training script for a short time as a rank whose batches come from data hosts, and report what "
            "would go wrong or differ there, each with its line and what to write. Or check the request of a SageMaker "
            "training job (CreateTrainingJob, a file that ends in .json) for mistakes that cost money."
        ),
        epilog=(
            "exit status: 0 nothing found (a request may have warnings), 1 something found, 2 the script or request "
            "cannot be read"
        ),
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT | REQUEST.json",
        help="path of the training script, or with -m the name of a module; all arguments after it go to the script. "
        "Or a request, or the output of describe-training-job",
    )
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="how long the script runs at most, 30 seconds by default"
    )
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Check a script, or the request of a training job if the name ends in .json. Return 1 if something was found."""
    if namespace.script.endswith(".json") and not namespace.module:
        # A platform's package checks its requests. Find it by name, because the command line imports no platform.
        check_request = extensions.find(extensions.REQUESTS, "check")
        text, code = check_request(Path(namespace.script), as_json=namespace.json)
        say(f"{text}\n")
        return int(code)
    from hetero.script_check import DEFAULT_SECONDS, check_script, findings_json, findings_text

    seconds = DEFAULT_SECONDS if namespace.seconds is None else namespace.seconds
    findings, num_batches, printed = check_script(
        namespace.script, namespace.script_args, is_module=namespace.module, seconds=seconds
    )
    say((findings_json(findings) if namespace.json else findings_text(findings, num_batches)) + "\n")
    # What the script has printed may show why it raised an exception.
    if any("the script raises" in finding.what for finding in findings):
        complain(f"the end of what the script has printed:\n{printed}\n")
    return int(bool(findings))
