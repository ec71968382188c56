"""``hetero launch``: run this host's part of a job."""

from __future__ import annotations

import argparse
import os
import socket

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.errors import ExitCode, HeteroError
from hetero.system import extensions
from hetero.system.process import bind_to_parent

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("launch", allow_abbrev=False, help="run this host's part of a job")
    config.add_launch_arguments(parser)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Find the job that this host belongs to, and run this host's part of it. With a driver, run the whole job."""
    # If `hetero simulate` or another program of hetero started this launcher, the launcher ends with that program.
    bind_to_parent()
    from hetero.cluster import find_platform
    from hetero.launch.failure import write_failure
    from hetero.launch.host import cause_of
    from hetero.launch.joining import join_job, register
    from hetero.launch.launcher import launch
    from hetero.system.logs import write_line

    run_job = extensions.find(extensions.DRIVERS, namespace.platform or os.environ.get("HETERO_PLATFORM") or "")
    # On a platform with a driver, such as Ray, this command runs the whole job.
    if run_job is not None:
        return int(run_job(config.resolve_options(namespace, os.environ, parameters=None)))
    # The parameters of a platform are a source of options, so find the platform first.
    platform = find_platform(os.environ, name=namespace.platform)
    try:
        options = config.resolve_options(namespace, os.environ, platform.parameters())
        # The options may name another platform, or a cluster file. So find the platform again. A cluster file lists all
        # hosts, so this host need not register.
        platform = find_platform(os.environ, cluster_file=options.cluster_file, name=options.platform)
        registration = None if options.cluster_file else platform.registration()
        # On a platform where hosts know only the main host, register there to learn the other hosts. A host that joins
        # a job that runs (`join`) asks a host of that job instead.
        if registration is not None and options.join is None:
            platform = register(registration, options, platform, os.environ)
        if options.join is None:
            # After a registration, the description of the cluster says which host this is. Otherwise the option may.
            host = None if registration is not None else options.host
            cluster = platform.read_cluster(host=host, roles=options.roles)
        else:
            joined = join_job(options, platform, os.environ)
            if joined is None:
                write_line(f"the job at {options.join} is about to end, so this host does not join it")
                return ExitCode.OK
            platform, cluster = joined
        return launch(options, cluster, platform=platform)
    # Write the failure file here, because no other code writes it before this host's part has begun. Without the
    # platform's folder, this host is outside of a platform, and nothing would read the file.
    except HeteroError as error:
        if platform.folders.root.is_dir():
            write_failure(platform.folders.failure, cause_of(error, socket.gethostname()))
        raise
