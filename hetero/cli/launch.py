"""``hetero launch``: run this host's part of a job."""

from __future__ import annotations

import argparse
import os
import socket

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.errors import HeteroError
from hetero.system.process import bind_to_parent

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("launch", allow_abbrev=False, help="run this host's part of a job")
    config.add_launch_arguments(parser)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    bind_to_parent()
    from hetero.cluster import find_platform
    from hetero.launch.failure import write_failure
    from hetero.launch.host import cause_of
    from hetero.launch.launcher import launch

    platform = find_platform(os.environ, name=namespace.platform)
    try:
        options = config.resolve_options(namespace, os.environ, platform.parameters())
        platform = find_platform(os.environ, cluster_file=options.cluster_file, name=options.platform)
        cluster = platform.read_cluster(host=options.host, roles=options.roles)
        return launch(options, cluster, platform=platform)
    except HeteroError as error:  # raised before this host's part began, so no other code writes the failure file
        if platform.folders.root.is_dir():
            write_failure(platform.folders.failure, cause_of(error, socket.gethostname()))
        raise
