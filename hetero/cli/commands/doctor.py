"""``hetero doctor``: find what would make a job fail on this host."""

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
        help="find what would make a job fail on this host",
        description="Examine this host before or during a job, or a machine without a cluster. The checks concern "
        "versions, names and ports of all hosts, proxies, token, signals, limits, disk and leftovers. The command "
        "accepts the options of hetero launch and changes nothing.",
        epilog="exit status: 0 no error (there may be warnings), 1 a job would fail on this host, "
        "2 the command line or a configuration value is wrong",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object with details instead of lines")
    config.add_launch_arguments(parser)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Examine this host, and write the diagnoses. Return 1 if one of them is an error."""
    from hetero import doctor
    from hetero.cluster import find_platform

    # A script is a required option of a launcher, but the doctor needs none.
    environment = {"HETERO_SCRIPT": "-", **os.environ}
    parameters = find_platform(os.environ, name=namespace.platform).parameters()
    options = config.resolve_options(namespace, environment, parameters)
    diagnoses = doctor.examine(doctor.take_snapshot(options, os.environ))
    if namespace.json:
        say(json.dumps(doctor.to_json(diagnoses), indent=2) + "\n")
    else:
        say(doctor.render_text(diagnoses))
    return int(any(diagnosis.level is doctor.Level.ERROR for each in diagnoses.values() for diagnosis in each))
