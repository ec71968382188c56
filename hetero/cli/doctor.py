"""``hetero doctor``: find out what would go wrong on this host."""

from __future__ import annotations

import argparse
import json
import os

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.cli.output import say

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="say what would go wrong on this host",
        description="Examine this host before a job, beside one, or on a machine that belongs to no cluster: versions, "
        "names and ports of all hosts, proxies, token, signals, limits, disk, leftovers. Takes what hetero launch "
        "takes, and changes nothing.",
        epilog="exit status: 0 no error (there may be warnings), 1 a job would fail of what was found, "
        "2 the command line or a configuration value is wrong",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with details instead of lines")
    config.add_launch_arguments(parser)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from hetero import doctor
    from hetero.cluster import base_dir

    environment = {"HETERO_SCRIPT": "-", **os.environ}  # the option is required, but the doctor needs no script
    options = config.resolve_options(namespace, environment, base_dir(os.environ))
    findings = doctor.examine(doctor.look_around(options, os.environ))
    if namespace.json:
        say(json.dumps(doctor.to_json(findings), indent=2) + "\n")
    else:
        say(doctor.render_text(findings))
    return int(any(finding.level is doctor.Level.ERROR for each in findings.values() for finding in each))
