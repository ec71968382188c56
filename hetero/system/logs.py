"""Log lines that name their origin. Text inside a line cannot forge another line.

Every line goes to standard error as ``[group host role] LEVEL message``, without colours. Control characters are
escaped. A message of several lines has the prefix on each line. Therefore no remote traceback and no output of a
training script can look like another host's line.

A process that must not wait for the reader of its output (a pager, or a log collector that has stopped) writes on a
separate thread, see `write_behind`.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator

from hetero.documents.text import escape_line
from hetero.system.waits import POLL_S

__all__ = [
    "LineWriter",
    "LoggedErrors",
    "dropped_lines",
    "relay_line",
    "setup_logging",
    "setup_logging_of_script",
    "write_behind",
    "write_line",
]

_logger = logging.getLogger(__name__)

_MAX_WAITING_BYTES = 4 * 2**20
_CHUNK_BYTES = select.PIPE_BUF
"""Bytes of lines written at once. A pipe accepts all or none of this many, so no reader gets half a line."""
_LAST_WRITES_S = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def setup_logging(group: str, host: str, role: str, level: str = "info") -> None:
    """Send this process's log to standard error with a prefix. A second call replaces the first.

    Args:
        group: Instance group, or another name for this process. The prefix leaves out empty arguments.
        host: Name of this host.
        role: Role of this host.
        level: ``debug``, ``info``, ``warning`` or ``error``, for hetero's own messages. Messages of libraries are shown
            from ``warning`` up, unless the level is ``debug``.
    """
    _output.prefix = f"[{' '.join(_escape_part(part) for part in (group, host, role) if part)}] "
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, _Handler):
            root.removeHandler(handler)
    root.addHandler(_Handler())
    hetero_level = logging.getLevelName(level.upper())
    # At the level debug, show all messages of libraries too. At other levels, show at most their warnings.
    root.setLevel(hetero_level if hetero_level == logging.DEBUG else max(hetero_level, logging.WARNING))
    logging.getLogger("hetero").setLevel(hetero_level)


def setup_logging_of_script() -> None:
    """Show hetero's messages in a process that runs the user's script, and leave the root logger to the script.

    A handler on the root logger would disable the script's ``logging.basicConfig``. It would also print the lines of
    libraries that bring their own handler (Lightning, transformers) a second time.
    """
    hetero_logger = logging.getLogger("hetero")
    hetero_logger.setLevel(logging.INFO)
    # A second handler after a second call would write each message twice.
    if not any(isinstance(handler, _UntilConfigured) for handler in hetero_logger.handlers):
        handler = _UntilConfigured()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        hetero_logger.addHandler(handler)


def _escape_part(text: str) -> str:
    """Escape a name for the prefix, also brackets, which would end the prefix. Group names may hold any character."""
    return escape_line(text).replace("[", r"\x5b").replace("]", r"\x5d")


def relay_line(source: str, text: str) -> None:
    """Write one line of a child's output with this process's prefix.

    Args:
        source: Name of the child, for example ``rank 1``.
        text: The child's line, without its end.
    """
    write_line(f"{_output.prefix}{source}: {text}")


def write_line(line: str) -> None:
    """Escape and write a line that already has its prefix.

    If the output is closed or full, the line is lost without an error.
    """
    writer = _output.writer
    if writer is not None:
        writer.put(escape_line(line))
        return
    try:
        sys.stderr.write(escape_line(line) + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


class LineWriter:
    """Writes lines to a descriptor on a separate thread, so the caller never waits. Thread-safe.

    If the reader is too slow or the disk is full, lines are dropped and counted. Their number is written when there is
    room again.

    Args:
        descriptor: Descriptor to write to. It stays open.
        max_bytes: Bytes of lines that may wait.
    """

    def __init__(self, descriptor: int, *, max_bytes: int = _MAX_WAITING_BYTES) -> None:
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._lines: collections.deque[bytes] = collections.deque()
        self._num_bytes = 0  # of the lines in the queue
        self._num_dropped = 0
        self._num_reported = 0  # dropped lines that a written line has reported
        self._is_broken = False  # whether the reader of the descriptor has gone
        self._is_closed = False
        self._is_idle = True  # whether the thread has written all the lines that it has taken
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Number of lines lost so far."""
        with self._changed:
            return self._num_dropped

    def put(self, line: str) -> None:
        """Queue a line, or drop it if the queue is full. Does not wait."""
        data = line.encode("utf-8", "replace") + b"\n"
        with self._changed:
            # Do not wait for room. In an earlier version, a program that had stopped reading the output blocked the
            # launcher's threads. The launcher then read no output of the ranks, so their pipes filled and blocked them.
            if self._is_closed or self._is_broken or self._num_bytes + len(data) > self._max_bytes:
                self._num_dropped += 1
                return
            # The report takes the place of the dropped lines, before the line that comes after them.
            self._queue_report_of_dropped()
            self._lines.append(data)
            self._num_bytes += len(data)
            self._changed.notify_all()

    def _queue_report_of_dropped(self) -> None:
        """Queue a line with the number of lines that were dropped since the last such line. The caller has the lock."""
        count, self._num_reported = self._num_dropped - self._num_reported, self._num_dropped
        if count:
            why = "this output was read too slowly, or its disk was full"
            text = f"{_output.prefix}WARNING {count} lines were dropped here: {why}"
            self._lines.append(text.encode("utf-8", "replace") + b"\n")
            self._num_bytes += len(self._lines[-1])

    def close(self, timeout_s: float = _LAST_WRITES_S) -> None:
        """Write the waiting lines, for at most ``timeout_s`` seconds, then drop the rest. Idempotent."""
        with self._changed:
            self._changed.wait_for(lambda: (self._is_idle and not self._lines) or self._is_broken, timeout_s)
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        """Write the queued lines until `close` is called. Runs on a separate thread."""
        while chunk := self._take():
            try:
                self._write(chunk)
            except OSError:
                # The reader is gone. `put` drops all further lines, so `_take` returns only after `close`.
                with self._changed:
                    self._is_broken = True
                    self._num_dropped += len(self._lines)
                    self._lines.clear()
                    self._num_bytes = 0
                    self._changed.notify_all()

    def _take(self) -> bytes:
        """Wait for lines and return the next ones, or empty bytes after `close`."""
        with self._changed:
            self._is_idle = True
            self._changed.notify_all()
            # If no line follows the dropped ones, report them now, because there is room again.
            if not self._lines and not self._is_broken:
                self._queue_report_of_dropped()
            self._changed.wait_for(lambda: self._lines or self._is_closed)
            if self._is_closed:
                return b""
            self._is_idle = False
            lines: list[bytes] = []
            num_bytes = 0
            # Take at least one line, because a single line may be longer than a chunk.
            while self._lines and (not lines or num_bytes + len(self._lines[0]) <= _CHUNK_BYTES):
                lines.append(self._lines.popleft())
                num_bytes += len(lines[-1])
            self._num_bytes -= num_bytes
            return b"".join(lines)

    def _write(self, chunk: bytes) -> None:
        """Write a chunk completely, and wait while the disk is full. Raise `OSError` if the reader has gone."""
        while chunk:
            try:
                written = os.write(self._descriptor, chunk)
            except BlockingIOError:  # another process that shares the descriptor has made it non-blocking
                select.select([], [self._descriptor], [], 1.0)
                continue
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                # The user may make room on the full disk meanwhile.
                with self._changed:
                    if self._changed.wait_for(lambda: self._is_closed, POLL_S):
                        return
                continue
            chunk = chunk[written:]


@contextlib.contextmanager
def write_behind() -> Iterator[None]:
    """Inside the block, write lines on a separate thread if standard error has a descriptor."""
    try:
        writer = LineWriter(sys.stderr.fileno())
    except (OSError, ValueError):  # a test captures standard error, or it is closed
        yield
        return
    _output.writer = writer
    try:
        yield
    finally:
        writer.close()
        # If lines were dropped, keep the closed writer, which drops all further lines. The reader has stopped, and a
        # direct write would wait for it.
        if not writer.num_dropped:
            _output.writer = None


def dropped_lines() -> int:
    """Return how many lines of this process were lost because the output was read too slowly."""
    writer = _output.writer
    return 0 if writer is None else writer.num_dropped


class LoggedErrors:
    """Logs unexpected errors of a thread, each one once, and lets the thread continue. Use one object per thread."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Catch and log errors of the block. Log each text only once, because a loop may repeat the same error often.

        Args:
            what: What the block does, for the log.
        """
        try:
            yield
        except Exception as error:
            text = f"{what} failed: {error!r}"
            if text not in self._logged:
                self._logged.add(text)
                _logger.exception("%s; continuing", text)


class _Output:
    """The prefix of this process's lines, and the writer that writes them."""

    prefix = ""
    writer: LineWriter | None = None


class _UntilConfigured(logging.Handler):
    """Writes to standard error unless the root logger has handlers that show the same records."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the script has its own handlers."""
        # A NullHandler shows nothing. Libraries add one only to silence `logging.lastResort`, so it does not count.
        if not all(isinstance(handler, logging.NullHandler) for handler in logging.getLogger().handlers):
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001
            self.handleError(record)


class _Handler(logging.Handler):
    """Writes every line of a record with the prefix, and marks lines after the first."""

    def emit(self, record: logging.LogRecord) -> None:
        """Format and write a record."""
        try:
            first, *others = self.format(record).splitlines() or [""]
        except Exception:  # noqa: BLE001
            # A message that cannot be formatted must not end the thread that logs it.
            self.handleError(record)
            return
        head = f"{_output.prefix}{record.levelname} "
        write_line(head + first)
        for line in others:
            write_line(f"{head}| {line}")


_output = _Output()
