"""The priority queue of an endpoint, and the only threads that run the code of the user's data sets.

Only one task runs at a time, because random generators are global to a process. An endpoint that emulates n vCPUs has n
threads, one for each of these vCPUs. Each thread takes a task, runs it when no other task runs, and then waits until
the emulated time has passed since it took the task.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hetero.metrics.reading import off_cpu_s, run_delay_s
from hetero.system.fault_injection import faults_at

__all__ = ["Compute", "Task"]

_ASK_INTERVAL_S = 0.005
_MAX_LATE = 100
"""Number of late intervals that are kept apart to merge them with new ones. If a task was late since before the oldest
of these intervals, its time counts more than once."""

logger = logging.getLogger(__name__)


class Task:
    """A piece of work in the queue. Thread-safe.

    Args:
        work: Called with this task on a compute thread. It calls `is_cancelled` often.
        emulated_s: Seconds that an emulated vCPU needs for the task. The task occupies its slot for this time, even if
            its work is done before. 0: no emulation, so the slot is free when the work is done.
        is_abandoned: Returns whether the requester has left. This may need a system call. So it is called at most every
            5 ms, and not in the first 5 ms.
        on_finish: Called with this task on the compute thread when the task is done. Raises nothing.
    """

    def __init__(
        self,
        work: Callable[[Task], Any],
        emulated_s: float = 0.0,
        is_abandoned: Callable[[], bool] | None = None,
        on_finish: Callable[[Task], object] | None = None,
    ) -> None:
        self._work: Callable[[Task], Any] | None = work
        self._on_finish = on_finish
        self.emulated_s = emulated_s
        self.submitted_s = 0.0
        """Monotonic time when the task was queued."""
        self._is_abandoned = is_abandoned
        # Do not ask at once, because the requester has only just sent the task. Asking takes time, because it is a
        # system call that raises an exception.
        self._ask_at_s = time.monotonic() + _ASK_INTERVAL_S
        self.was_cancelled = False
        """Whether the task is known to be cancelled. Unlike `is_cancelled`, this does not call ``is_abandoned``."""
        # Only an emulated task waits after its work. The event ends this wait if the task is cancelled.
        self._cancel_event = threading.Event() if emulated_s > 0 else None
        self._is_finished = False
        # This lock is held until the task is done. `wait` takes it. A lock is cheaper than an event.
        self._unfinished = threading.Lock()
        self._unfinished.acquire()
        self._value: Any = None
        self._error: BaseException | None = None

    def cancel(self) -> None:
        """Cancel the task. If it runs, it stops at its next call of `is_cancelled`. Idempotent."""
        self.was_cancelled = True
        if self._cancel_event is not None:
            self._cancel_event.set()
        # Drop the work, because a cancelled task stays in the queue until its turn, and its data would stay in memory.
        self._work = None

    def is_cancelled(self) -> bool:
        """Return whether the task was cancelled or abandoned. Cheap enough to be called for every sample."""
        if self._is_abandoned is not None and not self.was_cancelled:
            now_s = time.monotonic()
            if now_s >= self._ask_at_s:
                self._ask_at_s = now_s + _ASK_INTERVAL_S
                if self._is_abandoned():
                    self.cancel()
        return self.was_cancelled

    def wait(self, timeout_s: float) -> bool:
        """Block until the task is done, at most ``timeout_s`` seconds. Return whether it is done."""
        if not self._is_finished and self._unfinished.acquire(timeout=max(0.0, timeout_s)):
            # Release the lock again for other threads that wait for the task.
            self._unfinished.release()
        return self._is_finished

    def result(self) -> Any:
        """Return what ``work`` returned, or raise what it raised. Call this only after `wait` has returned True."""
        if self._error is not None:
            raise self._error
        return self._value

    def run(self) -> None:
        """Call ``work`` and keep its result or exception. Without effect if the task was cancelled before."""
        work = self._work
        try:
            if work is not None:
                self._value = work(self)
        except BaseException as error:  # noqa: BLE001 - a data set that calls sys.exit() must not end the thread
            self._error = error

    def finish(self) -> None:
        """Mark the task as done, which wakes the threads in `wait`. Called once."""
        # Set the flag before the release, because a thread that the release wakes reads the flag.
        self._is_finished = True
        self._unfinished.release()
        if self._on_finish is not None:
            try:
                self._on_finish(self)
            # `on_finish` raises nothing itself, but memory may run out.
            except Exception:
                logger.exception("a batch was not sent")

    def wait_cancelled(self, timeout_s: float) -> None:
        """Block until cancelled, at most ``timeout_s`` seconds. Only for a task with emulated time."""
        assert self._cancel_event is not None
        self._cancel_event.wait(timeout_s)


class Compute:
    """Runs tasks by priority, lowest number first. Tasks of equal priority run in order of arrival.

    Args:
        num_slots: Tasks in progress at the same time, >= 1. More than one only for emulation.
        is_served_by_caller: Whether a thread of the caller calls `serve`, and is one of the compute threads.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, num_slots: int = 1, *, is_served_by_caller: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        # The lock is not reentrant, so no finalizer or signal handler may need it.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: list[tuple[int, int, Task]] = []
        """A heap. Each entry has the priority, the number in the order of arrival, and the task."""
        self._num_submitted = 0
        self._running: set[Task] = set()
        self._is_closed = False
        # Held while the user's code runs. Random generators are global to the process, so slots run one after another.
        self._one_at_a_time = threading.Lock()
        self._fault = faults_at("compute")
        """Fault for tests, called before a task's work. None without faults."""
        self.num_overruns = 0
        """Tasks whose work took longer than their emulated time. The time spent waiting for other tasks counts too."""
        self._late_intervals: deque[tuple[float, float]] = deque()
        """Begin and end of the latest intervals in which a slot was late, see `late_s`."""
        self._earlier_late_s = 0.0
        """Seconds of all earlier intervals together."""
        self.busy_s = 0.0
        """Seconds spent on tasks, summed over all slots. This includes the time that emulated tasks wait."""
        self._off_cpu_s = 0.0
        """Seconds of these that the user's code did not compute."""
        self._threads: list[str] = []
        """The compute threads, as folders in ``/proc``."""
        # If a thread of the caller serves the first slot, only the other slots need new threads.
        for slot in range(int(is_served_by_caller), num_slots):
            threading.Thread(target=self.serve, name=f"compute-{slot}", daemon=True).start()

    def submit(
        self,
        priority: int,
        work: Callable[[Task], Any],
        *,
        emulated_s: float = 0.0,
        is_abandoned: Callable[[], bool] | None = None,
        on_finish: Callable[[Task], object] | None = None,
    ) -> Task:
        """Queue a piece of work. Does not block. The arguments are those of `Task`.

        Raises:
            RuntimeError: If closed.
        """
        task = Task(work, emulated_s, is_abandoned, on_finish)
        task.submitted_s = self._clock()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("compute is closed")
            heapq.heappush(self._queue, (priority, self._num_submitted, task))
            self._num_submitted += 1
            self._changed.notify()
        return task

    @property
    def num_queued(self) -> int:
        """Tasks that wait or run. Readers get this number as the endpoint's load."""
        with self._lock:
            return len(self._queue) + len(self._running)

    def close(self) -> None:
        """Cancel all tasks, queued or running. The threads end after the sample in progress. Idempotent."""
        with self._lock:
            self._is_closed = True
            for task in (*self._running, *(task for _, _, task in self._queue)):
                task.cancel()
            self._changed.notify_all()

    def serve(self) -> None:
        """Run tasks on the calling thread until this is closed.

        With emulation, also measure how late each task ends, because reports say how far an emulated job can be wrong.
        """
        self._threads.append(f"self/task/{threading.get_native_id()}")
        last_task_s, free_since_s = 0.0, self._clock()
        while True:
            with self._lock:
                # Add the time of the task of the last round here, where the lock is held anyway.
                self.busy_s += last_task_s
                while not self._queue:
                    if self._is_closed:
                        return
                    self._changed.wait()
                _, _, task = heapq.heappop(self._queue)
                self._running.add(task)
            begin_s = self._clock()
            overran = self._run(task)
            with self._lock:
                self._running.discard(task)
                self.num_overruns += overran
            # `finish` sends small batches. It runs inside the measured time, because sending counts as busy time.
            task.finish()
            end_s = self._clock()
            last_task_s = end_s - begin_s
            # The emulated vCPU begins as soon as it is free and the task is queued. This thread may wake up later on a
            # busy machine, which counts as late too.
            due_s = max(free_since_s, task.submitted_s) + task.emulated_s
            if task.emulated_s > 0 and end_s > due_s:
                self._add_late(due_s, end_s)
            free_since_s = end_s
            # Without this, the task's result would stay in memory until this thread takes another task.
            del task

    @property
    def wait_s(self) -> float:
        """Seconds that the user's code waited, mostly for storage, and not for a CPU."""
        return max(0.0, self._off_cpu_s - sum(map(run_delay_s, self._threads)))

    @property
    def late_s(self) -> float:
        """Seconds while at least one slot was late: its emulated vCPU would have ended the task already.

        A slot is late if the work was too slow, if a thread woke up late, or if finishing a task took time. A second in
        which several slots were late counts once, because together they delay the job by one second at most. Therefore
        the emulation has delayed the job by this time at most.
        """
        with self._lock:
            return self._earlier_late_s + sum(end_s - begin_s for begin_s, end_s in self._late_intervals)

    def _add_late(self, begin_s: float, end_s: float) -> None:
        """Add a late interval, and merge it with the intervals that it overlaps.

        Another slot may have added an interval that ends later.
        """
        with self._lock:
            while self._late_intervals and self._late_intervals[-1][1] >= begin_s:
                other_begin_s, other_end_s = self._late_intervals.pop()
                begin_s, end_s = min(begin_s, other_begin_s), max(end_s, other_end_s)
            self._late_intervals.append((begin_s, end_s))
            if len(self._late_intervals) > _MAX_LATE:
                oldest_begin_s, oldest_end_s = self._late_intervals.popleft()
                self._earlier_late_s += oldest_end_s - oldest_begin_s

    def _run(self, task: Task) -> bool:
        """Run one task, and wait until its emulated time has passed. Return whether the work took longer."""
        begin_s = self._clock()
        if not task.is_cancelled():
            # Wait for the work of other slots, because random generators are global to a process. Slots overlap only in
            # the wait below.
            with self._one_at_a_time:
                if self._fault is not None:
                    self._fault()
                begin_off_s = off_cpu_s()
                task.run()
                self._off_cpu_s += max(0.0, off_cpu_s() - begin_off_s)
        remaining_s = begin_s + task.emulated_s - self._clock()
        if remaining_s > 0:
            task.wait_cancelled(remaining_s)
        return task.emulated_s > 0 and remaining_s < 0
