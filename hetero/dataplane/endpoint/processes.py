"""Processes of endpoints, as the fork server and zygotes see them."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from hetero.dataplane.endpoint.endpoint import run_to_end
from hetero.system.open_files import names_for_message, opened_since, reopen_files
from hetero.system.process import SignalWaiter, die_with_parent
from hetero.system.text import first_names

__all__ = ["EndpointProcess", "run_forked", "why_not_fork"]


class EndpointProcess:
    """One endpoint process: forked, fresh, or forked by a zygote.

    Args:
        index: Number of the endpoint on this host.
        incarnation: Id of the process in the directory.
        pid: Process id.
        process: The process if it is fresh. Only this object may reap it.
        channel: Socket to a forked process that may ask for data sets.
        is_of_zygote: Whether a zygote has forked the process, and reaps it.
    """

    def __init__(
        self,
        index: int,
        incarnation: str,
        pid: int,
        *,
        process: subprocess.Popen[bytes] | None = None,
        channel: socket.socket | None = None,
        is_of_zygote: bool = False,
    ) -> None:
        self.index = index
        self.incarnation = incarnation
        self.pid = pid
        self._process = process
        self.channel = channel
        self.is_of_zygote = is_of_zygote
        self.is_replaced = False
        """Whether a process of a zygote takes its place. Its end is then not the end of the endpoint."""

    def poll(self) -> int | None:
        """Return the exit status as `subprocess` does (-N for signal N), None while the process lives."""
        if self.is_of_zygote:
            return None  # the zygote reports it
        if self._process is not None:
            return self._process.poll()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        with contextlib.suppress(ProcessLookupError):  # the zygote has reaped it
            os.kill(self.pid, number)

    def close(self) -> None:
        """Close the channel."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


def run_forked(run: Callable[[], int], parent_pid: int, signals: SignalWaiter) -> NoReturn:
    """Run a process that was just forked to its end.

    Args:
        run: What the process does. Returns its exit status.
        parent_pid: The process that forked it, and ends it when it ends itself.
        signals: The parent's waiter, which this process leaves alone.
    """

    def start() -> int:
        die_with_parent(parent_pid)
        reopen_files()
        signals.abandon()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return run()

    run_to_end(start)


def why_not_fork(before: Mapping[int, str], action: str = "importing the script") -> str:
    """Return why this process must not fork endpoints, empty if it may fork.

    Args:
        before: What `open_files` returned before the action.
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
    gc.collect()  # it may close files that nothing uses any more
    if opened := opened_since(before):
        return f"{action} opened {first_names(names_for_message(opened.values()))}, which processes must not share"
    return ""
