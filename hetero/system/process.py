"""Tools for all parts that start processes: parents, statuses, limits."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero.errors import ExitCode, ResourcesError
from hetero.system.cgroups import memory_use

if TYPE_CHECKING:
    import psutil

__all__ = [
    "SignalWaiter",
    "adopt_descendants",
    "allow_descriptors",
    "describe_exit_status",
    "die_with",
    "die_with_parent",
    "end_descendants",
    "is_resource_tracker",
    "kill_all",
    "limit_threads",
    "reap_adopted",
    "start_child",
    "thread_limits",
    "wait_gone",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACKER_GRACE_S = 2.0
_REAP_INTERVAL_S = 0.02
_MAX_DESCRIPTORS = 2**16
"""More than all connections need. It is limited because some programs try to close every possible descriptor."""

logger = logging.getLogger(__name__)

_starting = threading.Lock()
_own_children: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def die_with_parent(expected_parent_pid: int) -> None:
    """Let the kernel kill this process when the thread that started it ends.

    Call this first in the child. If the parent ended before the call, ``getppid`` differs from the expected id, and
    this process ends at once.

    Args:
        expected_parent_pid: The parent's process id, read in the parent.

    Raises:
        OSError: If the kernel rejects the call (not Linux).
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_parent_pid:
        os._exit(ExitCode.ORPHANED)


def die_with(pid: int) -> None:
    """Kill this process when another one ends, which may be any of its ancestors.

    It starts a thread, which `die_with_parent` does not need.

    Args:
        pid: The other process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(ExitCode.ORPHANED)

    def watch() -> None:
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="hetero-die-with", daemon=True).start()


def adopt_descendants() -> None:
    """Make orphans among this process's descendants its children, where `end_descendants` finds them.

    Raises:
        OSError: If the kernel rejects the call (not Linux).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(*, timeout_s: float = 10.0, on_poll: Callable[[], object] = lambda: None) -> None:
    """Kill every descendant of this process and wait for its end. Call this when no descendant may live on.

    A process that cannot be killed, because it waits for a device or runs as another user, is logged and left.

    Args:
        timeout_s: Time limit for all of them together, seconds.
        on_poll: Called several times a second during the wait.
    """
    import psutil

    begin_s = time.monotonic()
    while children := psutil.Process().children(recursive=True):
        on_poll()
        # Python's trackers remove semaphores and shared memory of dead processes, and end after the last of these.
        doomed = [child for child in children if not is_resource_tracker(child)]
        if not doomed and time.monotonic() < begin_s + _TRACKER_GRACE_S:
            psutil.wait_procs(children, timeout=0.1)
            continue
        children = doomed or children
        kill_all(children)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)  # a child of a child: this process inherits it, or it is gone
        if time.monotonic() > begin_s + timeout_s:
            names = ", ".join(str(child.pid) for child in children)
            logger.error("killed, but not gone after %.0f s: process %s; going on without them", timeout_s, names)
            return
        time.sleep(_REAP_INTERVAL_S)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process whose end the caller waits for. `reap_adopted` ignores it. The arguments are those of Popen."""
    with _starting:
        process = subprocess.Popen(command, **options)
        _own_children.add(process)
    return process


def reap_adopted() -> None:
    """Reap ended children that `start_child` did not start: orphans that this process has inherited.

    This process inherits orphans if it is process 1 of a container, or after `adopt_descendants`. Each ended orphan
    holds a place in the process table until it is reaped. Does not block.
    """
    with _starting:
        own = {process.pid for process in _own_children if process.returncode is None}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return  # the caller that started this child reaps it, and the next call reaches the ones behind it
            os.waitpid(ended.si_pid, os.WNOHANG)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes. Some of them may have ended already. Does not wait."""
    from psutil import Error

    for process in processes:
        with contextlib.suppress(Error):
            process.kill()


def allow_descriptors(needed: int = 0) -> None:
    """Raise the soft limit of open files to what the hard limit allows, because the usual 1,024 are too few.

    Args:
        needed: Least number that this process needs.

    Raises:
        ResourcesError: If the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    bound = sys.maxsize if hard == resource.RLIM_INFINITY else hard
    if bound < needed:
        raise ResourcesError(
            f"this process may open {bound} files, it needs about {needed}: raise the hard limit (ulimit -Hn, "
            "or LimitNOFILE= or --ulimit nofile= of whatever starts it)"
        )
    wanted = min(bound, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether this is a helper of Python's multiprocessing that cleans up after its process and then ends."""
    from psutil import Error

    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except Error:
        return False


def wait_gone(pids: Iterable[int], *, timeout_s: float) -> None:
    """Wait for a limited time until processes have ended, even if they are not reaped yet or others reap them.

    Args:
        pids: Ids of the processes.
        timeout_s: Time limit, seconds.
    """
    left = list(pids)
    deadline_s = time.monotonic() + timeout_s
    while (left := [pid for pid in left if _is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(_REAP_INTERVAL_S)


class SignalWaiter:
    """Makes it possible to wait for signals. Use it in the main thread, as a context manager.

    It uses a pipe, because an event that a signal handler sets can deadlock: the handler may run while the same thread
    holds the event's lock.

    Args:
        signals: The signals to wait for instead of their default action.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self._signals = signals
        self._before: list[tuple[signal.Signals, Any]] = []
        self._restore_wakeup: Callable[[], object] = lambda: None
        self._read_end = self._write_end = -1

    def __enter__(self) -> SignalWaiter:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._restore_wakeup = lambda: signal.set_wakeup_fd(previous)
        for number in self._signals:
            self._before.append((number, signal.signal(number, _ignore)))
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        for number, handler in self._before:
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def abandon(self) -> None:
        """Close the pipe without changing handlers, as a forked child does with its parent's waiter."""
        if self._read_end >= 0:
            self._restore_wakeup()
            os.close(self._read_end)
            os.close(self._write_end)
            self._read_end = self._write_end = -1

    def wait(self, timeout_s: float, *, descriptors: tuple[int, ...] = ()) -> set[int]:
        """Block until a signal arrives, a descriptor is readable, or the time is over.

        Returns:
            The numbers of the signals that arrived. Empty if a descriptor or the time ended the wait.
        """
        readable, _, _ = select.select([self._read_end, *descriptors], [], [], timeout_s)
        return set(os.read(self._read_end, 4096)) if self._read_end in readable else set()


def describe_exit_status(status: int) -> str:
    """Describe an exit status in one line.

    Args:
        status: Value as in `subprocess.Popen.returncode`, negative for a signal.
    """
    if status < 0:
        return _describe_signal(-status)
    if status == 0:
        return "ended normally"
    known = {int(code): code.help_text for code in ExitCode if code >= ExitCode.CLUSTER}
    if status in known:
        return f"exited with {status} (HET-{status}): {known[status]}"
    if status > 128 and status - 128 in {int(member) for member in signal.Signals}:
        return f"exited with {status}, as a shell reports {signal.Signals(status - 128).name}"
    return f"exited with {status}"


def thread_limits() -> dict[str, str]:
    """Return the environment that keeps numerical libraries at one thread.

    One preprocessing process uses one core. Thread pools of libraries would compete for the core, and results may
    depend on how many threads share a sum.
    """
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def limit_threads() -> None:
    """Limit the libraries that are already imported to one thread, see `thread_limits`."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        sys.modules["cv2"].setNumThreads(0)  # 0 means no threads in OpenCV, 1 still keeps a pool


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing, because the wake-up descriptor has already reported the signal."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _describe_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return f"killed by {name}, likely out of memory{_describe_memory()}"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return f"killed by {name}: a crash in native code"
    return f"killed by {name}"


def _describe_memory() -> str:
    use = memory_use()
    if use is None:
        return ""
    group = "its control group" if use.is_own else "a control group above its own"
    bound = "" if use.limit_bytes is None else f" of {use.limit_bytes / 2**30:.1f} GiB allowed"
    return f" (peak of {group}: {use.peak_bytes / 2**30:.1f} GiB{bound})"
