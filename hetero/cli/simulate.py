"""``hetero simulate``: run a whole job on this machine."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from pathlib import Path

from hetero import config
from hetero.cli.arguments import Subparsers, pairs, positive
from hetero.cli.parent import bind_to_parent
from hetero.errors import ConfigError
from hetero.system import logs
from hetero.system.scripts import script_label

__all__ = ["add"]


def add(commands: Subparsers) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("simulate", allow_abbrev=False, help="run a whole multi-group job on this machine")
    parser.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=TYPE:COUNT",
        help="an instance group, for example data_group=ml.c5.9xlarge:2; repeat for each",
    )
    parser.add_argument(
        "--channel",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="an input channel, seen by every host; with --request, data in place of what it names in S3",
    )
    parser.add_argument(
        "--request",
        type=Path,
        metavar="FILE",
        help="a request for a SageMaker training job, in JSON: its groups, channels and program instead of SCRIPT",
    )
    parser.add_argument(
        "--source-dir", type=Path, metavar="DIR", help="with --request: the code, in place of what it names in S3"
    )
    parser.add_argument(
        "--through",
        metavar="{toolkit,plain}",
        help="with --request: SageMaker's training toolkit runs the program, or nothing between; by default the "
        "toolkit if it is installed",
    )
    parser.add_argument(
        "--vcpus", action="append", default=[], metavar="TYPE=N", help="vCPUs of a type that the catalogue lacks"
    )
    parser.add_argument(
        "--tls", action="store_true", help="make certificates for this run: the job under TLS, as with --tls-dir"
    )
    config.add_launch_arguments(parser, makes_cluster=True)
    parser.set_defaults(run=_run)


def _run(namespace: argparse.Namespace) -> int:
    from hetero.simulate import simulate as simulation

    bind_to_parent()
    if namespace.request is not None:
        return _simulate_request(namespace)
    if namespace.source_dir is not None or namespace.through is not None:
        raise ConfigError("--source-dir and --through belong to a request; expected --request FILE beside them")
    # This machine may itself be a host of a job: its SM_* variables and its /opt/ml do not describe the simulated job.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    options = config.resolve_options(namespace, environment, Path(os.devnull))
    logs.setup_logging(group="simulate", host="", role="", level=options.log_level)
    output_dir = options.output_dir or Path("runs") / script_label(options.script, is_module=options.module)
    output_dir.mkdir(parents=True, exist_ok=True)
    with _ordered_lines():
        return simulation.simulate(
            options,
            [simulation.parse_group(text) for text in namespace.group],
            output_dir=output_dir,
            channels=_channels(namespace),
            vcpus=_vcpus(namespace),
            make_tls=namespace.tls,
        )


def _simulate_request(namespace: argparse.Namespace) -> int:
    from hetero.cluster import slug
    from hetero.sagemaker import read_request
    from hetero.sagemaker.hosts import run_request

    if namespace.group or namespace.script is not None or namespace.script_args or namespace.config is not None:
        raise ConfigError("a request has the groups, the script and its options; give neither those nor --config")
    request = read_request(namespace.request)
    names = {field.name for field in dataclasses.fields(config.LaunchOptions)} - {"output_dir", "script", "script_args"}
    stated = {name: value for name in names if (value := getattr(namespace, name, None)) not in (None, [])}
    logs.setup_logging(group="simulate", host="", role="", level=namespace.log_level or "info")
    output_dir = Path(namespace.output_dir or Path("runs") / slug(request.name))
    output_dir.mkdir(parents=True, exist_ok=True)
    with _ordered_lines():
        return run_request(
            request,
            output_dir=output_dir,
            data=_channels(namespace),
            source_dir=namespace.source_dir,
            through=namespace.through,
            stated=stated,
            vcpus=_vcpus(namespace),
            make_tls=namespace.tls,
        )


def _ordered_lines() -> contextlib.AbstractContextManager[None]:
    """Return a context that has a thread write log lines, unless standard error is a terminal.

    On a terminal, log lines and the redrawn status line must keep their order, so the context does nothing. Elsewhere a
    log line does not wait until it is written.
    """
    return contextlib.nullcontext() if sys.stderr.isatty() else logs.write_behind()


def _channels(namespace: argparse.Namespace) -> dict[str, Path]:
    return {name: Path(path) for name, path in pairs("--channel", namespace.channel, "NAME=DIR")}


def _vcpus(namespace: argparse.Namespace) -> dict[str, int]:
    return {name: positive("--vcpus", count) for name, count in pairs("--vcpus", namespace.vcpus, "TYPE=N")}
