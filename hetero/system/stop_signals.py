"""The signal that ends a process of hetero, and the protection against a request to stop that reaches every process.

Many platforms send SIGTERM to every process of a job at the same moment: Slurm, systemd, PBS, LSF, and torchrun, which
signals the process group of a rank. If ranks, endpoints and loader workers obeyed it, they would end before all ranks
have agreed on a last step and saved their checkpoints. A launcher therefore sets `SHIELD_VARIABLE` for its processes,
and so does a script that registers a stop callback without a launcher. Shielded processes start with SIGTERM blocked,
ignore the first one, and end after a second one. hetero itself ends them with another signal.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping

__all__ = ["END_SIGNALS", "SHIELD_VARIABLE", "end_signal", "sigterm_blocked_in_children", "survive_first_sigterm"]

SHIELD_VARIABLE = "HETERO_SHIELD"
"""Environment variable of processes that ignore the first SIGTERM, because only their parent should act on it."""
_OTHER_SIGNAL = signal.SIGVTALRM
"""This signal ends a process by default, like SIGTERM. Neither platforms nor frameworks use it."""
END_SIGNALS = (signal.SIGTERM, _OTHER_SIGNAL)
"""The values of `end_signal`."""


def end_signal() -> signal.Signals:
    """Return the signal that asks a process of hetero to end."""
    return _OTHER_SIGNAL if SHIELD_VARIABLE in os.environ else signal.SIGTERM


@contextlib.contextmanager
def sigterm_blocked_in_children(environ: Mapping[str, str] | None = None) -> Iterator[None]:
    """In the context, let shielded processes that this thread starts begin with SIGTERM blocked.

    A process is shielded from the platform's first SIGTERM if its environment has `SHIELD_VARIABLE`. It unblocks the
    signal when it can survive one, in `survive_first_sigterm`. Until then, a SIGTERM would end it.

    Args:
        environ: Environment of the processes. None: the environment of this process.
    """
    if SHIELD_VARIABLE not in (os.environ if environ is None else environ):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survive_first_sigterm() -> None:
    """If this process is shielded, ignore one SIGTERM, because a platform may send it to all processes of a job.

    Only the launcher acts on the platform's SIGTERM. A second SIGTERM ends this process. But if it arrives before
    Python has handled the first one, the two count as one. So a parent that wants to end this process sends
    `end_signal` instead of SIGTERM. Processes that the user's code starts here are not shielded: the first SIGTERM ends
    them. Call this on the main thread.
    """
    if SHIELD_VARIABLE not in os.environ:
        return
    # A handler and not SIG_IGN, because started programs would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, _end_at_next_sigterm)
    signal.siginterrupt(signal.SIGTERM, False)  # native code may not expect interrupted system calls
    # The parent has started this process with the signal blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    # A process that the user's code forks is not shielded, so its first SIGTERM must end it.
    os.register_at_fork(after_in_child=_end_at_next_sigterm)


def _end_at_next_sigterm(*_: object) -> None:
    """Let SIGTERM end this process from now on, unless the script has set another handler."""
    if signal.getsignal(signal.SIGTERM) is _end_at_next_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
