"""Finds the failure that caused the other failures, and whether the trainer group may restart after it. Pure.

This is a separate module because launchers use it without the membership.

A restart helps if a rank has ended and all hosts still run. A restart does not help if the trainer group would fail
again for the same reason: a wrong option, a rejected token, hosts that disagree. A restart is impossible if a trainer
host and its launcher are lost, because no launcher can then start the host's ranks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from hetero.control.status import Cause
from hetero.errors import ExitCode

__all__ = ["is_crash", "is_restartable", "root_of"]

_CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
_RESTARTABLE = frozenset(
    {
        # An exception, a signal, or an exit status that the script chose.
        ExitCode.SCRIPT_FAILED,
        # No data host was reachable within the data timeout. One may be reachable now.
        ExitCode.DATA_PLANE_LOST,
        # The data set's code failed, for example because a mount was gone for a moment.
        ExitCode.DATASET_FAILED,
        ExitCode.CORRUPTION,
        ExitCode.INTERNAL,
    }
)


def is_crash(exit_status: int) -> bool:
    """Return whether a process crashed: SIGKILL (lack of memory) or a signal such as SIGSEGV (a bug) ended it.

    SIGABRT does not count because NCCL's watchdog uses it to end a rank after another rank has failed. SIGTERM does
    not count because supervisors end processes with it.

    Args:
        exit_status: Exit status as `subprocess` reports it: minus the number of the signal that ended the process.
    """
    return -exit_status in _CRASHES


def root_of(causes: Iterable[Cause]) -> Cause:
    """Return the cause that most likely led to the others. If several are equally likely, return the first of them.

    A failure that is not the consequence of another one comes before the consequences. Within both groups, a failure by
    a signal comes first. So a crash comes before an exception. Among the consequences, a signal comes before a broken
    connection.

    Args:
        causes: At least one cause, in order of arrival.
    """
    # False comes before True, and `min` returns the first of equal causes.
    return min(causes, key=lambda cause: (cause.is_consequence, not cause.by_signal))


def is_restartable(cause: Cause) -> bool:
    """Return whether the trainer group may begin again from its checkpoint after this failure."""
    return cause.of_rank and cause.exit_code in _RESTARTABLE
