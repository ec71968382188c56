"""Processes of endpoints, as the fork server and the builder see them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hetero.documents.text import listing
from hetero.endpoint.endpoint import run_to_end
from hetero.system.open_files import names_for_message, opened_since, reopen_files
from hetero.system.process import SignalWaiter, die_with_parent

__all__ = ["EndpointProcess", "exit_status", "run_forked", "why_not_fork"]


@dataclass(slots=True, eq=False)
class EndpointProcess:
    """One endpoint process: forked or fresh."""

    index: int
    """Number of the endpoint on this host."""
    incarnation: str
    """Id of the process in the directory."""
    pid: int
    fresh: subprocess.Popen[bytes] | None = None
    """The process if it is fresh. Only this object may reap the process. None for a forked process."""
    output: int | None = None
    """Descriptor of the output of the process, for a process that replaces it. None if no process can replace it."""
    was_asked_to_end: bool = False
    """Whether the pool no longer wants the endpoint, and has asked it to end."""

    def poll(self) -> int | None:
        """Return the exit status as `subprocess` does (-N for signal N), None while the process lives."""
        return exit_status(self.pid) if self.fresh is None else self.fresh.poll()

    def wait(self) -> int:
        """Block until a forked process ends, and reap it. Return the exit status as `poll` does."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def signal(self, number: int) -> None:
        """Send a signal to the process. The process must not have been reaped."""
        os.kill(self.pid, number)

    def close(self) -> None:
        """Close the descriptor of its output. Idempotent."""
        if self.output is not None:
            os.close(self.output)
            self.output = None


def exit_status(pid: int) -> int | None:
    """Reap a child process if it has ended. Return its exit status as `subprocess` does, None while it lives."""
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def run_forked(run: Callable[[], int], parent_pid: int, signals: SignalWaiter) -> NoReturn:
    """Run a process that was just forked to its end.

    Args:
        run: Does the work of the process. Returns its exit status.
        parent_pid: The process that forked this process. When the parent ends, this process ends too.
        signals: The parent's waiter for signals. This process does not use it.
    """

    def start() -> int:
        """Separate this process from its parent, and do its work."""
        die_with_parent(parent_pid)
        # Open the files of the script or a factory again, because each process needs its own position in them. With
        # shared positions, 2,099 of 40,000 samples were wrong in a test.
        reopen_files()
        # The parent's waiter and its handler for the end of children are not for this process.
        signals.abandon()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return run()

    run_to_end(start)


def why_not_fork(before: Mapping[int, str], action: str = "importing the script") -> str:
    """Return why this process must not fork endpoints, empty if it may fork.

    A process with threads, TensorFlow, CUDA, or newly opened files or connections must not fork. Forked processes would
    share the position in an open file, and SQLite would lose its locks.

    Args:
        before: The result of `open_files` before the action.
        action: What this process has just done, for the text.
    """
    if threading.active_count() > 1:
        names = ", ".join(sorted(thread.name for thread in threading.enumerate() if thread.name != "MainThread"))
        return f"{action} started threads ({names})"
    if "tensorflow" in sys.modules:
        return f"{action} imported TensorFlow"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"{action} initialised CUDA"
    if not opened_since(before):
        return ""
    # Look again after a garbage collection, which may close files that are no longer used.
    gc.collect()
    if opened := opened_since(before):
        return f"{action} opened {listing(sorted(names_for_message(opened.values())))}, which processes must not share"
    return ""
