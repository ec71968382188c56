"""Shows the progress of a run, by a log line at intervals or by a terminal line that is redrawn.

The first trainer host measures the progress and logs it in words. On a terminal, `hetero simulate` parses the words and
draws them with a bar.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from hetero.control.status import HostStatus, RankReport
from hetero.documents.text import counted
from hetero.errors import ConfigError
from hetero.launch.reporting.summaries import named_summaries
from hetero.metrics.steps import StepSummary

__all__ = [
    "INTERVAL_VARIABLE",
    "PROGRESS_MARK",
    "RECENT_LINES",
    "Pace",
    "Progress",
    "StatusLine",
    "bar_line",
    "describe",
    "interval_s",
    "measure",
    "parse",
]

INTERVAL_VARIABLE = "HETERO_PROGRESS_SECONDS"
"""Environment variable with the seconds between two progress lines, 10 by default. `hetero simulate` sets 1 if it runs
on a terminal."""
PROGRESS_MARK = "INFO progress: "
"""Text that marks progress lines. `hetero simulate` shows these lines in its status line."""
RECENT_LINES = 10
"""Number of lines that the pace reaches back. The single second between two lines on a terminal may have no step."""
_MIN_BAR = 6
"""Columns of the shortest bar, ``[##--]``."""
_OF_PASS = " in this pass"
_LINE = re.compile(
    r"(?:step (?P<step>[0-9]{1,16}) of (?P<pass_steps>[1-9][0-9]{0,15}) in pass (?P<pass_number>[0-9]{1,16})"
    r"|(?P<num_steps>[0-9]{1,16}) steps?) of (?P<loader>.+?)"
    r"(?:, (?P<rate>[0-9]{1,20}(?:\.[0-9])?) samples/s, (?P<wait>[0-9]{1,3}) % data wait"
    r"(?:, (?P<left>(?:[0-9]{1,16}:)?[0-9]{1,2}:[0-9]{2}) left in this pass)?)?"
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the ranks do steps."""

    samples_per_s: float
    """Samples per second of all ranks together."""
    data_wait: float
    """Share of the ranks' time in which they wait for data, in [0, 1]."""
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
    """None if it is not known for all ranks, for example during the warm-up."""


def measure(trainers: Sequence[HostStatus], earlier: Sequence[HostStatus] = ()) -> Progress | None:
    """Return the progress of the job. None before the first step.

    It is the progress of the loader whose step began last, on the rank with the lowest number. Ranks do their steps
    together, unless this rank validates alone.

    Args:
        trainers: Last status of each trainer host.
        earlier: Their statuses some time before. The pace is that of the steps since then. Without such steps, it is
            the average of all steps after the warm-up.
    """
    reports = _by_rank(trainers)
    lead = named_summaries(reports[min(reports)].summaries_json) if reports else {}
    begun = {name: summary for name, summary in lead.items() if summary.num_steps}
    if not begun:
        return None
    loader = reports[min(reports)].loader
    # Its first batch has not arrived yet.
    if loader not in begun:
        loader = max(begun, key=lambda name: begun[name].total_s)
    summary = begun[loader]
    steps_left = summary.pass_steps_left if summary.pass_steps else None
    pace = None
    # Otherwise a host has not reported its ranks yet.
    if all(status.ranks for status in trainers):
        pace = _pace(loader, reports, _by_rank(earlier), steps_left)
    if not summary.pass_steps:
        return Progress(loader=loader, step=summary.num_steps, pass_steps=None, pass_number=0, pace=pace)
    return Progress(
        loader=loader,
        # From the loader's own count. That of all steps is wrong after a resumed state, after a pass that was left
        # early, and with drop_last.
        step=max(0, summary.pass_steps - summary.pass_steps_left),
        pass_steps=summary.pass_steps,
        pass_number=summary.num_passes,
        pace=pace,
    )


def describe(progress: Progress) -> str:
    """Return the progress in words, which `parse` reads."""
    pace = progress.pace
    if pace is None:
        return _steps_text(progress)
    left = [] if pace.left_s is None else [_left_text(pace.left_s) + _OF_PASS]
    return ", ".join([_steps_text(progress), _rate_text(pace), _wait_text(pace), *left])


def parse(text: str) -> Progress | None:
    """Return the progress that `describe` wrote, with rounded figures. None for any other text."""
    found = _LINE.fullmatch(text)
    if found is None:
        return None
    pace = None
    if found["rate"]:
        left_s = _seconds(found["left"]) if found["left"] else None
        pace = Pace(samples_per_s=float(found["rate"]), data_wait=int(found["wait"]) / 100, left_s=left_s)
    return Progress(
        loader=found["loader"],
        step=int(found["step"] or found["num_steps"]),
        pass_steps=int(found["pass_steps"]) if found["pass_steps"] else None,
        pass_number=int(found["pass_number"] or 0),
        pace=pace,
    )


def bar_line(progress: Progress, columns: int) -> str:
    """Return the progress as one line of a terminal, with a bar if the length of the pass is known.

    The bar has the columns that the text leaves, at most a quarter of the line, so that the text hardly moves when its
    figures change. If the text is too long, it leaves out figures.

    Args:
        progress: The progress.
        columns: Most characters of the line.
    """
    pace = progress.pace
    figures: list[list[str]] = [[]]
    if pace is not None:
        rate, wait = _rate_text(pace), _wait_text(pace)
        figures = [[rate, wait], [rate], []]
        if pace.left_s is not None:
            left = _left_text(pace.left_s)
            figures = [[rate, wait, left + _OF_PASS], [rate, wait, left], [rate, left], [left], []]
    texts = ["  ".join([_steps_text(progress), *some]) for some in figures]
    text = next((text for text in texts if len(text) <= columns), texts[-1][: max(0, columns)])
    room = min(columns - len(text) - 1, columns // 4)
    if progress.pass_steps is None or room < _MIN_BAR:
        return text
    num_cells = room - 2
    num_full = num_cells * min(progress.step, progress.pass_steps) // progress.pass_steps
    # ASCII without colours is readable on every terminal, and NO_COLOR then changes nothing.
    return f"[{'#' * num_full}{'-' * (num_cells - num_full)}] {text}"


def _by_rank(trainers: Sequence[HostStatus]) -> dict[int, RankReport]:
    return {report.rank: report for status in trainers for report in status.ranks}


def _pace(
    loader: str, reports: Mapping[int, RankReport], earlier: Mapping[int, RankReport], steps_left: int | None
) -> Pace | None:
    """Return the pace of the ranks that use a loader. None if it is not known for one of them."""
    samples_per_s = total_s = wait_s = step_s = 0.0
    for rank, report in reports.items():
        found = named_summaries(report.summaries_json)
        # A status that would have been too large was sent without summaries.
        if not found:
            return None
        if loader not in found or not found[loader].num_steps:
            continue
        before = named_summaries(earlier[rank].summaries_json).get(loader) if rank in earlier else None
        num_steps, num_samples, rank_total_s, rank_wait_s = _recent(found[loader], before)
        if not num_steps or not rank_total_s:
            return None
        samples_per_s += num_samples / rank_total_s
        total_s += rank_total_s
        wait_s += rank_wait_s
        step_s = max(step_s, rank_total_s / num_steps)
    left_s = None if steps_left is None else steps_left * step_s
    return Pace(samples_per_s=samples_per_s, data_wait=wait_s / total_s, left_s=left_s)


def _recent(now: StepSummary, before: StepSummary | None) -> tuple[int, int, float, float]:
    """Return the steps since an earlier summary, their samples, seconds, and seconds of data wait.

    Return those of all measured steps if there is no earlier summary, or no step since.
    """
    all_steps = now.num_steps_measured, now.num_samples_measured, now.total_s, now.data_wait_total_s
    if before is None or now.num_steps_measured <= before.num_steps_measured:
        return all_steps
    return (
        now.num_steps_measured - before.num_steps_measured,
        now.num_samples_measured - before.num_samples_measured,
        now.total_s - before.total_s,
        now.data_wait_total_s - before.data_wait_total_s,
    )


def _steps_text(progress: Progress) -> str:
    if progress.pass_steps is None:
        return f"{counted(progress.step, 'step')} of {progress.loader}"
    return f"step {progress.step} of {progress.pass_steps} in pass {progress.pass_number} of {progress.loader}"


def _rate_text(pace: Pace) -> str:
    rate = pace.samples_per_s
    return f"{rate:.0f} samples/s" if rate >= 9.95 else f"{rate:.1f} samples/s"


def _wait_text(pace: Pace) -> str:
    return f"{100 * pace.data_wait:.0f} % data wait"


def _left_text(left_s: float) -> str:
    minutes, seconds = divmod(round(left_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes}:{seconds:02d} left"


def _seconds(text: str) -> float:
    """Return the seconds of a text like ``4:05`` or ``1:04:05``."""
    total = 0
    for part in text.split(":"):
        total = 60 * total + int(part)
    return float(total)


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
            columns = self._columns() - 1
            progress = parse(self._text)
            text = self._text if progress is None else bar_line(progress, columns - len(clock))
            self._write(f"\r\x1b[K{(clock + text)[:columns]}")

    def clear(self) -> None:
        """Erase the line to make room for other output."""
        if self.is_live:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
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
