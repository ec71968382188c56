"""The place of one endpoint in its host's pool. Its process changes with every restart."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.control.directory import EndpointRecord
from hetero.dataplane.pool.liveness import Beats, Verdict, is_suspended

__all__ = ["Slot"]

_LAST_LINES = 20

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Slot:
    """One endpoint through all its processes. For the pool's thread."""

    index: int
    name: str
    make_beats: Callable[[], Beats]
    """Makes the `Beats` of each new process."""
    beats: Beats = field(init=False)
    incarnation: str = ""
    pid: int = 0
    record: EndpointRecord | None = None
    is_started: bool = False
    """Whether there is a process, ready or not."""
    start_at_s: float | None = 0.0
    """Time to start a process. None if there is a process, or if none is planned."""
    awaits_restart: bool = False
    """Whether its process ended when no restart was left. It gets the next restart that is given back."""
    ready_s: float | None = None
    """Monotonic time when it began to serve, None if it does not serve."""
    num_starts: int = 0
    """Processes started so far."""
    num_crashes: int = 0
    """Crashes in a row."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))
    statistics: dict[str, float] = field(default_factory=dict)
    past_statistics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.beats = self.make_beats()

    def begin(self, incarnation: str) -> None:
        """Record that a new process is being started."""
        self.start_at_s = None
        self.is_started = True
        self.num_starts += 1
        self.incarnation = incarnation
        self.beats = self.make_beats()

    def retire(self) -> None:
        """Record that the process has ended."""
        self.pid = 0
        self.ready_s = None
        self.record = None
        self.is_started = False
        for name, value in self.statistics.items():
            self.past_statistics[name] = self.past_statistics.get(name, 0) + value
        self.statistics = {}

    def check_beats(self, now_s: float) -> None:
        """Make a stuck process write its stacks to the log, then kill it. It is restarted like a crashed one.

        Args:
            now_s: Monotonic seconds, read before the latest beats were.
        """
        if not self.pid:
            return
        suspended = self.beats.is_late(now_s) and is_suspended(self.pid)
        verdict = self.beats.verdict(now_s, suspended=suspended)
        age_s = self.beats.age_s(now_s)
        if verdict is Verdict.SUSPENDED:
            logger.warning("endpoint %s (process %d) is suspended; it is left so", self.name, self.pid)
        elif verdict is Verdict.DUMP:
            logger.error("endpoint %s has been stuck for %.0f s; its stacks, then its end:", self.name, age_s)
            self._signal(signal.SIGUSR1)
        elif verdict is Verdict.KILL:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
