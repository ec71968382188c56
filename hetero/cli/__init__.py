"""The ``hetero`` command.

Each command has a module in commands/, however short. The module imports what the command needs only when the command
runs, so ``hetero --help`` is quick.

Several commands use these modules:

arguments.py   parses arguments that several commands have
html_file.py   writes the file that --html names
interrupts.py  ends a command cleanly when a signal arrives
output.py      writes to standard output and standard error, which may be closed

``__main__.py`` is ``python -m hetero.cli``, which starts launchers and endpoints. ``python -m hetero`` is the same.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from hetero import __version__, config
from hetero.cli.commands import audit, certs, check, doctor, index, launch, render, report, simulate
from hetero.cli.commands.decide import canary, plan, prices, profile, study
from hetero.cli.output import complain, discard, say
from hetero.errors import ExitCode, HeteroError

__all__ = ["main"]

_COMMANDS = (launch, simulate, render, profile, plan, canary, study, certs, check, report, audit, index, doctor, prices)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: Arguments without the program's name. None means the arguments of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _make_parser()
    # argparse would take the script's options for options of the command.
    command, script_args = config.split_at_script(parser, arguments)
    try:
        try:
            namespace = config.parse(parser, command)
            namespace.script_args = script_args
            status: int = namespace.run(namespace)
        finally:
            # Flush what the parser has written, for example the help. If standard output is closed, a failed write at
            # the interpreter's exit would give status 120.
            say("")
        return status
    except HeteroError as error:
        complain(f"hetero: error HET-{int(error.exit_code):02d}: {error}\n")
        return int(error.exit_code)
    # The program that reads the output, such as `head`, has ended.
    except BrokenPipeError:
        # What is still buffered for standard output would fail again when the interpreter exits.
        discard(descriptor=1)
        return 128 + signal.SIGPIPE


def _make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
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
