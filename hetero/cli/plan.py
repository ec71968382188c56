"""``hetero plan``: say which machines a job needs, or that data hosts do not pay."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.cli.output import say
from hetero.errors import ConfigError, ExitCode
from hetero.system.documents import write_text

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("plan", allow_abbrev=False, help="say which machines a job needs, and what they cost")
    parser.add_argument("profile", type=Path, metavar="PROFILE", help="profile.json or report.json, or its folder")
    parser.add_argument(
        "--menu",
        action="append",
        default=[],
        metavar="TYPE",
        help="instance type that may become data hosts. Repeat for each type. Default: all priced types without "
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
    parser.add_argument(
        "--spot",
        action="append",
        default=[],
        metavar="TYPE=USD",
        help="spot price of a data host. Repeat for each type",
    )
    parser.add_argument(
        "--endpoints-per-host", type=int, metavar="N", help="endpoints per data host. Default: one per vCPU"
    )
    parser.add_argument(
        "--vcpu-speed",
        action="append",
        default=[],
        metavar="TYPE=RATIO",
        help="speed of a vCPU of this type, compared with the profiled type. Repeat for each type",
    )
    config.add_price_arguments(parser)
    parser.add_argument("--json", action="store_true", help="write JSON instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the plan as an HTML page")
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from hetero.planning import PlanOptions, make_plan
    from hetero.planning.plan_page import plan_page
    from hetero.planning.plan_text import plan_text
    from hetero.pricing import Catalogue
    from hetero.report.profile import load_any_profile

    trainer_type, num_hosts = _baseline(namespace.baseline)
    options = PlanOptions(
        menu=tuple(namespace.menu),
        trainer_type=trainer_type,
        num_trainer_hosts=num_hosts,
        num_ranks=namespace.ranks,
        goal=namespace.goal,
        num_steps=namespace.steps,
        max_hours=namespace.max_hours,
        max_usd_per_1k_steps=namespace.max_usd_per_1k_steps,
        spot_usd=_numbers("--spot", "USD", namespace.spot, above=0, maximum=1000),
        endpoints_per_host=namespace.endpoints_per_host,
        vcpu_speeds=_numbers("--vcpu-speed", "RATIO", namespace.vcpu_speed, above=0.001, maximum=100),
    )
    catalogue = Catalogue.load(
        profile=namespace.price_profile,
        region=namespace.region,
        price_file=namespace.price_file,
        overrides=tuple(namespace.price or ()),
    )
    plan = make_plan(load_any_profile(namespace.profile, catalogue), catalogue, options)
    if namespace.html is not None:
        _write(namespace.html, plan_page(plan))
    say(json.dumps(plan.to_json(), indent=2, allow_nan=False) + "\n" if namespace.json else plan_text(plan))
    return int(ExitCode.OK)


def _write(path: Path, page: str) -> None:
    try:
        write_text(path, page)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; give another file to --html") from error


def _baseline(text: str | None) -> tuple[str, int | None]:
    """Return type and number of hosts in ``TYPE:COUNT``."""
    if text is None:
        return "", None
    name, _, count = text.partition(":")
    if not name or not count.isdecimal() or not 0 < int(count) <= 100_000:
        raise ConfigError(f"--baseline {text!r}: expected TYPE:COUNT, for example ml.p3.2xlarge:1")
    return name, int(count)


def _numbers(flag: str, unit: str, texts: Sequence[str], *, above: float, maximum: float) -> dict[str, float]:
    """Return the numbers in texts of the form ``TYPE=NUMBER``."""
    found = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not name or not above < value <= maximum:
            raise ConfigError(
                f"{flag} {text!r}: expected TYPE={unit} with a number above {above:g} and at most {maximum:g}"
            )
        found[name] = value
    return found
