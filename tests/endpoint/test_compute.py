from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hetero.endpoint.compute import Compute, Task


@pytest.fixture
def compute() -> Iterator[Compute]:
    compute = Compute()
    yield compute
    compute.close()


def hold(compute: Compute) -> threading.Event:
    """Keep the compute thread busy until the event is set."""
    release, started = threading.Event(), threading.Event()

    def work(_task: Task) -> None:
        started.set()
        release.wait(100)

    compute.submit(0, work)
    assert started.wait(100)
    return release


def test_compute_serves_lowest_priority_first_then_arrival(compute: Compute) -> None:
    release = hold(compute)
    done: list[str] = []
    tasks = [
        compute.submit(priority, lambda _task, name=name: done.append(name))  # type: ignore[misc]
        for priority, name in ((2, "late"), (1, "first"), (1, "second"), (0, "urgent"))
    ]
    assert compute.num_queued == 5
    release.set()
    assert all(task.wait(100) for task in tasks)
    assert done == ["urgent", "first", "second", "late"]
    assert compute.num_queued == 0


def test_wait_of_a_task_is_told_from_computing(compute: Compute) -> None:
    def busy(_task: Task) -> None:
        end_s = time.thread_time() + 0.1
        while time.thread_time() < end_s:
            pass

    for work in (busy, lambda _task: time.sleep(0.2)):
        assert compute.submit(0, work).wait(100)
    assert compute.wait_s == pytest.approx(0.2, abs=0.09)


def test_computing_in_threads_of_a_library_is_no_wait(compute: Compute) -> None:
    def busy() -> None:
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass

    def in_a_library(_task: Task) -> None:  # such as a tokenizer or a Parquet reader
        helper = threading.Thread(target=busy)
        helper.start()
        helper.join()

    begin_s = time.perf_counter()
    assert compute.submit(0, in_a_library).wait(100)
    # On a busy machine, the helper may have waited for a CPU for any time.
    assert compute.wait_s < time.perf_counter() - begin_s - 0.19


def test_compute_keeps_what_the_work_raised(compute: Compute) -> None:
    def leave(_task: Task) -> None:
        raise SystemExit(3)

    task = compute.submit(0, leave)
    assert task.wait(100)
    with pytest.raises(SystemExit):
        task.result()
    after = compute.submit(0, lambda _task: 7)
    assert after.wait(100)
    assert after.result() == 7


def test_task_that_is_done_is_done_for_every_thread_and_without_waiting(compute: Compute) -> None:
    release = hold(compute)
    task = compute.submit(0, lambda _task: None)
    assert not task.wait(0.0)
    assert not task.wait(-1.0)
    release.set()
    assert task.wait(100)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.extend(task.wait(0.0) for _ in range(5000))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 10_000
    assert task.wait(-1.0)


def test_compute_cancelled_task_never_runs(compute: Compute) -> None:
    release = hold(compute)
    ran: list[int] = []
    task = compute.submit(0, lambda _task: ran.append(1))
    task.cancel()
    release.set()
    assert task.wait(100)
    assert not ran
    assert task.is_cancelled()


def test_compute_cancelled_while_emulating_frees_the_slot(compute: Compute) -> None:
    task = compute.submit(0, lambda _task: 1, emulated_s=1000.0)
    after = compute.submit(0, lambda _task: 2)
    task.cancel()
    assert after.wait(100)
    assert after.result() == 2


def test_compute_slots_overlap_only_the_emulated_wait() -> None:
    compute = Compute(num_slots=3)
    busy = threading.Lock()
    both = threading.Barrier(3)

    def work(_task: Task) -> bool:
        alone = busy.acquire(blocking=False)
        busy.release()
        return alone

    tasks = [compute.submit(0, work, emulated_s=0.05) for _ in range(6)]
    assert all(task.wait(100) for task in tasks)
    assert all(task.result() for task in tasks)
    assert both.n_waiting == 0
    compute.close()


def test_compute_counts_real_work_longer_than_emulated() -> None:
    now_s = [0.0]
    compute = Compute(clock=lambda: now_s[0])
    task = compute.submit(0, lambda _task: now_s.__setitem__(0, 3.0), emulated_s=0.5)
    assert task.wait(100)
    assert compute.num_overruns == 1
    compute.submit(0, lambda _task: 1).wait(100)  # the thread has counted the first task when it takes the second
    assert compute.late_s == 2.5
    compute.close()


def test_compute_counts_the_time_until_its_thread_wakes_up() -> None:
    now_s = [0.0]
    compute = Compute(is_served_by_caller=True, clock=lambda: now_s[0])

    def wait() -> None:
        compute._lock.release()
        compute.submit(0, lambda _task: compute.close(), emulated_s=0.5)
        now_s[0] = 2.0
        compute._lock.acquire()

    compute._changed.wait = wait  # type: ignore[assignment,method-assign]
    compute.serve()
    assert compute.num_overruns == 0
    assert compute.late_s == 1.5


def test_compute_counts_time_in_which_several_slots_are_late_once() -> None:
    compute = Compute()
    for begin_s, end_s in [(5.0, 6.0), (1.0, 7.0), (8.0, 10.0), (8.5, 9.0), (20.0, 21.0)]:
        compute._add_late(begin_s, end_s)
    compute.close()
    assert compute.late_s == (7.0 - 1.0) + (10.0 - 8.0) + (21.0 - 20.0)


def test_compute_remembers_few_late_intervals_and_all_of_their_time() -> None:
    compute = Compute()
    for number in range(1000):
        compute._add_late(float(number), number + 0.5)
    compute.close()
    assert compute.late_s == 500.0
    assert len(compute._late_intervals) < 1000


def test_compute_closed_refuses_work(compute: Compute) -> None:
    compute.close()
    compute.close()
    with pytest.raises(RuntimeError, match="closed"):
        compute.submit(0, lambda _task: 1)


def test_task_whose_turn_comes_at_once_asks_nobody_whether_it_is_wanted(
    compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero.endpoint.compute._ASK_INTERVAL_S", 1000.0)
    task = compute.submit(0, lambda _task: 7, is_abandoned=lambda: pytest.fail("asked"))
    assert task.wait(100)
    assert task.result() == 7


def test_task_that_waited_for_its_turn_is_not_run_for_nobody(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.endpoint.compute._ASK_INTERVAL_S", 0.0)
    release = hold(compute)
    ran: list[int] = []
    task = compute.submit(0, lambda _task: ran.append(1), is_abandoned=lambda: True)
    assert not task.was_cancelled
    release.set()
    assert task.wait(100)
    assert not ran
    assert task.was_cancelled


def test_time_of_sending_counts_as_busy(compute: Compute, tools: Any) -> None:
    compute.submit(0, lambda task: None, on_finish=lambda task: time.sleep(0.2))
    tools.wait_for(lambda: compute.busy_s > 0.19)


def test_task_whose_end_cannot_be_told_does_not_end_the_thread(
    compute: Compute, caplog: pytest.LogCaptureFixture
) -> None:
    compute.submit(0, lambda task: None, on_finish=lambda task: 1 / 0)
    after = compute.submit(1, lambda task: "done")
    assert after.wait(100.0)
    assert after.result() == "done"
    assert "a batch was not sent" in caplog.text


def test_cancelled_tasks_keep_no_work_in_memory(compute: Compute) -> None:
    """Readers come, ask and leave while one slow sample is computed."""
    proceed = threading.Event()
    held = compute.submit(0, lambda task: proceed.wait(100.0))
    large = [bytearray(1000) for _ in range(2000)]
    kept: list[weakref.ref[Holder]] = []
    for each in large:
        holder = Holder(each)
        kept.append(weakref.ref(holder))
        task = compute.submit(1, holder.work)
        del holder
        task.cancel()
        del task
    gc.collect()
    assert sum(reference() is not None for reference in kept) <= 1
    proceed.set()
    assert held.wait(100.0)
    assert compute.submit(2, lambda task: 5).wait(100.0)


class Holder:
    def __init__(self, data: bytearray) -> None:
        self.data = data

    def work(self, _task: Any) -> None:
        raise AssertionError("a cancelled task was computed")
