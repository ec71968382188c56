"""Shows the progress of a run, by a log line at intervals or by a terminal line that is redrawn."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from hetero.control.status import RankReport
from hetero.errors import ConfigError
from hetero.launch.summaries import longest_summary
from hetero.system.text import counted

__all__ = ["INTERVAL_VARIABLE", "PROGRESS_MARK", "StatusLine", "describe", "interval_s"]

INTERVAL_VARIABLE = "HETERO_PROGRESS_SECONDS"
"""Environment variable with the seconds between two progress lines, 10 by default. `hetero simulate` sets 1 if it runs
on a terminal."""
PROGRESS_MARK = "INFO progress: "
"""Text that marks progress lines. `hetero simulate` shows these lines in its status line."""


def interval_s(environ: Mapping[str, str]) -> float:
    """Return the seconds between two progress lines.

    Raises:
        ConfigError: If the variable is not a number in [0.1, 3600].
    """
    text = environ.get(INTERVAL_VARIABLE) or "10"
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 3600:
        raise ConfigError(f"{INTERVAL_VARIABLE} is {text!r}; expected seconds in [0.1, 3600]")
    return value


def describe(reports: Sequence[RankReport]) -> str:
    """Return one line with the progress of this host's ranks. Empty before the first step."""
    longest = longest_summary(part for report in reports for part in report.summaries_json)
    if longest is None:
        return ""
    text = f"{counted(longest.num_steps, 'step')} of {longest.name}"
    if longest.step_time_mean_s is not None and longest.utilisation is not None:
        text += f", {1000 * longest.step_time_mean_s:.0f} ms a step, {100 * (1 - longest.utilisation):.0f} % data wait"
    return text


class StatusLine:
    """The last line of a terminal, redrawn in place. Nothing is drawn if the stream is not a terminal.

    Args:
        stream: Stream to draw on.
        clock: Returns monotonic seconds.
    """

    def __init__(self, stream: TextIO = sys.stderr, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self.is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._clock = clock
        self._started_s = clock()
        self._text = "starting"

    def show(self, text: str) -> None:
        """Set the text of the line and draw it."""
        self._text = text
        self.draw()

    def draw(self) -> None:
        """Draw the line with the time that has passed since the start."""
        if self.is_live:
            seconds = int(self._clock() - self._started_s)
            line = f"{seconds // 60:02d}:{seconds % 60:02d} {self._text}"
            self._write(f"\r\x1b[K{line[: _columns() - 1]}")

    def clear(self) -> None:
        """Erase the line to make room for other output."""
        if self.is_live:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self.is_live = False


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80
