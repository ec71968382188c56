"""Which of several failures caused the others. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from hetero.control.status import Cause

__all__ = ["is_crash", "root_of"]

_CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


def is_crash(exit_status: int) -> bool:
    """Return whether a crash ended a process: a signal that only its fault or a lack of memory explains.

    SIGABRT does not count because NCCL's watchdog uses it to end a rank after another rank has failed. SIGTERM does
    not count because supervisors end processes with it.

    Args:
        exit_status: Exit status as `subprocess` reports it: for a signal, its negative number.
    """
    return -exit_status in _CRASHES


def root_of(causes: Iterable[Cause]) -> Cause:
    """Return the first cause of the best kind.

    The kinds, best first: a crash, a failure without a signal, an end by a signal that may be the echo of another
    failure, a connection that broke.

    Args:
        causes: At least one cause, in order of arrival.
    """
    return min(causes, key=lambda cause: (cause.is_echo, not cause.by_signal))
