"""``hetero render``: write the script or manifest that starts a job on a platform."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetero import config
from hetero.cli.arguments import Subparsers, add_list
from hetero.cli.output import say
from hetero.cluster import Platform, rendered_platforms
from hetero.errors import ConfigError, ExitCode
from hetero.system.scripts import script_label

if TYPE_CHECKING:
    from hetero.cluster.groups import StatedGroup

__all__ = ["add"]

_JOB_SETTINGS = ("queue", "token")
"""Settings that a job has only once, not for each group."""


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "render",
        allow_abbrev=False,
        help="write the script or manifest that starts a job on Slurm, Kubernetes or Vertex AI",
        description="Writes the script or manifest that starts a job on a platform, with comments. Submits nothing.",
    )
    platforms = parser.add_subparsers(title="platforms", dest="rendered", required=True, metavar="PLATFORM")
    for platform in rendered_platforms():
        about = platform.renders
        # The --spot of this command replaces that of hetero launch, which needs a price. The conflict handler allows
        # the replacement.
        own = platforms.add_parser(
            platform.name, allow_abbrev=False, conflict_handler="resolve", help=about, description=f"Writes {about}."
        )
        _add_arguments(own, platform)
        own.set_defaults(run=functools.partial(_run, platform))


def _add_arguments(parser: argparse.ArgumentParser, platform: type[Platform]) -> None:
    """Add the options of the command for one platform."""
    add_list(
        parser,
        "--group",
        "NAME=TYPE:COUNT",
        "Group with what each of its hosts has and their number, for example trainer=GPU:8:1 or data=CPU:32:2. "
        "Vertex AI takes machine types. Repeat for each group.",
    )
    parser.add_argument("--name", default="", help="Name of the job. Default: that of the script.")
    parser.add_argument("--hours", type=float, metavar="N", help="Time limit. Default: the platform's.")
    parser.add_argument("--output", type=Path, metavar="FILE", help="File to write. Default: standard output.")
    if platform.name == "slurm":
        parser.add_argument(
            "--separate-steps", action="store_true", help="One srun per group, for sites with disable_hetero_steps."
        )
    else:
        parser.add_argument("--image", default="", help="Container image with hetero and the script.")
    for name, about in platform.settings.items():
        form = "VALUE" if name in _JOB_SETTINGS else "[GROUP:]VALUE"
        add_list(parser, f"--{name}", form, f"{about.capitalize()}.")
    config.add_launch_arguments(parser, makes_cluster=True)
    parser.add_argument(
        "--spot",
        dest="spot_groups",
        action="append",
        default=[],
        metavar="GROUP[=USD]",
        help="Group of data hosts on spot capacity, which the platform may take away. USD is the price of a host per "
        "hour. If it is given, the job does not wait for all hosts of the group at the start. Repeat for each group.",
    )


def _run(platform: type[Platform], namespace: argparse.Namespace) -> int:
    """Make the request from the command line, and write the script or manifest of the platform."""
    from hetero.cluster.groups import parse_stated_group
    from hetero.cluster.rendering.request import make_request

    # Take out the spot groups without a price, because `resolve_options` rejects them. `hetero launch` needs the price,
    # and a manifest needs only the group.
    unpriced = [text for text in namespace.spot_groups if "=" not in text]
    namespace.spot_groups = [text for text in namespace.spot_groups if "=" in text]
    # Ignore the variables of this shell, because the job does not run there.
    options = config.resolve_options(namespace, {}, parameters=None)
    groups = [parse_stated_group(text) for text in namespace.group]
    if namespace.hours is not None and not 0 < namespace.hours <= 10_000:
        raise ConfigError(f"--hours {namespace.hours:g}: expected a number above 0, at most 10000")
    # Platforms allow only short names of lower-case letters, digits and dashes.
    label = re.sub(r"[^a-z0-9-]+", "-", script_label(options.script, is_module=options.module).lower()).strip("-")
    # Only the command for Slurm has `separate_steps`, and the commands for the other platforms have `image`.
    request = make_request(
        groups,
        options.roles,
        name=namespace.name or label[:40].strip("-") or "job",
        script=options.script,
        is_module=options.module,
        script_args=tuple(options.script_args),
        flags=tuple(config.stated_flags(_changed(options))),
        image=getattr(namespace, "image", ""),
        hours=namespace.hours,
        spot=_spot([*unpriced, *options.spot_groups], groups),
        settings={
            name: _setting(name, getattr(namespace, name.replace("-", "_")), groups) for name in platform.settings
        },
        separate_steps=getattr(namespace, "separate_steps", False),
    )
    text = platform.render(request)
    if namespace.output is None:
        say(text)
        return int(ExitCode.OK)
    try:
        namespace.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {namespace.output}: {error.strerror or error}") from error
    return int(ExitCode.OK)


def _changed(options: config.LaunchOptions) -> dict[str, object]:
    """Return the options of the launchers that are not the defaults.

    Leave out the script, its arguments and ``module``, because the request has separate fields for them.
    """
    defaults = config.LaunchOptions(script=options.script)
    return {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if field.name not in ("script", "script_args", "module")
        and getattr(options, field.name) != getattr(defaults, field.name)
    }


def _spot(texts: Sequence[str], groups: Sequence[StatedGroup]) -> tuple[str, ...]:
    """Return the names of the spot groups in texts ``GROUP`` and ``GROUP=USD``."""
    group_names = [group.name for group in groups]
    spot_names: list[str] = []
    for text in texts:
        name = text.partition("=")[0]
        if name not in group_names:
            raise ConfigError(f"--spot {text!r:.80}: no group has that name; expected one of {', '.join(group_names)}")
        if name in spot_names:
            raise ConfigError(f"--spot {text!r:.80}: {name} is given twice")
        spot_names.append(name)
    return tuple(spot_names)


def _setting(name: str, texts: Sequence[str], groups: Sequence[StatedGroup]) -> dict[str, str]:
    """Return the values of a setting by the name of their group. The empty name means all groups.

    Args:
        name: Name of the setting.
        texts: Texts ``VALUE`` or ``GROUP:VALUE``.
        groups: The groups of the job.
    """
    group_names = {group.name for group in groups}
    found: dict[str, str] = {}
    for text in texts:
        group, _, value = text.partition(":")
        # Without the name of a group before it, the colon belongs to the value. A setting of the whole job names no
        # group.
        if group not in group_names or name in _JOB_SETTINGS:
            group, value = "", text
        # A directive of Slurm has the value without quotes.
        if not value or not value.isprintable() or any(character in value for character in "\"'\\ "):
            raise ConfigError(f"--{name} {text!r:.80}: expected a word without quotes and spaces")
        if group in found:
            raise ConfigError(f"--{name} {text!r:.80}: given twice for {group or 'all groups'}")
        found[group] = value
    return found
