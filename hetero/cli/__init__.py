"""The ``hetero`` command: one module for each of its commands."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hetero import config
from hetero.cli import audit, certs, check, doctor, launch, prices, report, simulate
from hetero.cli.output import complain, discard, say
from hetero.errors import ExitCode, HeteroError
from hetero.version import __version__

__all__ = ["main"]

_COMMANDS = (launch, simulate, certs, check, report, audit, doctor, prices)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name. None means the arguments of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    command, script_args = config.split_at_script(parser, arguments)
    try:
        try:
            namespace = config.parse(parser, command)
            namespace.script_args = script_args
            status: int = namespace.run(namespace)
        finally:
            say("")  # flush what the parser has written
        return status
    except HeteroError as error:
        complain(f"hetero: error HET-{int(error.exit_code):02d}: {error}\n")
        return int(error.exit_code)
    except BrokenPipeError:
        discard(1)
        return 128 + signal.SIGPIPE


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

    for command in _COMMANDS:
        command.add(commands)
    return parser
