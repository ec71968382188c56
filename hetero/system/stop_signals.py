"""The signal that ends a process of hetero, and the protection against a platform that signals every process.

Most platforms send their request to stop only to the launcher. It stops its own processes in order, with SIGTERM.
Slurm sends SIGTERM to every process of a job at the same moment. If ranks and endpoints obeyed it, they would end
before all ranks have agreed on a last step. There the launcher sets `SHIELD_VARIABLE` for its processes. They start
with SIGTERM blocked, and are ended with another signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping

__all__ = ["END_SIGNALS", "SHIELD_VARIABLE", "children_ignore_platform", "end_signal", "ignore_platform"]

SHIELD_VARIABLE = "HETERO_SHIELD"
"""Environment variable of processes that the platform signals although only the launcher should act."""
_OTHER_SIGNAL = signal.SIGVTALRM
"""It ends a process by default, like SIGTERM. Neither platforms nor frameworks use it."""
END_SIGNALS = (signal.SIGTERM, _OTHER_SIGNAL)
"""The values of `end_signal`."""


def end_signal() -> signal.Signals:
    """Return the signal with which hetero asks its own processes to end."""
    return _OTHER_SIGNAL if SHIELD_VARIABLE in os.environ else signal.SIGTERM


@contextlib.contextmanager
def children_ignore_platform(environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """Let the processes that this thread starts in the context begin with SIGTERM blocked, if they are shielded.

    Args:
        environ: Environment of the processes. None: that of this process.
    """
    if SHIELD_VARIABLE not in (os.environ if environ is None else environ):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_platform() -> None:
    """Let this process survive SIGTERM, and unblock the signal for the processes that it starts, if it is shielded.

    The processes of a script then behave as usual: SIGTERM ends them. Call it on the main thread.
    """
    if SHIELD_VARIABLE not in os.environ:
        return
    # A handler and not SIG_IGN, because started programs would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.siginterrupt(signal.SIGTERM, False)  # native code may not expect interrupted system calls
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    os.register_at_fork(after_in_child=_restore)


def _do_nothing(_number: int, _frame: object) -> None:
    pass


def _restore() -> None:
    if signal.getsignal(signal.SIGTERM) is _do_nothing:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
