"""What commands print; nobody has to read it."""

from __future__ import annotations

import os
import sys

__all__ = ["complain", "discard", "say"]


def say(text: str) -> None:
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
        discard(1)
        complain(f"hetero: cannot write to standard output: {error.strerror}\n")
        raise BrokenPipeError from error


def complain(text: str) -> None:
    """Write to standard error if anybody reads it: that nobody does must not change the exit code."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(2)


def discard(descriptor: int) -> None:
    """Have what is still buffered for a descriptor go nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
