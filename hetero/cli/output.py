"""Writes the output of the commands. The stream, or the pipe behind it, may be closed."""

from __future__ import annotations

import os
import sys

__all__ = ["complain", "discard", "say"]


def say(text: str) -> None:
    """Write to standard output and flush it, unless it is closed.

    Without the flush, a failed write would appear only when the interpreter exits, and give status 120.

    Raises:
        BrokenPipeError: If the reader has closed the pipe, or if the write fails for another reason, such as a full
            disk. The other reason is then written to standard error. Both end the command in the same way.
    """
    # Python sets the stream to None if its descriptor was closed when the process began.
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered would fail again when the interpreter exits.
        discard(descriptor=1)
        complain(f"hetero: cannot write to standard output: {error.strerror}\n")
        raise BrokenPipeError from error


def complain(text: str) -> None:
    """Write to standard error. Ignore a failed write, because it must not change the exit code."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        discard(descriptor=2)


def discard(descriptor: int) -> None:
    """Redirect a descriptor to the null device, which drops what is still buffered for it."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
