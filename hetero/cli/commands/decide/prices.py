"""``hetero prices``: show the catalogue of instance types and refresh its prices."""

from __future__ import annotations

import argparse
from pathlib import Path

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.cli.output import say
from hetero.errors import ExitCode

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("prices", allow_abbrev=False, help="show or refresh the prices of instance types")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, help_text in (("list", "list all types"), ("show", "show one type")):
        action = actions.add_parser(name, allow_abbrev=False, help=help_text)
        if name == "show":
            action.add_argument("instance_type", metavar="TYPE")
        config.add_price_arguments(action)
        action.set_defaults(run=_run, action=name)
    refresh = actions.add_parser(
        "refresh",
        allow_abbrev=False,
        help="write AWS's current prices into a price file",
        description="Ask AWS for its on-demand prices of training, with boto3 and your credentials. Write them into a "
        "price file. Overrides in the file are kept.",
    )
    refresh.add_argument(
        "--region", default="us-east-1", metavar="NAME", help="AWS region of the prices. Default: us-east-1."
    )
    refresh.add_argument(
        "--output",
        type=Path,
        default=Path("prices.json"),
        metavar="FILE",
        help="JSON price file to write. Default: prices.json.",
    )
    refresh.set_defaults(run=_refresh)


def _run(namespace: argparse.Namespace) -> int:
    """List all instance types, or show one of them."""
    from hetero import pricing

    catalogue = config.resolve_prices(namespace).catalogue()
    is_list = namespace.action == "list"
    say(pricing.list_text(catalogue) if is_list else pricing.show_text(catalogue, namespace.instance_type))
    return int(ExitCode.OK)


def _refresh(namespace: argparse.Namespace) -> int:
    """Fetch the current prices of a region, and write them into a price file."""
    from hetero.pricing.price_service import fetch_prices, refresh_file

    say(refresh_file(namespace.output, fetch_prices(namespace.region)) + "\n")
    return int(ExitCode.OK)
