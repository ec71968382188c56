"""Cuts the output of child processes into lines and passes them on, in a separate thread or in the caller's."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

from hetero.system.process import start_child
from hetero.system.waits import END_TIMEOUT_S

__all__ = ["LineRelay", "LineSource"]

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
_MAX_LAST_READS = 64


class LineSource:
    """The output of one process: a pipe or a FIFO. Not thread-safe.

    Args:
        name: Name of the process.
        descriptor: The reading end. The source owns it and makes it non-blocking.
        on_line: Called with the name and each line without its end.
    """

    def __init__(self, name: str, descriptor: int, on_line: Callable[[str, str], None]) -> None:
        os.set_blocking(descriptor, False)
        self.name = name
        self.descriptor = descriptor
        self._on_line = on_line
        self._rest = b""  # the beginning of a line whose end has not arrived

    def read(self, max_reads: int = 1) -> bool:
        """Read at most ``max_reads`` times, and pass lines to ``on_line``. Return False at the end of the output."""
        for _ in range(max_reads):
            try:
                chunk = os.read(self.descriptor, _READ_BYTES)
            except BlockingIOError:  # nothing more has arrived yet
                break
            except OSError as error:
                logger.debug("reading the output of %s: %s", self.name, error)
                return False
            if not chunk:
                return False
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            # Pass on a long line before its end has arrived. A progress bar and binary output have no line ends.
            if len(self._rest) > _MAX_LINE_BYTES:
                lines.append(self._rest)
                self._rest = b""
            for line in lines:
                self._emit(line)
        return True

    def close(self) -> None:
        """Pass a last line without an end to ``on_line``, and close the descriptor. Idempotent."""
        if self._rest:
            self._emit(self._rest)
            self._rest = b""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _emit(self, line: bytes) -> None:
        # A progress bar redraws its line with carriage returns. Only the last state is kept.
        last_state = line.rstrip(b"\r").rsplit(b"\r", 1)[-1]
        self._on_line(self.name, last_state[:_MAX_LINE_BYTES].decode("utf-8", "replace"))


class LineRelay:
    """Reads pipes and FIFOs on one thread and passes their lines on.

    Args:
        write: Called with (source name, line without its end) on the relay's thread.
        tail_lines: Lines kept per source for error messages.
    """

    def __init__(self, write: Callable[[str, str], None], *, tail_lines: int = 20) -> None:
        self._write = write
        self._tail_lines = tail_lines
        self._tails: dict[str, collections.deque[str]] = {}
        """The last lines of each source, by its name."""
        self._discarded: list[int] = []
        """Descriptors that `discard` got, for the relay's thread."""
        # The pipe wakes the relay's thread, see `_poke`.
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, data=None)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        """Guards `_tails`, `_discarded` and `_wake_write`, and the registrations of `_selector`."""
        self._thread = threading.Thread(target=self._run, name="line-relay", daemon=True)
        self._thread.start()

    def add(self, name: str, descriptor: int) -> None:
        """Relay the output of ``descriptor``. The relay owns and closes it."""
        with self._lock:
            self._selector.register(descriptor, selectors.EVENT_READ, LineSource(name, descriptor, self.line))
        self._poke()

    def start(self, name: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a process in a new session and relay what it writes. Its standard input is empty.

        A signal to the group of this process, such as Ctrl-C, does not reach the new process. See `start_child`.

        Args:
            name: Name of the process.
            command: The program and its arguments.
            options: Further arguments of Popen.
        """
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        self.add(name, read_end)
        try:
            return start_child(
                command,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
                **options,
            )
        finally:
            # The process has its own copy. An open copy here would hide the end of the output.
            os.close(write_end)

    def discard(self, descriptor: int) -> None:
        """Relay the output that ``descriptor`` holds now, then close the descriptor. Does not wait.

        This is needed if another process keeps the writing end open, because the output then never ends.
        """
        with self._lock:
            self._discarded.append(descriptor)
        self._poke()

    def line(self, name: str, text: str) -> None:
        """Relay one line that did not come from a descriptor."""
        with self._lock:
            self._tails.setdefault(name, collections.deque(maxlen=self._tail_lines)).append(text)
        self._write(name, text)

    def tail(self, name: str) -> tuple[str, ...]:
        """Return the last lines of a source."""
        with self._lock:
            return tuple(self._tails.get(name, ()))

    def close(self) -> None:
        """Relay the rest of the pipes, then stop. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._poke()
        self._thread.join(END_TIMEOUT_S)
        # A thread that still relays needs the pipe that wakes it.
        if not self._thread.is_alive():
            with self._lock:
                os.close(self._wake_write)
                # Another file may get the number of the closed descriptor, and `_poke` must not write to that file.
                self._wake_write = -1

    def _poke(self) -> None:
        """Wake the thread of the relay."""
        # A full pipe means that the thread is awake. A broken pipe means that it has ended.
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _run(self) -> None:
        """Relay lines until `close` is called and no output is left. Runs on a separate thread."""
        stopping = False
        ready_sources: list[LineSource] = []
        # After `close` was called, go on until no source is ready. Otherwise the last lines of a process would be lost.
        while not stopping or ready_sources:
            with self._lock:
                discarded, self._discarded = self._discarded, []
            for descriptor in discarded:
                self._finish(descriptor)
            stopping = self._stopping.is_set()
            ready = self._selector.select(0 if stopping else 1.0)
            # Only the pipe that wakes this thread is registered without a source.
            ready_sources = [key.data for key, _ in ready if key.data is not None]
            if len(ready_sources) < len(ready):
                # Empty the pipe, or it would stay readable.
                os.read(self._wake_read, 4096)
            for source in ready_sources:
                if not source.read():
                    self._close(source)
        with self._lock:
            # Copy the map, because `_close` changes it.
            sources = list(self._selector.get_map().values())
        for key in sources:
            if key.data is not None:
                self._close(key.data)
        with self._lock:
            self._selector.unregister(self._wake_read)
        os.close(self._wake_read)

    def _finish(self, descriptor: int) -> None:
        """Relay what a discarded descriptor holds, and close it."""
        key = self._selector.get_map().get(descriptor)
        if key is not None:  # otherwise the source was at its end and is closed
            key.data.read(_MAX_LAST_READS)
            self._close(key.data)

    def _close(self, source: LineSource) -> None:
        """Stop watching a source, and close it."""
        with self._lock:
            self._selector.unregister(source.descriptor)
        source.close()
