"""The output of child processes, line by line."""

from __future__ import annotations

import contextlib
import os
import selectors
from collections import deque
from collections.abc import Callable, Iterator

__all__ = ["Output", "Outputs"]

_MAX_LINE_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024


class Output:
    """The reading end of a process's output, cut into lines.

    Args:
        name: Name of the process.
        last_lines: Receives the lines and keeps the last ones, for the error if the process fails.
    """

    def __init__(self, name: str, last_lines: deque[str]) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)
        self.name = name
        self._last_lines = last_lines
        self._rest = b""

    def read(self, on_line: Callable[[str, str], None], *, max_reads: int = 1) -> bool:
        """Pass the lines that are there to ``on_line``, in at most ``max_reads`` reads. Return False at the end."""
        for _ in range(max_reads):
            try:
                chunk = os.read(self.read_end, _READ_BYTES)
            except BlockingIOError:
                return True
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if self._rest and (not chunk or len(self._rest) > _MAX_LINE_BYTES):
                lines.append(self._rest)
                self._rest = b""
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip("\r")
                self._last_lines.append(text)
                on_line(self.name, text)
            if not chunk:
                return False
        return True

    def close_write_end(self) -> None:
        """Close the writing end here, once the process has it."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        os.close(self.read_end)


class Outputs:
    """The output of all processes of a pool. For the pool's thread.

    Args:
        selector: Gets the reading ends, with the `Output` as data.
        on_line: Called with process name and line.
    """

    def __init__(self, selector: selectors.BaseSelector, on_line: Callable[[str, str], None]) -> None:
        self._selector = selector
        self._on_line = on_line
        self._open: list[Output] = []

    @contextlib.contextmanager
    def open(self, name: str, last_lines: deque[str]) -> Iterator[int]:
        """Make a pipe for a process's output. Yield the writing end for the process."""
        output = Output(name, last_lines)
        self._open.append(output)
        self._selector.register(output.read_end, selectors.EVENT_READ, output)
        try:
            yield output.write_end
        finally:
            output.close_write_end()

    def read(self, output: Output, *, max_reads: int = 1) -> None:
        """Pass on the lines of one output, and close it at its end. An output that is already closed is ignored."""
        if output in self._open and not output.read(self._on_line, max_reads=max_reads):
            self._close(output)

    def drain(self, name: str) -> None:
        """Pass on the remaining lines of a process that has ended."""
        for output in [each for each in self._open if each.name == name]:
            self.read(output, max_reads=16)

    def close(self) -> None:
        """Close all outputs."""
        for output in list(self._open):
            self._close(output)

    def _close(self, output: Output) -> None:
        self._selector.unregister(output.read_end)
        self._open.remove(output)
        output.close()
