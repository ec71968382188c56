"""Ends a command that executes a study cleanly when SIGINT or SIGTERM arrives."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from types import FrameType

from hetero.cli.output import complain

__all__ = ["run_interruptible"]


class _SignalledError(KeyboardInterrupt):
    """A signal asked the study to end. The argument is its number."""


def run_interruptible(execute: Callable[[argparse.Namespace], int], namespace: argparse.Namespace) -> int:
    """Execute a command until it ends or until a signal asks it to end.

    Args:
        execute: The command. A signal raises a `KeyboardInterrupt` in it. Then it stops its runs and writes results.
        namespace: Arguments of the command.

    Returns:
        The command's exit code, or 128 plus the number of the signal that ended it.
    """

    def end(number: int, frame: FrameType | None) -> None:
        raise _SignalledError(number)

    # Handle SIGTERM like SIGINT. Without a handler, SIGTERM kills the study before it can write results.
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return execute(namespace)
    except _SignalledError as error:
        number = int(error.args[0])
        complain(f"hetero: ended by {signal.Signals(number).name}; the same command continues it\n")
        return 128 + number
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
