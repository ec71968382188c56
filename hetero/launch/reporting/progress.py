"""Shows the progress of a run, by a log line at intervals or by a terminal line that is redrawn.

The first trainer host measures the progress and logs it in words. On a terminal, `hetero simulate` draws the words with
a bar.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from hetero.control.status import HostStatus, RankReport
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.launch.reporting.summaries import named_summaries

__all__ = [
    "INTERVAL_VARIABLE",
    "PROGRESS_MARK",
    "Pace",
    "Progress",
    "StatusLine",
    "bar_line",
    "describe",
    "interval_s",
    "measure",
]

INTERVAL_VARIABLE = "HETERO_PROGRESS_SECONDS"
"""Environment variable with the seconds between two progress lines, 10 by default. `hetero simulate` sets 1 if it runs
on a terminal."""
PROGRESS_MARK = "INFO progress: "
"""Text that marks progress lines. `hetero simulate` shows these lines in its status line."""
_CELLS = 10
"""Cells of a bar. A terminal of 80 columns then has room for the time left too."""
_STEPS = re.compile(r"step ([0-9]{1,16}) of ([1-9][0-9]{0,15}) in pass ")
"""Beginning of the text about a progress, if the length of the pass is known."""


def interval_s(environ: Mapping[str, str]) -> float:
    """Return the seconds between two progress lines.

    Raises:
        ConfigError: If the variable is not a number in [0.1, 3600].
    """
    text = environ.get(INTERVAL_VARIABLE) or "10"
    try:
        value = float(text)
    # -1 is out of the range, so a text that is not a number is rejected below.
    except ValueError:
        value = -1.0
    if not 0.1 <= value <= 3600:
        raise ConfigError(f"{INTERVAL_VARIABLE} is {text!r}; expected seconds in [0.1, 3600]")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the ranks do steps, on average after the warm-up."""

    samples_per_s: float
    """Samples per second of all ranks together."""
    data_wait: float
    """Share of the ranks' time that is data wait, in [0, 1]."""
    left_s: float | None
    """Seconds until the end of the pass. None if its length is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of one loader."""

    loader: str
    step: int
    """Steps of the pass that were done. If the length of the pass is not known, all steps that were done."""
    pass_steps: int | None
    """Steps of the pass, at least 1. None if its length is not known."""
    pass_number: int
    """Number of the pass since the ranks started, from 1. 0 if the length of the pass is not known."""
    pace: Pace | None
    """None if the pace is not known for all ranks, for example during the warm-up."""


def measure(trainers: Sequence[HostStatus]) -> Progress | None:
    """Return the progress of the job. None before the first step.

    This is the progress of the loader whose step began last on the rank with the lowest number. Ranks do their steps
    together, unless that rank validates alone.

    Args:
        trainers: Last status of each trainer host.
    """
    reports = {report.rank: report for status in trainers for report in status.ranks}
    if not reports:
        return None
    lowest = reports[min(reports)]
    with_steps = {name: each for name, each in named_summaries(lowest.summaries_json).items() if each.num_steps}
    if not with_steps:
        return None
    loader = lowest.loader
    # If the first batch of this loader has not arrived yet, use the loader that has taken the most time.
    if loader not in with_steps:
        loader = max(with_steps, key=lambda name: with_steps[name].total_s)
    summary = with_steps[loader]
    steps_left = summary.pass_steps_left if summary.pass_steps else None
    pace = None
    # If a host has not reported its ranks yet, the pace of all ranks is not known.
    if all(status.ranks for status in trainers):
        pace = _pace(loader, reports.values(), steps_left)
    if not summary.pass_steps:
        return Progress(loader=loader, step=summary.num_steps, pass_steps=None, pass_number=0, pace=pace)
    # Use the loader's own count. The count of all steps is wrong after a resumed state, after a pass that was left
    # early, and with drop_last.
    step = max(0, summary.pass_steps - summary.pass_steps_left)
    pass_number = summary.num_passes
    return Progress(loader=loader, step=step, pass_steps=summary.pass_steps, pass_number=pass_number, pace=pace)


def describe(progress: Progress) -> str:
    """Return the progress in words. The most important figures come first, because a terminal cuts the rest."""
    if progress.pass_steps is None:
        text = f"{counted(progress.step, 'step')} of {progress.loader}"
    else:
        place = f"step {progress.step} of {progress.pass_steps} in pass {progress.pass_number}"
        text = f"{place} of {progress.loader}"
    pace = progress.pace
    if pace is None:
        return text
    time_left = "" if pace.left_s is None else f", {_clock_text(pace.left_s)} left in this pass"
    # A rate below ten has one decimal. 9.95 would be rounded to 10.0.
    rate = f"{pace.samples_per_s:.0f}" if pace.samples_per_s >= 9.95 else f"{pace.samples_per_s:.1f}"
    return f"{text}{time_left}, {rate} samples/s, {100 * pace.data_wait:.0f} % data wait"


def bar_line(text: str, columns: int) -> str:
    """Return a text as one line of a terminal. If the text is a progress in a pass of known length, add a bar.

    Args:
        text: Any text.
        columns: Most characters of the line.
    """
    found = _STEPS.match(text)
    if found is not None:
        num_full = _CELLS * min(int(found[1]), int(found[2])) // int(found[2])
        # ASCII without colours is readable on every terminal, and NO_COLOR then changes nothing.
        text = f"[{'#' * num_full}{'-' * (_CELLS - num_full)}] {text}"
    return text[: max(0, columns)]


def _pace(loader: str, reports: Iterable[RankReport], steps_left: int | None) -> Pace | None:
    """Return the average pace of the ranks that use a loader, after their warm-up. None if a pace is unknown."""
    samples_per_s = all_ranks_s = all_waits_s = longest_step_s = 0.0
    for report in reports:
        summaries = named_summaries(report.summaries_json)
        # A status that would have been too large was sent without summaries.
        if not summaries:
            return None
        summary = summaries.get(loader)
        # This rank does not use the loader.
        if summary is None or not summary.num_steps:
            continue
        # This rank is in its warm-up.
        if not summary.num_steps_measured or not summary.total_s:
            return None
        samples_per_s += summary.num_samples_measured / summary.total_s
        all_ranks_s += summary.total_s
        all_waits_s += summary.data_wait_total_s
        longest_step_s = max(longest_step_s, summary.total_s / summary.num_steps_measured)
    # The slowest rank decides when the pass ends.
    left_s = None if steps_left is None else steps_left * longest_step_s
    # ``all_ranks_s`` is above 0, because the lowest rank has done steps of the loader that `measure` chooses.
    return Pace(samples_per_s=samples_per_s, data_wait=all_waits_s / all_ranks_s, left_s=left_s)


def _clock_text(total_s: float) -> str:
    minutes, seconds = divmod(round(total_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class StatusLine:
    """The last line of a terminal, redrawn in place, without colours. Nothing is drawn elsewhere.

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
        """Draw the line with the time that has passed since the start, and with a bar if the text is a progress."""
        if self.is_live:
            seconds = int(self._clock() - self._started_s)
            clock = f"{seconds // 60:02d}:{seconds % 60:02d} "
            # In the last column, some terminals begin a new line.
            columns = self._columns() - 1
            line = clock + bar_line(self._text, columns - len(clock))
            self._write(f"\r\x1b[K{line[:columns]}")

    def clear(self) -> None:
        """Erase the line to make room for other output."""
        if self.is_live:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        """Write a text to the terminal. If that fails, draw nothing from now on."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The job goes on without this line if its terminal has gone (F37).
            self.is_live = False

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80
