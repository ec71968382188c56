"""Commands that execute a study end cleanly by SIGINT and SIGTERM."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

from hetero.cli.output import complain

__all__ = ["run_interruptible"]


class _SignalledError(KeyboardInterrupt):
    """A signal asked the study to end. The argument is its number."""


def run_interruptible(what: str, execute: Callable[[], int]) -> int:
    """Return the exit code of a function, or 128 plus the number of the signal that ended it.

    Args:
        what: What the function executes, for the message.
        execute: The function. It gets a `KeyboardInterrupt`, stops its runs and writes results.
    """
    try:
        with _interruptible():
            return execute()
    except _SignalledError as error:
        number = int(error.args[0])
        complain(f"hetero: the {what} ended by {signal.Signals(number).name}; the same command continues it\n")
        return 128 + number


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise `_SignalledError`."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _SignalledError(number)

    # Handle SIGTERM like SIGINT. SIGTERM once killed a study at once, with its run and without results.
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
