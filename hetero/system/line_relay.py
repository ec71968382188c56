"""Copies the output of child processes line by line, and keeps the last lines of each."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import threading
from collections.abc import Callable

__all__ = ["LineRelay"]

logger = logging.getLogger(__name__)

_MAX_LINE_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
_MAX_LAST_READS = 64


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
        self._partial: dict[int, bytes] = {}
        self._discarded: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="line-relay", daemon=True)
        self._thread.start()

    def add(self, name: str, descriptor: int) -> None:
        """Relay the output of ``descriptor``. The relay owns and closes it."""
        os.set_blocking(descriptor, False)
        with self._lock:
            self._tails.setdefault(name, collections.deque(maxlen=self._tail_lines))
            self._selector.register(descriptor, selectors.EVENT_READ, name)
        self._poke()

    def discard(self, descriptor: int) -> None:
        """Relay the rest of ``descriptor``, then close it. For a descriptor without an end of file. Does not wait."""
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
        self._thread.join(5.0)
        if not self._thread.is_alive():
            with self._lock:
                os.close(self._wake_write)
                self._wake_write = -1

    def _poke(self) -> None:
        # A full pipe means that the thread is awake. A broken pipe means that it has ended.
        with self._lock, contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def _run(self) -> None:
        while True:
            with self._lock:
                discarded, self._discarded = self._discarded, []
            for descriptor in discarded:
                self._finish(descriptor)
            with self._lock:
                sources = dict(self._selector.get_map())
            stopping = self._stopping.is_set()
            ready = self._selector.select(0 if stopping else 1.0)
            for key, _ in ready:
                if key.data is None:
                    os.read(self._wake_read, 4096)
                else:
                    self._drain(key.fd, key.data)
            if stopping and not any(key.data is not None for key, _ in ready):
                break
        for key in sources.values():
            self._close(key.fd, key.data)

    def _finish(self, descriptor: int) -> None:
        key = self._selector.get_map().get(descriptor)
        if key is None:
            return  # it has reached its end already
        for _ in range(_MAX_LAST_READS):
            if not self._drain(descriptor, key.data):
                break
        if descriptor in self._selector.get_map():
            self._close(descriptor, key.data)

    def _drain(self, descriptor: int, name: str) -> bool:
        """Relay the available output. Return False if there is none, or at the end."""
        try:
            chunk = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            logger.debug("reading the output of %s: %s", name, error)
            chunk = b""
        if not chunk:
            self._close(descriptor, name)
            return False
        *lines, rest = (self._partial.pop(descriptor, b"") + chunk).split(b"\n")
        if len(rest) > _MAX_LINE_BYTES:  # a progress bar without a line end, or binary output
            lines.append(rest)
            rest = b""
        self._partial[descriptor] = rest
        for line in lines:
            self._emit(name, line)
        return True

    def _emit(self, name: str, line: bytes) -> None:
        # A progress bar redraws its line with carriage returns. Only the last state is kept.
        text = line.rstrip(b"\r").rsplit(b"\r", 1)[-1][:_MAX_LINE_BYTES].decode("utf-8", "replace")
        self.line(name, text)

    def _close(self, descriptor: int, name: str | None) -> None:
        rest = self._partial.pop(descriptor, b"")
        if rest and name is not None:
            self._emit(name, rest)
        with self._lock:
            self._selector.unregister(descriptor)
        os.close(descriptor)
