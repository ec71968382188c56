"""Which failures allow a restart of the trainer group. Pure.

A restart helps if a rank has ended and every host is there to begin again. It does not help if the next generation
would fail for the same reason: a wrong option, a rejected token, hosts that disagree. It is impossible if a trainer
host is lost with its launcher, because then no launcher can start the host's ranks.
"""

from __future__ import annotations

from hetero.control.status import Cause
from hetero.errors import ExitCode

__all__ = ["is_restartable"]

_RESTARTABLE = frozenset(
    {
        ExitCode.SCRIPT_FAILED,  # an exception, a signal, or an exit status that the script chose
        ExitCode.DATA_PLANE_LOST,  # every data host was away for the data timeout, and may be back
        ExitCode.DATASET_FAILED,  # a mount that was gone for a moment causes this
        ExitCode.CORRUPTION,
        ExitCode.INTERNAL,
    }
)


def is_restartable(cause: Cause) -> bool:
    """Return whether the trainer group may begin again from its checkpoint after this failure."""
    return cause.of_rank and cause.exit_code in _RESTARTABLE
