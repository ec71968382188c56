"""``hetero certs``: make the certificates of a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero.cli.arguments import Subparsers, positive
from hetero.cli.output import say
from hetero.errors import ExitCode

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("certs", allow_abbrev=False, help="make the certificates of a job for --tls-dir")
    parser.add_argument("directory", type=Path, metavar="DIR", help="the folder to write them to")
    parser.add_argument("--host", action="append", default=[], metavar="NAME", help="a host; repeat for each")
    parser.add_argument("--cluster-file", type=Path, metavar="FILE", help="cluster, for all its hosts")
    parser.add_argument("--days", default="30", metavar="N", help="until they end, 1 to 825. Default: 30.")
    parser.add_argument(
        "--keep-ca-key", action="store_true", help="also write ca.key, with which more hosts can be let in"
    )
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from hetero.cluster import read_host_names
    from hetero.wire.certificates import make_certificates

    hosts = list(namespace.host)
    if namespace.cluster_file is not None:
        hosts += read_host_names(namespace.cluster_file)
    make_certificates(
        namespace.directory,
        hosts,
        days=positive("--days", namespace.days),
        keep_authority_key=namespace.keep_ca_key,
    )
    say(f"certificates of {len(hosts)} hosts for {namespace.days} days are in {namespace.directory}\n")
    return int(ExitCode.OK)
