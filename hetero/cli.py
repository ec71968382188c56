"""The ``hetero`` command."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from hetero import config, logs
from hetero.errors import ConfigError, ExitCode, HeteroError
from hetero.version import __version__

__all__ = ["main"]

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name; None takes the process's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    command, script_args = _split(arguments)
    try:
        try:
            namespace = config.parse(parser, command)
            namespace.script_args = script_args
            status: int = namespace.run(namespace)
        finally:
            _say("")  # what the parser has written
        return status
    except HeteroError as error:
        _complain(f"hetero: error HET-{int(error.exit_code):02d}: {error}\n")
        return int(error.exit_code)
    except BrokenPipeError:
        _discard(1)
        return 128 + signal.SIGPIPE


def _say(text: str) -> None:
    """Write to standard output, unless that is closed; at once: an error at the interpreter's end gives status 120.

    Raises:
        BrokenPipeError: If nobody reads it, or it cannot be written to for another reason, which is said.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        _discard(1)
        _complain(f"hetero: cannot write to standard output: {error.strerror}\n")
        raise BrokenPipeError from error


def _complain(text: str) -> None:
    """Write to standard error if anybody reads it: that nobody does must not change the exit code."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        _discard(2)


def _discard(descriptor: int) -> None:
    """Have what is still buffered for a descriptor go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate hetero's arguments from those of the user's script, which come after ``--``."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _make_parser() -> argparse.ArgumentParser:
    codes = "\n".join(f"  {code.value:>3}  {code.help_text}" for code in ExitCode)
    parser = argparse.ArgumentParser(
        prog="hetero",
        description="Data loading for heterogeneous training clusters.",
        epilog=f"exit codes:\n{codes}\n128+N  Ended by signal N.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hetero {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    launch = commands.add_parser("launch", allow_abbrev=False, help="run this host's part of a job")
    config.add_launch_arguments(launch)
    launch.set_defaults(run=_launch)

    simulate = commands.add_parser("simulate", allow_abbrev=False, help="run a whole multi-group job on this machine")
    simulate.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME=TYPE:COUNT",
        help="an instance group, for example data_group=ml.c5.9xlarge:2; repeat for each",
    )
    simulate.add_argument(
        "--channel", action="append", default=[], metavar="NAME=DIR", help="an input channel, seen by every host"
    )
    simulate.add_argument(
        "--vcpus", action="append", default=[], metavar="TYPE=N", help="vCPUs of a type that the catalogue lacks"
    )
    simulate.add_argument(
        "--tls", action="store_true", help="make certificates for this run: the job under TLS, as with --tls-dir"
    )
    config.add_launch_arguments(simulate, makes_cluster=True)
    simulate.set_defaults(run=_simulate)

    certs = commands.add_parser("certs", allow_abbrev=False, help="make the certificates of a job for --tls-dir")
    certs.add_argument("directory", type=Path, metavar="DIR", help="the folder to write them to")
    certs.add_argument("--host", action="append", default=[], metavar="NAME", help="a host; repeat for each")
    certs.add_argument("--cluster-file", type=Path, metavar="FILE", help="cluster, for all its hosts")
    certs.add_argument("--days", default="30", metavar="N", help="until they end, 1 to 825. Default: 30.")
    certs.add_argument(
        "--keep-ca-key", action="store_true", help="also write ca.key, with which more hosts can be let in"
    )
    certs.set_defaults(run=_certs)

    report = commands.add_parser("report", allow_abbrev=False, help="show a run, or compare it with its baseline")
    report.add_argument("baseline", type=Path, metavar="A", help="report.json or its folder: the run, or the baseline")
    report.add_argument("candidate", type=Path, nargs="?", metavar="B", help="the run to compare with A")
    report.set_defaults(run=_report)

    audit = commands.add_parser(
        "audit",
        allow_abbrev=False,
        help="say whether two runs trained on the same data",
        description="Compare the ledgers that two runs wrote with --audit, and say where they part.",
        epilog="exit status: 0 the same data, 1 not the same or a ledger is damaged, 2 the ledgers cannot be compared",
    )
    for name in ("A", "B"):
        help_text = "a run's folder, or one of its ledgers"
        audit.add_argument(name.lower(), type=Path, metavar=name, help=help_text)
    audit.set_defaults(run=_audit)

    prices = commands.add_parser("prices", allow_abbrev=False, help="what the catalogue of instance types says")
    actions = prices.add_subparsers(title="actions", required=True, metavar="ACTION")
    for name, help_text in (("list", "every type"), ("show", "one type")):
        action = actions.add_parser(name, allow_abbrev=False, help=help_text)
        if name == "show":
            action.add_argument("instance_type", metavar="TYPE")
        config.add_price_arguments(action)
        action.set_defaults(run=_prices, action=name)
    return parser


def _launch(namespace: argparse.Namespace) -> int:
    parent = os.environ.pop("HETERO_PARENT_PID", None)
    if parent is not None:
        from hetero.process import die_with_parent

        die_with_parent(int(parent))
    from hetero.cluster import base_dir, read_cluster
    from hetero.launch.failure import write_failure
    from hetero.launch.host import cause_of
    from hetero.launch.launcher import launch

    base = base_dir(os.environ)
    try:
        options = config.resolve_options(namespace, os.environ, base)
        cluster = read_cluster(
            env=os.environ, cluster_file=options.cluster_file, host=options.host, roles=options.roles
        )
        with logs.write_behind():
            return launch(options, cluster, base_dir=base)
    except HeteroError as error:  # before this host knew its part; on a platform its reason is still shown
        if base.is_dir():
            write_failure(base / "output" / "failure", cause_of(error, socket.gethostname()))
        raise


def _simulate(namespace: argparse.Namespace) -> int:
    from hetero.launch import simulate as simulation

    # The tree of this machine, if it has one, is not the simulated job's.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    options = config.resolve_options(namespace, environment, Path(os.devnull))
    logs.setup_logging(group="simulate", host="", role="", level=options.log_level)
    output_dir = options.output_dir or Path("runs") / Path(options.script).stem
    output_dir.mkdir(parents=True, exist_ok=True)
    # On a terminal lines have to keep their order with the one that is redrawn.
    with contextlib.nullcontext() if sys.stderr.isatty() else logs.write_behind():
        return simulation.simulate(
            options,
            [simulation.parse_group(text) for text in namespace.group],
            output_dir=output_dir,
            channels={name: Path(path) for name, path in _pairs("--channel", namespace.channel, "NAME=DIR")},
            vcpus={name: _positive("--vcpus", count) for name, count in _pairs("--vcpus", namespace.vcpus, "TYPE=N")},
            make_tls=namespace.tls,
        )


def _certs(namespace: argparse.Namespace) -> int:
    from hetero.cluster import read_host_names
    from hetero.launch.certificates import make_certificates

    hosts = list(namespace.host)
    if namespace.cluster_file is not None:
        hosts += read_host_names(namespace.cluster_file)
    make_certificates(
        namespace.directory,
        hosts,
        days=_positive("--days", namespace.days),
        keep_authority_key=namespace.keep_ca_key,
    )
    _say(f"certificates of {len(hosts)} hosts for {namespace.days} days are in {namespace.directory}\n")
    return int(ExitCode.OK)


def _report(namespace: argparse.Namespace) -> int:
    from hetero.report import commands

    if namespace.candidate is None:
        text = commands.show_file(namespace.baseline)
    else:
        text = commands.compare_files(namespace.baseline, namespace.candidate)
    _say(text.rstrip("\n") + "\n")
    return int(ExitCode.OK)


def _audit(namespace: argparse.Namespace) -> int:
    from hetero.audit import commands

    is_same, text = commands.audit_paths(namespace.a, namespace.b)
    _say(text.rstrip("\n") + "\n")
    return int(not is_same)


def _prices(namespace: argparse.Namespace) -> int:
    from hetero import pricing

    catalogue = pricing.Catalogue.load(
        profile=namespace.price_profile,
        region=namespace.region,
        price_file=namespace.price_file,
        overrides=tuple(namespace.price or ()),
    )
    if namespace.action == "list":
        text = pricing.list_text(catalogue)
    else:
        text = pricing.show_text(catalogue, namespace.instance_type)
    _say(text.rstrip("\n") + "\n")
    return int(ExitCode.OK)


def _pairs(flag: str, texts: Sequence[str], form: str) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{flag} {text!r} is not {form}")
        pairs.append((name, value))
    return pairs


def _positive(flag: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{flag}: {text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
