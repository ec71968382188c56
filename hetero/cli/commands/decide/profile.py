"""``hetero profile``: measure a training script on this host for a minute."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from hetero import config
from hetero.cli.arguments import Subparsers
from hetero.cli.output import say
from hetero.documents.files import make_output_folder
from hetero.errors import ConfigError
from hetero.system.process import bind_to_parent
from hetero.system.scripts import script_label

__all__ = ["add", "shown_page"]

logger = logging.getLogger(__name__)

_HOST = "localhost"
_GROUP = "trainer_group"


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "profile",
        allow_abbrev=False,
        help="measure a training script on this host for a minute",
        description="Runs SCRIPT for at most a minute of training and measures it. Writes profile.json for hetero plan "
        "and prints a page. The model trains on repeated batches. No stop callback runs, so no checkpoint is written.",
    )
    parser.add_argument(
        "--instance-type", default="", metavar="TYPE", help="Instance type of this host, for example ml.g5.2xlarge."
    )
    config.add_launch_arguments(parser, makes_cluster=True)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Run the job as a profile run on this host alone, and print the page of the profile."""
    from hetero.cluster import find_platform, parse_cluster
    from hetero.control import security
    from hetero.launch.launcher import launch
    from hetero.launch.ranks.ranks import free_port

    # If another program of hetero started this command, the command ends with that program.
    bind_to_parent()
    # Read no parameters of a platform. This machine may itself be a host of a job, which has other parameters.
    options = config.resolve_options(namespace, os.environ, parameters=None)
    _check_type(namespace.instance_type, options)
    label = script_label(options.script, is_module=options.module)
    output_dir = options.output_dir or Path("runs") / f"profile-{label}"
    make_output_folder(output_dir)
    # Take a free port unless the user states one, because the launcher of a job on this machine may have the default.
    # `LaunchOptions` needs a script, but the default port does not depend on it.
    has_default_port = options.port == config.LaunchOptions(script="-").port
    port = free_port() if has_default_port else options.port
    options = dataclasses.replace(options, profile=True, output_dir=output_dir, port=port)
    known_type = {"instance_type": namespace.instance_type} if namespace.instance_type else {}
    group = {"instance_group_name": _GROUP, "hosts": [_HOST], **known_type}
    cluster = parse_cluster(
        {"instance_groups": [group], "current_host": _HOST}, source="hetero profile", roles=(f"{_GROUP}=trainer",)
    )
    # Make a token even for one host, because its ports are open to every process that reaches them.
    descriptor, path = security.token_memfd(security.Token.generate())
    os.environ[security.TOKEN_FILE_VARIABLE] = path
    try:
        with shown_page(output_dir):
            return launch(options, cluster, platform=find_platform(os.environ))
    finally:
        os.close(descriptor)


def _check_type(instance_type: str, options: config.LaunchOptions) -> None:
    """Reject an unknown instance type before the run, and warn if this host has another number of CPUs.

    Raises:
        ConfigError: If the catalogue does not have the type. The message names the nearest ones.
    """
    from hetero.pricing import Catalogue
    from hetero.system.cgroups import usable_cpus

    if not instance_type:
        return
    catalogue = Catalogue.load()
    info = catalogue.find(instance_type)
    if info is None:
        raise ConfigError(
            f"--instance-type {instance_type!r:.80} is not in the catalogue{catalogue.suggestion(instance_type)}\n"
            "  to do: see hetero prices list, or leave the option out"
        )
    # With emulated samples, the host may emulate another number of vCPUs than it has CPUs.
    is_emulated = options.emulate_sample_s is not None
    num_cpus = (options.emulate_vcpus if is_emulated else None) or usable_cpus()
    if info.vcpus is not None and info.vcpus != num_cpus:
        logger.warning(
            "--instance-type %s has %d vCPUs, but this host has %d usable CPUs; the profile has those of this host",
            instance_type,
            info.vcpus,
            num_cpus,
        )


@contextlib.contextmanager
def shown_page(folder: Path) -> Iterator[None]:
    """Print the page that a profile run has written into a folder, or print that it has written no profile."""
    from hetero.launch.reporting.profiling import TEXT_FILE_NAME
    from hetero.metrics.profile.profile import PROFILE_FILE_NAME

    # A run that fails would leave the page of an earlier run, which must not look like its own.
    (folder / TEXT_FILE_NAME).unlink(missing_ok=True)
    yield
    if (folder / TEXT_FILE_NAME).is_file():
        say((folder / TEXT_FILE_NAME).read_text(encoding="utf-8"))
        say(f"\nWritten to {folder / PROFILE_FILE_NAME}\n")
    else:
        say("This run wrote no profile.\n")
