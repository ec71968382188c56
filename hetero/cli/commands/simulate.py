"""``hetero simulate``: run a whole job on this machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from hetero import config
from hetero.cli.arguments import Subparsers, add_list, pairs, whole_number
from hetero.cli.commands.decide.profile import shown_page
from hetero.documents.files import make_output_folder
from hetero.errors import ConfigError
from hetero.system import extensions, logs
from hetero.system.process import bind_to_parent
from hetero.system.scripts import script_label

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("simulate", allow_abbrev=False, help="run a whole multi-group job on this machine")
    add_list(
        parser,
        "--group",
        "NAME=TYPE:COUNT",
        "Instance group with its number of hosts, for example data_group=ml.c5.9xlarge:2. Repeat for each group.",
    )
    add_list(
        parser,
        "--channel",
        "NAME=DIR",
        "Folder of an input channel, for every host. With --request it replaces the channel's data in S3. "
        "Repeat for each channel.",
    )
    parser.add_argument(
        "--request",
        type=Path,
        metavar="FILE",
        help="JSON request for a SageMaker training job. Its groups, channels and program replace --group and SCRIPT.",
    )
    parser.add_argument(
        "--source-dir",
        type=Path,
        metavar="DIR",
        help="With --request: folder with the code. It replaces the code in S3.",
    )
    parser.add_argument(
        "--through",
        metavar="{toolkit,plain}",
        help="With --request: start the program with SageMaker's training toolkit, or directly. Default: toolkit if it "
        "is installed.",
    )
    add_list(
        parser,
        "--vcpus",
        "TYPE=N",
        "Number of vCPUs of an instance type that the catalogue lacks. Repeat for each type.",
    )
    parser.add_argument(
        "--tls", action="store_true", help="Run the job under TLS with certificates that are made for this run."
    )
    config.add_launch_arguments(parser, makes_cluster=True)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    """Simulate a job from the options, or rehearse the job of a request."""
    from hetero.simulate import simulate as simulation

    # If a study started this command, the command ends with the study.
    bind_to_parent()
    channels = {name: Path(path) for name, path in pairs("--channel", namespace.channel, "NAME=DIR")}
    vcpus = {name: whole_number("--vcpus", count) for name, count in pairs("--vcpus", namespace.vcpus, "TYPE=N")}
    if namespace.request is not None:
        simulate_request = extensions.find(extensions.REQUESTS, "simulate")
        # The job must not wait until its log lines are written, see `_ordered_lines`.
        with _ordered_lines():
            return int(simulate_request(namespace, data=channels, vcpus=vcpus))
    if namespace.source_dir is not None or namespace.through is not None:
        raise ConfigError("--source-dir and --through need --request FILE")
    # Read no parameters of a platform. This machine may itself be a host of a job, which has other parameters.
    options = config.resolve_options(namespace, os.environ, parameters=None)
    logs.setup_logging(group="simulate", host="", role="", level=options.log_level)
    output_dir = options.output_dir or Path("runs") / script_label(options.script, is_module=options.module)
    make_output_folder(output_dir)
    with shown_page(output_dir) if options.profile else contextlib.nullcontext(), _ordered_lines():
        return simulation.simulate(
            options,
            [simulation.parse_group(text) for text in namespace.group],
            output_dir=output_dir,
            channels=channels,
            vcpus=vcpus,
            make_tls=namespace.tls,
        )


def _ordered_lines() -> contextlib.AbstractContextManager[None]:
    """Return a context that lets a separate thread write log lines, unless standard error is a terminal.

    On a terminal, log lines and the redrawn status line must keep their order, so the context does nothing. Elsewhere
    the code that logs a line does not wait until the line is written.
    """
    return contextlib.nullcontext() if sys.stderr.isatty() else logs.write_behind()
