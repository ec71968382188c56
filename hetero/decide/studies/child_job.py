"""The processes of one run: their output with the time of each line, and their end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from hetero.documents.text import escape_line, shortened
from hetero.errors import ConfigError
from hetero.system.process import PARENT_VARIABLE, start_child
from hetero.system.scripts import python_path
from hetero.system.waits import END_TIMEOUT_S

__all__ = ["Job", "Line"]

_STOP_S = 90.0
"""Seconds from the request to stop until a run is killed. Ranks have 50 s to save a checkpoint."""
_MAX_LINE_BYTES = 64 * 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a run's output."""

    text: str
    at_s: float
    """Seconds since the start of the processes."""
    unix_s: float


class Job:
    """The processes of one run and their output."""

    def __init__(self, commands: Sequence[Sequence[str]], environment: Mapping[str, str], log: IO[str]) -> None:
        self._log = log
        self._started_s = time.monotonic()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stop_s: float | None = None
        self._lock = threading.Lock()
        try:
            for command in commands:
                self._start(command, environment)
        # A NUL in an argument, or a variable with = in its name, raises ValueError.
        except (OSError, ValueError) as error:
            self.close()
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ConfigError(
                f"cannot start {shortened(shlex.join(commands[0]), 200)}: {why}\n"
                "  to do: check the args and the environment of the study, and that the program exists"
            ) from error

    def _start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a command in a session of its own, and a thread that reads its output."""
        process = start_child(
            command,
            # With `PARENT_VARIABLE`, the command ends if the study is killed.
            env={**os.environ, **environment, PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": python_path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # In a session of its own, because Ctrl-C must reach only the study, which asks the run to stop.
            start_new_session=True,
        )
        assert process.stdout is not None
        self._processes.append(process)
        threading.Thread(target=self._read, args=(process.stdout,), name="study-output", daemon=True).start()

    def _read(self, stream: IO[bytes]) -> None:
        """Put the lines of one process into the queue, and None after the last one. Runs in a thread of its own."""
        # If another thread closes the stream, reading it raises an error. Treat this as the end of the stream.
        with contextlib.suppress(OSError, ValueError), stream:
            while line := stream.readline(_MAX_LINE_BYTES):
                self._lines.put(line)
        self._lines.put(None)

    def lines(self) -> Iterator[Line]:
        """Yield the lines of all processes as they arrive, until all outputs are closed."""
        num_open = len(self._processes)
        ended_s: float | None = None
        while num_open:
            try:
                line = self._lines.get(timeout=1.0)
            except queue.Empty:
                self._kill_if_late()
                if all(process.poll() is not None for process in self._processes):
                    # A process that the run left behind may hold the run's output open. The study once waited for ever
                    # for such a process.
                    ended_s = ended_s or time.monotonic()
                    if time.monotonic() - ended_s > END_TIMEOUT_S:
                        logger.warning("the run has ended, but a process that it started still holds its output")
                        return
                continue
            self._kill_if_late()
            if line is None:
                num_open -= 1
                continue
            # Replace bytes that are not UTF-8, because a script may write any bytes.
            text = escape_line(line.decode("utf-8", "replace").rstrip("\r\n"))
            self._log.write(text + "\n")
            self._log.flush()
            yield Line(text, time.monotonic() - self._started_s, time.time())

    def wait(self) -> list[int]:
        """Return the exit status of each process. Call this after `lines` has ended."""
        return [process.wait() for process in self._processes]

    def stop(self) -> None:
        """Ask all processes to stop, as a platform does. Idempotent."""
        with self._lock:
            if self._stop_s is None:
                self._stop_s = time.monotonic()
                for process in self._processes:
                    with contextlib.suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM)

    def _kill_if_late(self) -> None:
        """Kill the processes if they still run `_STOP_S` after they were asked to stop."""
        if self._stop_s is not None and time.monotonic() - self._stop_s > _STOP_S:
            self.close()

    def close(self) -> None:
        """Kill the processes that still run."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
