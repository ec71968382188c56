"""``hetero plan``: say which machines a job needs, or that data hosts do not pay."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero import config
from hetero.cli.arguments import Subparsers, add_list, numbers
from hetero.cli.html_file import check_page, write_page
from hetero.cli.output import say
from hetero.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from hetero.decide.planning.options import PlanOptions

__all__ = ["add"]

_FLAGS = {
    "num_ranks": "--ranks",
    "num_steps": "--steps",
    "max_hours": "--max-hours",
    "max_usd_per_1k_steps": "--max-usd-per-1k-steps",
    "endpoints_per_host": "--endpoints-per-host",
}
"""Option of the command line for each field of `PlanOptions` that may be out of range."""


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("plan", allow_abbrev=False, help="say which machines a job needs, and what they cost")
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="profile.json or report.json, or its folder")
    add_list(
        parser,
        "--menu",
        "TYPE",
        "instance type that may become data hosts. Repeat for each type. Default: all priced types without "
        "accelerators, except burstable and flex types",
    )
    parser.add_argument("--baseline", metavar="TYPE:COUNT", help="the trainer hosts. Default: those of the profile")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of all trainer hosts. Default: as in the profile")
    parser.add_argument(
        "--goal", choices=("cost", "time"), default="cost", help="lowest cost per step, or shortest step. Default: cost"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="steps of the whole job, for --max-hours")
    parser.add_argument("--max-hours", type=float, metavar="HOURS", help="longest time of the whole job")
    parser.add_argument("--max-usd-per-1k-steps", type=float, metavar="USD", help="highest cost of 1,000 steps")
    add_list(parser, "--spot", "TYPE=USD", "spot price of a data host. Repeat for each type")
    parser.add_argument(
        "--endpoints-per-host", type=int, metavar="N", help="endpoints per data host. Default: one per vCPU"
    )
    add_list(
        parser,
        "--vcpu-speed",
        "TYPE=RATIO",
        "speed of a vCPU of this type, compared with the profiled type. Repeat for each type",
    )
    config.add_price_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help='also write the plan as an HTML page, with a plot if "hetero[plots]" is installed',
    )
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Make the plan, and write it as text or JSON, and as a page if ``--html`` is given."""
    from hetero.decide.planning.plan import make_plan
    from hetero.decide.planning.plan_page import plan_page
    from hetero.decide.planning.plan_text import plan_text
    from hetero.decide.profile import load_any_profile
    from hetero.documents.records import json_text

    check_page(namespace.html, (namespace.profile,))
    options = _options(namespace)
    catalogue = config.resolve_prices(namespace).catalogue()
    plan = make_plan(load_any_profile(namespace.profile, catalogue), catalogue, options)
    if namespace.html is not None:
        write_page(namespace.html, plan_page(plan))
    say(json_text(plan) if namespace.json else plan_text(plan))
    return int(ExitCode.OK)


def _options(namespace: argparse.Namespace) -> PlanOptions:
    """Return the options of the plan. Messages name the options of the command line.

    Raises:
        ConfigError: If an option is malformed, out of range, or has no effect.
    """
    from hetero.decide.planning.options import MAX_VCPU_SPEED, MIN_VCPU_SPEED, PlanOptions, WrongOption
    from hetero.pricing.catalog import MAX_HOURLY_USD

    if namespace.max_hours is not None and namespace.steps is None:
        raise ConfigError(
            "--max-hours is given without --steps; also give the number of steps of the whole job (--steps N)"
        )
    if namespace.steps is not None and namespace.max_hours is None:
        raise ConfigError(
            "--steps is given without --max-hours, so nothing uses it; also give --max-hours HOURS, or leave it out"
        )
    trainer_type, num_hosts = _baseline(namespace.baseline)
    speeds = numbers("--vcpu-speed", namespace.vcpu_speed, "RATIO", above=MIN_VCPU_SPEED, most=MAX_VCPU_SPEED)
    values: dict[str, Any] = {
        "menu": tuple(namespace.menu),
        "trainer_type": trainer_type,
        "num_trainer_hosts": num_hosts,
        "num_ranks": namespace.ranks,
        "goal": namespace.goal,
        "num_steps": namespace.steps,
        "max_hours": namespace.max_hours,
        "max_usd_per_1k_steps": namespace.max_usd_per_1k_steps,
        "spot_usd": numbers("--spot", namespace.spot, "USD", above=0, most=MAX_HOURLY_USD),
        "endpoints_per_host": namespace.endpoints_per_host,
        "vcpu_speeds": speeds,
    }
    try:
        return PlanOptions(**values)
    except ConfigError as error:
        if not isinstance(error.record, WrongOption):
            raise
        # The record names a field of `PlanOptions`, and the user knows the option of the command line.
        flag = _FLAGS.get(error.record.name, error.record.name)
        raise ConfigError(dataclasses.replace(error.record, name=flag)) from None


def _baseline(text: str | None) -> tuple[str, int | None]:
    """Return type and number of hosts in ``TYPE:COUNT``. Without a text: an empty type, and None for the number."""
    if text is None:
        return "", None
    name, _, count = text.partition(":")
    if not name or not count.isdecimal() or not 0 < int(count) <= 100_000:
        raise ConfigError(f"--baseline {text!r}: expected TYPE:COUNT, for example ml.p3.2xlarge:1")
    return name, int(count)
