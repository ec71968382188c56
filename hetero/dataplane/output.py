"""What a child process prints, line by line."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable

__all__ = ["Output"]

_MAX_LINE_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024


class Output:
    """The reading end of a process's output, cut into lines.

    Args:
        name: Of the process.
        last_lines: Keeps the end of the output, for the error if the process fails.
    """

    def __init__(self, name: str, last_lines: deque[str]) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.read_end, False)
        self.name = name
        self._last_lines = last_lines
        self._rest = b""

    def read(self, on_line: Callable[[str, str], None], *, max_reads: int = 1) -> bool:
        """Hand over what there is, at most so many pieces of it; False at the end."""
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
        """Leave the writing end to the process."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close both ends."""
        self.close_write_end()
        os.close(self.read_end)
