"""Which of several failures brought about the others. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from hetero.control.status import Cause

__all__ = ["is_crash", "root_of"]

_CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})


def is_crash(exit_status: int) -> bool:
    """Return whether a process was ended by a signal that nothing but its own fault, or want of memory, explains.

    Not SIGABRT, by which NCCL's watchdog ends a rank because another one failed, nor SIGTERM, by which supervisors do.

    Args:
        exit_status: As `subprocess` has it: of a signal its number, negative.
    """
    return -exit_status in _CRASHES


def root_of(causes: Iterable[Cause]) -> Cause:
    """Return the first of the best kind, of at least one in order of arrival.

    A crash, then what failed by itself, then an end by a signal that may be its echo, then a connection that broke.
    """
    return min(causes, key=lambda cause: (cause.is_echo, not cause.by_signal))
