"""``hetero certs``: make the certificates of a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero.cli.arguments import Subparsers, add_list, whole_number
from hetero.cli.output import say
from hetero.documents.text import counted
from hetero.errors import ExitCode

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("certs", allow_abbrev=False, help="make the certificates of a job for --tls-dir")
    parser.add_argument("directory", type=Path, metavar="DIR", help="folder for the certificates")
    add_list(parser, "--host", "NAME", "name of a host; repeat for each host")
    parser.add_argument(
        "--cluster-file",
        type=Path,
        metavar="FILE",
        help="description of a cluster; all its hosts get certificates",
    )
    parser.add_argument(
        "--days", default="30", metavar="N", help="days until the certificates expire, 1 to 825. Default: 30."
    )
    parser.add_argument(
        "--keep-ca-key", action="store_true", help="also write ca.key, which can sign certificates for more hosts"
    )
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Make certificates for the hosts that the command line names, and for the hosts of the cluster file."""
    from hetero.cluster import read_host_names
    from hetero.wire.certificates import make_certificates

    hosts = list(namespace.host)
    if namespace.cluster_file is not None:
        hosts += read_host_names(namespace.cluster_file)
    make_certificates(
        namespace.directory,
        hosts,
        days=whole_number("--days", namespace.days),
        keep_authority_key=namespace.keep_ca_key,
    )
    num_hosts = counted(len(hosts), "host")
    say(f"wrote certificates of {num_hosts} to {namespace.directory}; they expire in {namespace.days} days\n")
    return int(ExitCode.OK)
