"""One endpoint of a pool across restarts: its processes, whether they make progress, and when they restart.

`Liveness` and `RestartBudget` are pure. Their caller passes the time.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
import os
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hetero.control.members.directory import EndpointRecord
from hetero.system.process import is_suspended

__all__ = ["LAST_LINES", "Action", "Liveness", "RestartBudget", "Slot"]

LEAVE_S = 3.0
"""Seconds until the ranks of all hosts know that an endpoint leaves. This takes a heartbeat and a report."""
MAX_LEAVE_S = 300.0
"""Longest time that a leaving endpoint has for the requests that it has accepted."""
DUMP_S = 1.0
"""Seconds from the request for a stack dump to the kill."""
LAST_LINES = 20
"""Number of last lines of a process's output that are kept. If the process fails, the error contains them."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Slot:
    """One endpoint of the pool, which has one process after another. For use by the pool's thread.

    States and transitions:

        planned (``start_at_s``)        --the time has come--> started (`begin`)
        started (``is_started``)        --the process reports its port--> serving (``record``)
        started, serving                --the process ends--> `retire`, then planned or waiting
        waiting (``awaits_restart``)    --a restart is given back--> planned
        started, serving                --no longer wanted--> leaving (`leave`), without ``record``
        leaving                         --it has answered its requests--> asked to end (`may_end`)
        leaving                         --the process ends--> `retire`, then planned, for when it is wanted again
    """

    index: int
    """Number of the endpoint on its host, from 0."""
    name: str
    """Name in the directory and in messages: host and number, or host and kind of server."""
    make_liveness: Callable[[], Liveness]
    """Makes the `Liveness` of each new process."""
    liveness: Liveness = field(init=False)
    incarnation: str = ""
    pid: int = 0
    record: EndpointRecord | None = None
    is_started: bool = False
    """Whether there is a process, ready or not."""
    start_at_s: float | None = 0.0
    """Time to start a process. None if there is a process, or if none is planned."""
    awaits_restart: bool = False
    """Whether the process ended when no restart was left. The endpoint waits until the budget gives one back."""
    ready_s: float | None = None
    """Monotonic time when the process began to serve. None before that, and without a process."""
    is_used: bool = False
    """Whether a rank has sent a request to the process."""
    leaving_s: float | None = None
    """Monotonic time when `leave` was called. None if the endpoint is wanted or has no process."""
    was_asked_to_end: bool = False
    num_starts: int = 0
    """Processes started so far."""
    num_crashes: int = 0
    """Crashes in a row."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    statistics: dict[str, float] = field(default_factory=dict)
    past_statistics: dict[str, float] = field(default_factory=dict)
    memory: tuple[int, int] | None = None
    """Private and shared bytes of the latest process, None if it has reported none."""
    _idle_s: float | None = None
    """Monotonic time of the last statistics if the process had no requests then, else None."""

    def __post_init__(self) -> None:
        self.liveness = self.make_liveness()

    def begin(self, incarnation: str) -> None:
        """Record that a new process is being started."""
        self.start_at_s = None
        self.is_started = True
        self.num_starts += 1
        self.incarnation = incarnation
        self.liveness = self.make_liveness()
        self.is_used = False
        self._idle_s = None

    def report(self, statistics: dict[str, float], now_s: float) -> None:
        """Record the process's statistics, which are also a sign of life."""
        num_in_progress = statistics.pop("num_requests", 0)
        memory = int(statistics.pop("private_bytes", 0)), int(statistics.pop("shared_bytes", 0))
        # Zeros mean that the process does not know its memory.
        self.memory = memory if any(memory) else self.memory
        self._idle_s = None if num_in_progress else now_s
        self.is_used = self.is_used or bool(num_in_progress or statistics.get("num_batches"))
        self.statistics = statistics
        self.liveness.beat(now_s)

    def leave(self, now_s: float) -> None:
        """Record that the endpoint is not wanted now. Remove its record, because readers must send no new requests."""
        self.leaving_s = now_s
        self.record = None

    @property
    def is_idle_after_leaving(self) -> bool:
        """Whether the endpoint has left and has answered the requests that it had accepted by its last report."""
        return self.leaving_s is not None and self._idle_s is not None and self._idle_s > self.leaving_s

    def may_end(self, now_s: float) -> bool:
        """Return whether to ask a process that has left to end. Ask it once, when it is idle or had `MAX_LEAVE_S`."""
        if self.leaving_s is None or self.was_asked_to_end:
            return False
        # Until all ranks know that the endpoint leaves, they may still send requests.
        is_idle = self._idle_s is not None and self._idle_s >= self.leaving_s + LEAVE_S
        return is_idle or now_s >= self.leaving_s + MAX_LEAVE_S

    def retire(self) -> None:
        """Record that the process has ended."""
        self.pid = 0
        self.ready_s = None
        self.record = None
        self.is_started = False
        self.is_used = self.was_asked_to_end = False
        self.leaving_s = None
        self.fold_statistics()

    def fold_statistics(self) -> None:
        """Add the process's statistics to the statistics of the earlier processes."""
        for name, value in self.statistics.items():
            self.past_statistics[name] = self.past_statistics.get(name, 0) + value
        self.statistics = {}

    def check_liveness(self, now_s: float) -> None:
        """Make a stuck process write its stacks to the log, then kill it. The pool restarts it like a crashed one.

        Args:
            now_s: Monotonic seconds, taken before the latest beats were recorded.
        """
        if not self.pid:
            return
        # Ask the system only about a late process, because this reads a file.
        suspended = self.liveness.is_late(now_s) and is_suspended(self.pid)
        action = self.liveness.next_action(now_s, suspended=suspended)
        age_s = self.liveness.age_s(now_s)
        if action is Action.LOG_SUSPENDED:
            logger.warning(
                "endpoint %s (process %d) is suspended. hetero does not kill it. SIGCONT continues it",
                self.name,
                self.pid,
            )
        elif action is Action.DUMP:
            logger.error(
                "endpoint %s has made no progress for %.0f s and is killed after it has printed its stacks:",
                self.name,
                age_s,
            )
            self._signal(signal.SIGUSR1)
        elif action is Action.KILL:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


class Action(enum.Enum):
    """What to do about an endpoint."""

    NOTHING = enum.auto()
    LOG_SUSPENDED = enum.auto()
    """Log that the process has been suspended for longer than the bound."""
    DUMP = enum.auto()
    """Make the process write its stacks."""
    KILL = enum.auto()


class Liveness:
    """Whether one endpoint process makes progress. Distinguishes a stuck process from a busy or a suspended one.

    The process sends a beat every second. For a beat it needs the interpreter lock and the service's lock. If one of
    its threads holds one of these locks for ever, the process sends no beats, even if its connections still work. A
    suspended process (SIGSTOP) is not killed, because it may be continued. Until then, its readers use other endpoints.

    States and transitions:

        not watched --first beat--> alive
        alive       --SIGSTOP or a debugger--> suspended (logged once after the bound)
        suspended   --continued, or a beat--> alive, with the whole bound again
        alive       --the caller did not ask for half the bound--> alive, with the whole bound again
        alive       --no beat for longer than the bound--> dumped (the process writes its stacks)
        dumped      --after `DUMP_S`--> killed

    Args:
        bound_s: Seconds without a beat until the process counts as stuck.
        build_bound_s: The same during the build of a data set, when libraries that load may block the interpreter.
    """

    def __init__(self, *, bound_s: float, build_bound_s: float) -> None:
        self._bound_s = bound_s
        # A build may block the interpreter longer than other work, so its bound is never the shorter one.
        self._build_bound_s = max(bound_s, build_bound_s)
        self._beat_s: float | None = None
        """Time of the latest beat, None before the first."""
        self._num_builds = 0
        """Builds of data sets in progress."""
        self._dumped_s: float | None = None
        """Time when the process was asked to write its stacks, None before."""
        self._latest_call_s = math.inf
        """Time of the latest call of `next_action`. Infinite before the first, because the first is never late."""
        self._is_suspended = False
        self._logged_suspension = False
        """Whether the present suspension was logged."""
        self.stuck_for_s: float | None = None
        """Age of the last beat when the process was found stuck, None if it never was."""

    def beat(self, now_s: float) -> None:
        """Record a beat. The process is watched from the first beat on."""
        self._beat_s = now_s
        self._is_suspended = self._logged_suspension = False

    def build(self, now_s: float, *, has_ended: bool) -> None:
        """Record that the build of a data set begins or has ended."""
        self._num_builds += -1 if has_ended else 1
        self.beat(now_s)

    def age_s(self, now_s: float) -> float:
        """Return the seconds since the last beat, 0 before the first."""
        return 0.0 if self._beat_s is None else now_s - self._beat_s

    def next_action(self, now_s: float, *, suspended: bool) -> Action:
        """Return what to do now. Call this a few times a second, and do what it returns."""
        # If this method was not called for a long time, the whole host may have been frozen, as in the migration of a
        # virtual machine. Then the endpoint is not to blame. Without this check, a launcher killed healthy endpoints
        # after such a pause. It ran again before they did, and their latest beats were 31 s old.
        was_away = now_s - self._latest_call_s > self._bound_s / 2
        self._latest_call_s = now_s
        if self._beat_s is None:
            return Action.NOTHING
        if self._dumped_s is not None:
            return Action.KILL if now_s - self._dumped_s >= DUMP_S else Action.NOTHING
        if suspended:
            return self._suspended(now_s)
        # If the process or the host was just continued, the process gets the whole bound again.
        if self._is_suspended or was_away:
            self.beat(now_s)
        if self.age_s(now_s) <= (self._build_bound_s if self._num_builds else self._bound_s):
            return Action.NOTHING
        self.stuck_for_s = self.age_s(now_s)
        self._dumped_s = now_s
        return Action.DUMP

    def is_late(self, now_s: float) -> bool:
        """Return whether the last beat is so old that the caller should check whether the process is suspended.

        This is half the bound, so the check comes before the process counts as stuck.
        """
        return self._beat_s is not None and self.age_s(now_s) > self._bound_s / 2

    def _suspended(self, now_s: float) -> Action:
        """Record that the process is suspended. Return what to do: log this once, after the bound."""
        self._is_suspended = True
        if self._logged_suspension or self.age_s(now_s) <= self._bound_s:
            return Action.NOTHING
        self._logged_suspension = True
        return Action.LOG_SUSPENDED


class RestartBudget:
    """The number of restarts that a host may still make.

    Restarts are given back with time. Without this, one crash a day would end a host after some days or weeks.

    Args:
        limit: Restarts in a row, >= 0.
        return_s: Seconds without a restart until one is given back, > 0.
    """

    def __init__(self, limit: int, return_s: float) -> None:
        self._limit = limit
        self._return_s = return_s
        self._num_used = 0
        """Restarts that were used and not given back."""
        self._latest_s = 0.0
        """Monotonic time of the latest restart."""

    def take(self, now_s: float) -> bool:
        """Use one restart. Return whether one was left.

        Args:
            now_s: Monotonic seconds.
        """
        # First subtract one used restart for each `return_s` seconds since the latest. When restarts counted for the
        # whole life of the host, an endpoint that ran out of memory once a day ended its host.
        num_returned = int((now_s - self._latest_s) / self._return_s)
        self._num_used = max(0, self._num_used - num_returned)
        if self._num_used >= self._limit:
            return False
        self._num_used += 1
        self._latest_s = now_s
        return True

    @property
    def next_s(self) -> float:
        """Monotonic time when the next restart is given back if none is left, infinite if never."""
        return self._latest_s + self._return_s if self._limit else math.inf

    def next_in_words(self, now_s: float) -> str:
        """Return the end of a sentence with the time until the next restart is given back, empty if it never is."""
        return f", the next one in {self.next_s - now_s:.0f} s" if self.next_s < math.inf else ""
