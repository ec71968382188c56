"""Searches the lines of a run for metrics, in a process of its own.

An expression of the user may take exponential time for a line, for example ``(a+)+b``. Python cannot interrupt it in a
thread, and no other thread runs until it ends. The child process can: a timer ends a search, and the metric is dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from hetero.metrics.logged import LoggedMetric, MetricPattern
from hetero.system.process import start_child

__all__ = ["Search", "main"]

logger = logging.getLogger(__name__)

_LINE_S = 2.0
"""Longest search of one line."""
_TOTAL_S, _MEAN_S = 10.0, 0.01
"""A metric is dropped after searches of so many seconds if a line takes so long on average."""
_END_S = 60.0


class Search:
    """The child process that searches the lines of one run. Use it on one thread.

    Args:
        patterns: The expressions, at least one.
        environment: Environment of the child.

    Raises:
        OSError: If the process cannot be started.
    """

    def __init__(self, patterns: Sequence[MetricPattern], environment: Mapping[str, str]) -> None:
        stated = json.dumps([[pattern.name, pattern.regex] for pattern in patterns])
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  `close` closes it
        try:
            self._process = start_child(
                [sys.executable, "-m", "hetero.studies.matching", stated],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=self._output,
                start_new_session=True,  # Ctrl-C reaches only the study
            )
        except BaseException:
            self._output.close()
            raise
        self._is_lost = False

    def read(self, text: str, *, at_s: float, unix_s: float, rank: int) -> None:
        """Search one line. Blocks for a few seconds if an expression takes too long."""
        self._write(json.dumps([text, at_s, unix_s, rank]).encode() + b"\n")

    def found(self) -> Iterator[LoggedMetric]:
        """Wait for the end of the search, and yield what it found. Call this once, after all lines."""
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            logger.warning("the search for metrics did not end within %.0f s; some values are missing", _END_S)
        self._output.seek(0)
        for line in self._output:
            if not line.endswith(b"\n"):  # the process was killed while it wrote
                return
            name, value, at_s, unix_s, rank = json.loads(line)
            if value is None:
                logger.warning("metric %s has no values from %.0f s on, because its regex takes too long", name, at_s)
            else:
                yield LoggedMetric(name=name, value=value, at_s=at_s, unix_s=unix_s, rank=rank)

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what was not written yet
                self._process.stdin.close()
        self._output.close()

    def _write(self, content: bytes) -> None:
        assert self._process.stdin is not None
        try:
            if not self._is_lost:
                self._process.stdin.write(content)
                self._process.stdin.flush()
        except OSError as error:
            self._is_lost = True
            logger.warning("the search for metrics has ended early (%s); values are missing", error)


class _TooSlowError(Exception):
    """A search takes too long."""


def main() -> None:
    """Search the lines of standard input, and write values to standard output. None: the metric is dropped."""
    patterns = {name: MetricPattern(name=name, regex=regex) for name, regex in json.loads(sys.argv[1])}
    spent_s = dict.fromkeys(patterns, 0.0)

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooSlowError

    signal.signal(signal.SIGALRM, end)
    for number, line in enumerate(sys.stdin.buffer, start=1):
        text, *rest = json.loads(line)
        for name, pattern in list(patterns.items()):
            started_s = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, _LINE_S)
                value = pattern.read(text)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            except _TooSlowError:
                value = None
            spent_s[name] += time.monotonic() - started_s
            is_slow = spent_s[name] >= _TOTAL_S and spent_s[name] / number >= _MEAN_S
            if is_slow or time.monotonic() - started_s >= _LINE_S:
                del patterns[name]
                value = None  # as the study reads: it was dropped
            elif value is None:
                continue
            sys.stdout.write(json.dumps([name, value, *rest]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
