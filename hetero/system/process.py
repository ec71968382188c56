"""Starts, watches and ends processes, limits them, and describes how they ended."""

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
from hetero.system.cgroups import memory_use, oom_kills
from hetero.system.stop_signals import sigterm_blocked_in_children
from hetero.system.waits import END_TIMEOUT_S, SHORT_POLL_S

if TYPE_CHECKING:
    import psutil

__all__ = [
    "PARENT_VARIABLE",
    "SignalWaiter",
    "adopt_descendants",
    "allow_descriptors",
    "bind_to_parent",
    "describe_exit_status",
    "die_with",
    "die_with_parent",
    "end_descendants",
    "is_resource_tracker",
    "is_suspended",
    "kill_all",
    "limit_threads",
    "reap_adopted",
    "start_child",
    "thread_limits",
    "wait_gone",
]

PARENT_VARIABLE = "HETERO_PARENT_PID"
"""Environment variable with the process that a new process must not outlive."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_TRACKER_GRACE_S = 2.0
_MAX_DESCRIPTORS = 2**16
"""More than all connections need. It is limited because some programs try to close every possible descriptor."""

logger = logging.getLogger(__name__)

_explained_kills = oom_kills()
"""Kills for lack of memory in the control group, before this process began or described by it. None if not counted."""
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
    # Check the parent after the call, because it may have ended just before the call.
    if os.getppid() != expected_parent_pid:
        os._exit(ExitCode.ORPHANED)


def bind_to_parent() -> None:
    """End this process when the process that `PARENT_VARIABLE` names ends.

    That process may be the parent or a more distant ancestor. Do nothing if the variable is not set.
    """
    # Remove the variable, because processes that this process starts have another parent.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    # The kernel can kill this process with its parent only. For another ancestor, a thread watches.
    if os.getppid() == int(parent):
        die_with_parent(int(parent))
    else:
        die_with(int(parent))


def die_with(pid: int) -> None:
    """Kill this process when another process ends, for example a distant ancestor.

    This starts a thread, which `die_with_parent` does not need.

    Args:
        pid: The other process.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(ExitCode.ORPHANED)

    def watch() -> None:
        # The descriptor becomes readable when the other process ends.
        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="hetero-die-with", daemon=True).start()


def adopt_descendants() -> None:
    """Make this process the parent of its orphaned descendants. Then `end_descendants` finds them.

    Raises:
        OSError: If the kernel rejects the call (not Linux).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_descendants(*, timeout_s: float = END_TIMEOUT_S, on_poll: Callable[[], object] = lambda: None) -> None:
    """Kill all descendants of this process and wait until they have ended.

    A process that cannot be killed, because it waits for a device or runs as another user, is logged and ignored.

    Args:
        timeout_s: Time limit for all of them together, seconds.
        on_poll: Called several times a second during the wait.
    """
    import psutil

    begin_s = time.monotonic()
    while children := psutil.Process().children(recursive=True):
        on_poll()
        # Python's resource trackers remove semaphores and shared memory of dead processes, and then end on their own.
        # So kill them last, and only if they have not ended within their grace.
        others = [child for child in children if not is_resource_tracker(child)]
        if not others and time.monotonic() < begin_s + _TRACKER_GRACE_S:
            psutil.wait_procs(children, timeout=0.1)
            continue
        doomed = others or children
        kill_all(doomed)
        for child in doomed:
            # Reap the child if it has ended. Otherwise `children` would list it for ever. `waitpid` fails for a child's
            # child until this process inherits it.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        if time.monotonic() > begin_s + timeout_s:
            names = ", ".join(str(child.pid) for child in doomed)
            logger.error(
                "not ended %.0f s after SIGKILL: process %s; continuing without waiting for them", timeout_s, names
            )
            return
        time.sleep(SHORT_POLL_S)


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process with Popen's arguments. The caller must wait for its end, because `reap_adopted` ignores it."""
    # Hold the lock, because `reap_adopted` must not reap a child that is not in the set yet.
    with _starting, sigterm_blocked_in_children(options.get("env")):
        process = subprocess.Popen(command, **options)
        _own_children.add(process)
    return process


def reap_adopted() -> None:
    """Reap ended orphans that this process has inherited. Children from `start_child` are left to their callers.

    This process inherits orphans if it is process 1 of a container, or after `adopt_descendants`. Each ended orphan
    takes an entry of the process table until it is reaped. Does not block.
    """
    # Hold the lock, because a child that `start_child` is starting may not be in the set yet.
    with _starting:
        own = {process.pid for process in _own_children if process.returncode is None}
        while True:
            try:
                # P_ALL means any child, so the id 0 is not used. WNOWAIT leaves the status of a child from
                # `start_child` to its caller.
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return  # the caller of `start_child` reaps it, and the next call handles the others
            os.waitpid(ended.si_pid, os.WNOHANG)


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Kill processes. Some of them may have ended already. Does not wait."""
    from psutil import Error

    for process in processes:
        with contextlib.suppress(Error):
            process.kill()


def allow_descriptors(needed: int = 0) -> None:
    """Raise this process's soft limit of open files to 65,536, or to the hard limit if that is lower.

    A soft limit is usually 1,024 files, which are too few. A higher soft limit stays unchanged.

    Args:
        needed: Smallest number of files that this process has to open.

    Raises:
        ResourcesError: If the hard limit is lower than ``needed``.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # RLIM_INFINITY is -1, so both comparisons below need a large number instead.
    most = sys.maxsize if hard_limit == resource.RLIM_INFINITY else hard_limit
    if most < needed:
        raise ResourcesError(
            f"this process may open {most} files, it needs about {needed}: raise the hard limit (ulimit -Hn, "
            "or LimitNOFILE= or --ulimit nofile= of whatever starts it)"
        )
    new_limit = min(most, _MAX_DESCRIPTORS)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < new_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))


def is_resource_tracker(process: psutil.Process) -> bool:
    """Return whether this is a helper of Python's multiprocessing that cleans up after its process and then ends."""
    from psutil import Error

    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except Error:
        return False


def wait_gone(pids: Iterable[int], *, timeout_s: float) -> bool:
    """Wait until processes have ended, and return whether all have. They need not be children of this process.

    A process that is not reaped yet counts as ended.

    Args:
        pids: Ids of the processes.
        timeout_s: Time limit, seconds.
    """
    left = list(pids)
    deadline_s = time.monotonic() + timeout_s
    # Poll, because only a parent can wait for the end of a process.
    while (left := [pid for pid in left if _is_alive(pid)]) and time.monotonic() < deadline_s:
        time.sleep(SHORT_POLL_S)
    return not left


class SignalWaiter:
    """Waits for signals. Use it in the main thread, as a context manager.

    The waiter uses a pipe, because an event that a signal handler sets can deadlock: the handler may run while the same
    thread holds the event's lock.

    Processes that are forked meanwhile have the default action again. Otherwise the processes of a script could not be
    ended, and a signal to one of them would count as a signal to this process.

    Args:
        signals: The signals to wait for instead of their default action.
    """

    def __init__(self, signals: tuple[signal.Signals, ...]) -> None:
        self._signals = signals
        self._handlers_before: list[tuple[signal.Signals, Any]] = []
        # Set in `__enter__`.
        self._restore_wakeup: Callable[[], object] = lambda: None
        self._read_end = self._write_end = -1

    def __enter__(self) -> SignalWaiter:
        """Let Python write the number of each arriving signal to a pipe, which `wait` reads."""
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._restore_wakeup = lambda: signal.set_wakeup_fd(previous)
        for number in self._signals:
            # Python writes to the pipe only for signals with a handler, even if the handler does nothing.
            self._handlers_before.append((number, signal.signal(number, _ignore)))
        # Forked children give the signals of these waiters their default action, see `_reset_in_child`.
        _waiting.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()
        for number, handler in self._handlers_before:
            # If code outside of Python had set the handler, it is None here, and Python cannot set it again.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def abandon(self) -> None:
        """Close the pipe. `__exit__` restores the signal handlers. In a forked child, `reset` has changed them."""
        _waiting.discard(self)
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
        # Each byte in the pipe is the number of a signal.
        return set(os.read(self._read_end, 4096)) if self._read_end in readable else set()

    def reset(self) -> None:
        """Give the signals their default action. `_reset_in_child` calls this in each forked child."""
        # -1 means no pipe. A signal to this child must not reach the parent's pipe.
        signal.set_wakeup_fd(-1)
        for number in self._signals:
            signal.signal(number, signal.SIG_DFL)


_waiting: weakref.WeakSet[SignalWaiter] = weakref.WeakSet()


def _reset_in_child() -> None:
    """Give the signals that a waiter of the parent waits for their default action. Runs in each forked child."""
    for waiter in list(_waiting):
        waiter.reset()


os.register_at_fork(after_in_child=_reset_in_child)


def describe_exit_status(status: int) -> str:
    """Describe an exit status in one line.

    Args:
        status: Value as in `subprocess.Popen.returncode`, negative for a signal.
    """
    if status < 0:
        return _describe_signal(-status)
    if status == 0:
        return "ended normally"
    # Leave out lower codes, because programs that do not belong to hetero use them too.
    known = {int(code): code.help_text for code in ExitCode if code >= ExitCode.CLUSTER}
    if status in known:
        return f"exited with {status} (HET-{status}): {known[status]}"
    # A shell adds 128 to the number of the signal that ended its child.
    if status > 128 and status - 128 in {int(member) for member in signal.Signals}:
        return f"exited with {status}, as a shell reports {signal.Signals(status - 128).name}"
    return f"exited with {status}"


def thread_limits() -> dict[str, str]:
    """Return the environment variables that limit numerical libraries to one thread.

    One preprocessing process uses one core. Thread pools of libraries would compete for the core, and results may
    depend on the number of threads that compute a sum.
    """
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def limit_threads() -> None:
    """Limit libraries that are already imported to one thread. See `thread_limits` for the reason."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "cv2" in sys.modules:
        # 0 means no threads in OpenCV. 1 still keeps a pool.
        sys.modules["cv2"].setNumThreads(0)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing, because the wake-up descriptor has already reported the signal."""


def _prctl(option: int, value: int) -> None:
    """Call ``prctl`` of the C library. Raise `OSError` if the kernel rejects the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    # The options in this module take one value. The kernel does not use the other three arguments.
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def is_suspended(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process, False if the process does not exist."""
    return _state(pid) in ("T", "t")


def _is_alive(pid: int) -> bool:
    """Return whether a process runs. A process that has ended and is not reaped does not count."""
    return _state(pid) not in ("", "Z")


def _state(pid: int) -> str:
    """Return the letter of a process's state, see proc(5). Empty if the process does not exist."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    # Split at the last parenthesis, because the name before it may have blanks and parentheses.
    return stat.rpartition(")")[2].split()[0]


def _describe_signal(number: int) -> str:
    """Describe the end of a process by a signal, with the likely reason."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number == signal.SIGKILL:
        return f"killed by {name}{_explain_kill()}"
    if number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return f"killed by {name}: a crash in native code"
    return f"killed by {name}"


def _explain_kill() -> str:
    """Return what the kernel's counter shows about the reason why a process was killed. Each count explains one kill.

    The counter belongs to this process's control group. The killed process may have been in another one.
    """
    global _explained_kills
    num_kills = oom_kills()
    # Without a counter for this process's group, there are two possible reasons.
    if num_kills is None or _explained_kills is None:
        return f", by another process or out of memory{_describe_memory()}"
    # The counter has not grown, so the kernel killed no other process since the last one that was described.
    if num_kills <= _explained_kills:
        return ": the kernel counted no lack of memory here"
    _explained_kills += 1
    return f", likely out of memory{_describe_memory()}"


def _describe_memory() -> str:
    """Return the peak memory of the control group and its limit, as text. Empty if they are not known."""
    use = memory_use()
    if use is None:
        return ""
    group = "its control group" if use.is_own else "a control group above its own"
    bound = "" if use.limit_bytes is None else f" of {use.limit_bytes / 2**30:.1f} GiB allowed"
    return f" (peak of {group}: {use.peak_bytes / 2**30:.1f} GiB{bound})"
