"""``hetero launch``: run this host's part of a job."""

from __future__ import annotations

import argparse
import os
import socket

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.cli.parent import bind_to_parent
from hetero.errors import HeteroError

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("launch", allow_abbrev=False, help="run this host's part of a job")
    config.add_launch_arguments(parser)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    bind_to_parent()
    from hetero.cluster import base_dir, read_cluster
    from hetero.launch.failure import write_failure
    from hetero.launch.host import cause_of
    from hetero.launch.launcher import launch

    base = base_dir(os.environ)
    try:
        options = config.resolve_options(namespace, os.environ, base)
        cluster = read_cluster(
            env=os.environ, cluster_file=options.cluster_file, host=options.host, roles=options.roles
        )
        return launch(options, cluster, base_dir=base)
    except HeteroError as error:  # raised before this host's part began, so no other code writes the failure file
        if base.is_dir():
            write_failure(base / "output" / "failure", cause_of(error, socket.gethostname()))
        raise
