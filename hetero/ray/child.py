"""The child process of an actor: a launcher, or the process that runs the hub. It never outlives the actor."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from hetero.control.security import TOKEN_FILE_VARIABLE, Token, token_memfd
from hetero.errors import ExitCode
from hetero.ray.head import RECONNECT_VARIABLE
from hetero.system.logs import write_line
from hetero.system.process import PARENT_VARIABLE
from hetero.system.waits import END_TIMEOUT_S

__all__ = ["Child"]

_MAX_LINES = 20
_NOT_FOR_CHILDREN = ("HETERO_PLATFORM", "HETERO_RAY_GROUPS", RECONNECT_VARIABLE)
"""Variables that a child must not inherit. With the first two, the child would start another job on Ray. The last one
is for this process only."""
_THREADS = "OMP_NUM_THREADS"
_AT_START = Path("/proc/self/environ")
"""The environment that this process had at its start."""


class Child:
    """A process that this actor starts. Thread-safe.

    A separate thread starts the process and waits for its end. The kernel kills a process with a parent-death signal
    when the thread that started it ends, and Ray may end the threads that run an actor's methods.

    Args:
        command: Arguments after the Python interpreter.
        token: The token of the job. The process reads it from anonymous memory of this process.
        folder: Current folder of the process.
        variables: Environment variables to add.
        on_line: Called with each line of the process's standard output. By default, the line is printed.
        on_error_line: The same for standard error.
        on_end: Called once, on the child's thread, with this object after the process has ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        token: Token,
        folder: str,
        variables: Mapping[str, str],
        on_line: Callable[[str], object] = write_line,
        on_error_line: Callable[[str], object] = write_line,
        on_end: Callable[[Child], object],
    ) -> None:
        self._command = [sys.executable, *command]
        self._folder = folder
        self._on_line = on_line
        self._on_error_line = on_error_line
        self._on_end = on_end
        self._token_descriptor, token_path = token_memfd(token)
        self._environ = {
            **_own_environ(),
            **variables,
            TOKEN_FILE_VARIABLE: token_path,
            PARENT_VARIABLE: str(os.getpid()),
            "PYTHONUNBUFFERED": "1",
        }
        self._lines: deque[str] = deque(maxlen=_MAX_LINES)
        """The last lines of standard error."""
        self._lock = threading.Lock()
        """Held while the process is started or gets a signal."""
        self._process: subprocess.Popen[str] | None = None
        self._sent: set[signal.Signals] = set()
        """Signals that `stop` was called with. If it was called before the start, the process is not started."""
        self._ended = threading.Event()
        self.exit_code: int | None = None
        """Exit code as `subprocess` returns it. RESOURCES if the process could not be started. None while it runs, and
        if it was stopped before its start."""
        self._thread = threading.Thread(target=self._run, name="child", daemon=True)
        self._thread.start()

    @property
    def was_asked_to_stop(self) -> bool:
        """Whether `stop` was called."""
        return bool(self._sent)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines that the process has written to standard error."""
        return tuple(self._lines)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal that ends the process, or asks it to end. Does not wait.

        Each signal is sent once, because a launcher that gets SIGTERM again does not finish what it computes.

        Args:
            number: The signal.
        """
        # Without the lock, `_run` might start the process after the check for a process, and the process would never
        # get the signal.
        with self._lock:
            is_new = number not in self._sent
            self._sent.add(number)
            if is_new and self._process is not None and self._process.poll() is None:
                self._process.send_signal(number)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait for the end of the process, at most ``timeout_s`` seconds. Return whether it has ended."""
        return self._ended.wait(timeout_s)

    def _run(self) -> None:
        """Start the process unless it was stopped before, follow it to its end, and call ``on_end``."""
        try:
            with self._lock:
                if not self._sent:
                    self._process = self._start()
            if self._process is not None:
                self._follow(self._process)
        except OSError as error:
            write_line(f"hetero: a process could not be started: {error}")
            self.exit_code = int(ExitCode.RESOURCES)
        finally:
            os.close(self._token_descriptor)
            self._ended.set()
            self._on_end(self)

    def _start(self) -> subprocess.Popen[str]:
        """Start the process in a new session, with pipes for its output."""
        return subprocess.Popen(
            self._command,
            cwd=self._folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Pass the lines on until the process has ended."""
        assert process.stdout is not None
        assert process.stderr is not None
        errors = threading.Thread(target=self._relay, args=(process.stderr,), name="relay", daemon=True)
        errors.start()
        with process.stdout as stream:
            for line in stream:
                self._on_line(line.rstrip("\n"))
        self.exit_code = process.wait()
        # Limit this wait, because a process that the child has left behind may keep the pipe open.
        errors.join(END_TIMEOUT_S)

    def _relay(self, stream: IO[str]) -> None:
        """Pass the lines of standard error on, and keep the last ones."""
        with stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))
                self._on_error_line(line.rstrip("\n"))


def _own_environ() -> dict[str, str]:
    """Return the environment of this process, without `_NOT_FOR_CHILDREN` and without Ray's limit of threads.

    Ray sets the limit in the processes of actors, to the CPUs that they have reserved. With this limit, a rank would
    compute with one thread, because the bundle of a host with GPUs has one CPU. If this process already had a limit at
    its start, the user has set the limit, and children inherit it.
    """
    left_out = {*_NOT_FOR_CHILDREN}
    # `os.environ` also has the variables that Ray has set later. /proc/self/environ has only the variables of the
    # start, each with a zero byte at its end.
    # A process whose memory may not be dumped (PR_SET_DUMPABLE) cannot read the file. Its children then keep the limit.
    with contextlib.suppress(OSError):
        is_limit_of_user = any(line.startswith(f"{_THREADS}=".encode()) for line in _AT_START.read_bytes().split(b"\0"))
        if not is_limit_of_user:
            left_out.add(_THREADS)
    return {name: value for name, value in os.environ.items() if name not in left_out}
