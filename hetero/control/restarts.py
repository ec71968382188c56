"""Which failures the trainer group may be restarted after. Pure.

A restart helps where a rank ended and everybody is there to begin again. It
does not help where the next generation would meet the same: a wrong option, a
token that is refused, hosts that disagree. And it cannot be had where a trainer
host is lost with its launcher: nobody would start its ranks.
"""

from __future__ import annotations

from hetero.control.status import Cause
from hetero.errors import ExitCode

__all__ = ["is_restartable"]

_RESTARTABLE = frozenset(
    {
        ExitCode.SCRIPT_FAILED,  # an exception, a signal, an exit status of the script's own
        ExitCode.DATA_PLANE_LOST,  # every data host was away for the data timeout; they may be back
        ExitCode.DATASET_FAILED,  # a mount that was gone for a moment looks like this
        ExitCode.CORRUPTION,
        ExitCode.INTERNAL,
    }
)


def is_restartable(cause: Cause) -> bool:
    """Return whether the trainer group may begin again from its checkpoint after this failure."""
    return cause.of_rank and cause.exit_code in _RESTARTABLE
