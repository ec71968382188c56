"""The one place of an endpoint that runs the user's code: a priority queue and its thread.

Random generators are global to a process, so real work is done one piece at a
time. An endpoint that stands for n emulated vCPUs has n slots: each takes a
task, does the real work when its turn comes, then waits until the stated time
has passed since it took the task.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

from hetero.system.fault_injection import faults_at

__all__ = ["Compute", "Task"]

_ASK_INTERVAL_S = 0.005


class Task:
    """A piece of work in the queue. Thread-safe.

    Args:
        work: Called with this task on the compute thread; polls `is_cancelled`.
        emulated_s: How long it is to occupy its slot; 0: as long as it takes.
        is_abandoned: Tells whether nobody waits for the result any more; asked every few milliseconds, from a few
            after the task was queued. May make a system call.
    """

    def __init__(
        self, work: Callable[[Task], Any], emulated_s: float = 0.0, is_abandoned: Callable[[], bool] | None = None
    ) -> None:
        self._work = work
        self.emulated_s = emulated_s
        self._is_abandoned = is_abandoned
        self._ask_at_s = time.monotonic() + _ASK_INTERVAL_S  # whoever queued it was there just now
        self._cancelled = threading.Event()
        self._finished = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def cancel(self) -> None:
        """Give the result up: the task leaves the queue, or stops where it polls; idempotent."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Tell whether the result was given up; cheap enough to be called for every sample."""
        if self._is_abandoned is not None and not self._cancelled.is_set():
            now_s = time.monotonic()
            if now_s >= self._ask_at_s:
                self._ask_at_s = now_s + _ASK_INTERVAL_S
                if self._is_abandoned():
                    self._cancelled.set()
        return self._cancelled.is_set()

    @property
    def was_cancelled(self) -> bool:
        """Whether the result was known to be given up; asks nobody, unlike `is_cancelled`."""
        return self._cancelled.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until the task is done, at most ``timeout_s`` seconds; True if it is."""
        return self._finished.wait(timeout_s)

    def result(self) -> Any:
        """Return what the work returned, or raise what it raised; only once `wait` was true."""
        if self._error is not None:
            raise self._error
        return self._value

    def run(self) -> None:
        """Do the work and keep its outcome."""
        try:
            self._value = self._work(self)
        except BaseException as error:  # noqa: BLE001 - a data set that calls sys.exit() must not end the thread
            self._error = error

    def finish(self) -> None:
        """Wake those who wait."""
        self._finished.set()

    def wait_cancelled(self, timeout_s: float) -> None:
        """Block until cancelled, at most ``timeout_s`` seconds."""
        self._cancelled.wait(timeout_s)


class Compute:
    """Runs tasks, lowest priority number first, in order of arrival among equals.

    Args:
        num_slots: Tasks in progress at the same time, >= 1; more than one only for emulation.
        clock: Monotonic seconds.
    """

    def __init__(self, num_slots: int = 1, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, Task]] = []
        self._num_submitted = 0
        self._running: set[Task] = set()
        self._is_closed = False
        self._real_work = threading.Lock()
        self._fault = faults_at("compute")
        self.num_overruns = 0
        """Emulated tasks whose real work, waiting for its turn included, took longer than the emulated time."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"compute-{slot}", daemon=True) for slot in range(num_slots)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        priority: int,
        work: Callable[[Task], Any],
        *,
        emulated_s: float = 0.0,
        is_abandoned: Callable[[], bool] | None = None,
    ) -> Task:
        """Queue a piece of work; does not block. The arguments are those of `Task`.

        Raises:
            RuntimeError: If closed.
        """
        task = Task(work, emulated_s, is_abandoned)
        with self._changed:
            if self._is_closed:
                raise RuntimeError("compute is closed")
            heapq.heappush(self._queue, (priority, self._num_submitted, task))
            self._num_submitted += 1
            self._changed.notify()
        return task

    @property
    def num_queued(self) -> int:
        """Tasks waiting or in progress: the load that clients see."""
        with self._changed:
            return len(self._queue) + len(self._running)

    def close(self) -> None:
        """Cancel what is queued or running, and end the threads after the sample in progress; idempotent."""
        with self._changed:
            self._is_closed = True
            for task in (*self._running, *(task for _, _, task in self._queue)):
                task.cancel()
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                _, _, task = heapq.heappop(self._queue)
                self._running.add(task)
            overran = self._run(task)
            with self._changed:
                self._running.discard(task)
                self.num_overruns += overran
            task.finish()
            del task  # its result: while this thread waits, nobody needs it

    def _run(self, task: Task) -> bool:
        """Run one task in its slot; return whether its real work overran the emulated time."""
        taken_s = self._clock()
        if not task.is_cancelled():
            with self._real_work:
                if self._fault is not None:
                    self._fault()
                task.run()
        elapsed_s = self._clock() - taken_s
        overran = task.emulated_s > 0 and elapsed_s > task.emulated_s
        remaining_s = taken_s + task.emulated_s - self._clock()
        if remaining_s > 0:
            task.wait_cancelled(remaining_s)
        return overran
