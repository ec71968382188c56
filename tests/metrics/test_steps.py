"""Step timer: what is a step, what is warm-up, and what is refused."""

from __future__ import annotations

import json
import math
import threading

import pytest

from hetero.documents.records import decode
from hetero.errors import ConfigError
from hetero.metrics import steps
from hetero.metrics.steps import StepSummary, StepTimer, Traffic


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_timer(**options: object) -> tuple[StepTimer, FakeClock]:
    clock = FakeClock()
    options.setdefault("warmup_steps", 0)
    return StepTimer("train", clock=clock, sleep=clock.sleep, **options), clock


def deliver(timer: StepTimer, clock: FakeClock, wait_s: float, compute_s: float = 0.0, num_samples: int = 4) -> None:
    timer.begin_wait()
    clock.now += wait_s
    timer.end_wait(num_samples)
    clock.now += compute_s


def test_timer_steady_state_counts_compute_and_following_wait() -> None:
    timer, clock = make_timer()
    deliver(timer, clock, wait_s=9.0, compute_s=0.3)  # before the very first wait nothing was computed: no step
    deliver(timer, clock, wait_s=0.1, compute_s=0.3)
    deliver(timer, clock, wait_s=0.2, compute_s=0.3)
    summary = timer.summary()
    assert (summary.num_steps, summary.num_steps_measured) == (3, 2)
    assert (summary.num_samples, summary.num_samples_measured, summary.batch_samples) == (12, 8, 4)
    assert summary.step_time_mean_s == pytest.approx(0.45)
    assert summary.data_wait_mean_s == pytest.approx(0.15)
    assert summary.step_time_p50_s == pytest.approx(0.4)
    assert summary.step_time_p95_s == pytest.approx(0.5)
    assert summary.utilisation == pytest.approx(0.6 / 0.9)
    assert summary.samples_per_s == pytest.approx(8 / 0.9)
    assert summary.total_s == pytest.approx(0.9)


def test_timer_knows_when_its_first_batch_came() -> None:
    run = FakeClock()
    timer, clock = make_timer(run_clock=run)
    assert timer.summary().first_batch_at_s is None
    timer.begin_wait()
    clock.now += 3.0
    timer.end_wait(4, waited_s=2.0)  # a second of the compute has passed
    run.now += 50.0
    deliver(timer, clock, wait_s=0.1)
    assert timer.summary().first_batch_at_s == pytest.approx(99.0)


def test_timer_warmup_steps_are_excluded_from_every_figure() -> None:
    timer, clock = make_timer(warmup_steps=2)
    for wait_s in (5.0, 4.0, 3.0, 0.1, 0.1):
        deliver(timer, clock, wait_s=wait_s, compute_s=0.1)
    summary = timer.summary()
    assert summary.num_steps_measured == 2
    assert summary.step_time_mean_s == pytest.approx(0.2)
    assert summary.data_wait_p95_s == pytest.approx(0.1)


@pytest.mark.parametrize("num_batches", [0, 1, 3])
def test_timer_without_a_measured_step_refuses_figures(num_batches: int) -> None:
    timer, clock = make_timer(warmup_steps=2)
    for _ in range(num_batches):
        deliver(timer, clock, wait_s=1.0, compute_s=1.0)
    summary = timer.summary()
    assert summary.num_steps == num_batches
    assert summary.num_steps_measured == 0
    assert summary.step_time_mean_s is summary.step_time_p95_s is summary.utilisation is summary.samples_per_s is None


def test_timer_between_epochs_leaves_out_the_gap_and_keeps_the_next_first_wait() -> None:
    timer, clock = make_timer()
    deliver(timer, clock, wait_s=1.0, compute_s=0.2)
    timer.begin_wait()
    assert timer.is_waiting
    clock.now += 0.001  # until StopIteration
    timer.pause()
    timer.pause()
    assert not timer.is_waiting
    clock.now += 1000  # validation
    deliver(timer, clock, wait_s=0.5)
    summary = timer.summary()
    assert summary.num_steps_measured == 1
    assert summary.compute_total_s == pytest.approx(0.2)
    assert summary.data_wait_total_s == pytest.approx(0.5)


def test_timer_after_break_drops_the_step_whose_compute_is_unknown() -> None:
    timer, clock = make_timer()
    deliver(timer, clock, wait_s=1.0, compute_s=0.2)
    timer.pause()  # outside next(): the loop was left
    clock.now += 1000
    deliver(timer, clock, wait_s=0.5, compute_s=0.2)
    assert timer.summary().num_steps_measured == 0
    deliver(timer, clock, wait_s=0.1)
    assert timer.summary().step_time_mean_s == pytest.approx(0.3)


def test_timer_after_failed_wait_drops_that_step() -> None:
    timer, clock = make_timer()
    deliver(timer, clock, wait_s=1.0, compute_s=0.2)
    timer.begin_wait()
    clock.now += 50
    deliver(timer, clock, wait_s=0.1, compute_s=0.2)
    deliver(timer, clock, wait_s=0.1)
    summary = timer.summary()
    assert summary.num_steps_measured == 1
    assert summary.step_time_mean_s == pytest.approx(0.3)


def test_timer_wait_that_is_over_counts_the_rest_as_compute() -> None:
    timer, clock = make_timer()
    for _ in range(3):
        timer.begin_wait()
        clock.now += 0.5  # 0.1 s of waiting, then compute
        timer.end_wait(4, waited_s=0.1)
    summary = timer.summary()
    assert (summary.num_steps, summary.num_steps_measured) == (3, 2)
    assert summary.data_wait_total_s == pytest.approx(0.2)
    assert summary.compute_total_s == pytest.approx(0.8)


@pytest.mark.parametrize(("waited_s", "counted_s"), [(-3.0, 0.0), (7.0, 0.5)])
def test_timer_wait_that_is_over_is_cut_to_what_passed(waited_s: float, counted_s: float) -> None:
    timer, clock = make_timer()
    deliver(timer, clock, wait_s=0.0, compute_s=0.2)
    timer.begin_wait()
    clock.now += 0.5
    timer.end_wait(4, waited_s=waited_s)  # by another clock, which was set meanwhile
    assert timer.summary().data_wait_total_s == pytest.approx(counted_s)
    timer.begin_wait()
    timer.end_wait(4)
    assert timer.summary().compute_total_s == pytest.approx(0.2 + 0.5 - counted_s)


def test_timer_deliveries_for_several_steps_are_divided_among_them() -> None:
    timer, clock = make_timer(warmup_steps=1)
    for num_samples, num_steps in ((12, 3), (12, 3), (5, 2)):
        timer.begin_wait()
        clock.now += 0.6
        timer.end_wait(num_samples, waited_s=0.3, num_steps=num_steps)
    summary = timer.summary()
    assert (summary.num_steps, summary.num_samples, summary.batch_samples) == (8, 29, 4)
    assert (summary.num_steps_measured, summary.num_samples_measured) == (5, 20)  # the last two have not ended
    assert summary.step_time_mean_s == pytest.approx(0.2)
    assert summary.data_wait_mean_s == pytest.approx(0.1)


def test_timer_emulated_step_waits_once_for_each_of_several_steps() -> None:
    timer, clock = make_timer(step_wait_s=0.5)
    timer.begin_wait()
    timer.end_wait(12, waited_s=0.0, num_steps=3)
    timer.begin_wait()
    assert clock.now == pytest.approx(101.5)
    timer.end_wait(12, num_steps=3)
    clock.now += 2.0
    timer.begin_wait()
    assert timer.summary().num_emulation_overruns == 3


def test_timer_emulated_step_waits_out_the_stated_compute() -> None:
    timer, clock = make_timer(step_wait_s=0.5)
    deliver(timer, clock, wait_s=1.0, compute_s=0.2)
    deliver(timer, clock, wait_s=0.1, compute_s=0.5)
    deliver(timer, clock, wait_s=0.1, compute_s=0.7)  # longer than the emulated accelerator
    deliver(timer, clock, wait_s=0.1)
    summary = timer.summary()
    assert summary.compute_total_s == pytest.approx(0.5 + 0.5 + 0.7)
    assert summary.num_emulation_overruns == 1
    assert summary.step_wait_s == 0.5


def test_timer_percentiles_are_those_of_all_steps() -> None:
    timer, clock = make_timer()
    for i in range(1001):
        deliver(timer, clock, wait_s=1.0 if i % 10 else 3.0, compute_s=1.0)
    summary = timer.summary()
    assert summary.step_time_mean_s == pytest.approx(2.2)
    assert (summary.data_wait_p50_s, summary.data_wait_p95_s) == (pytest.approx(1.0), pytest.approx(3.0))
    assert (summary.step_time_p50_s, summary.step_time_p95_s) == (pytest.approx(2.0), pytest.approx(4.0))


def test_timer_returns_its_latest_steps_with_those_of_the_warmup() -> None:
    timer, clock = make_timer(warmup_steps=2)
    assert timer.recent() == steps.RecentSteps(first=0, compute_s=(), wait_s=(), total_s=0.0)
    for wait_s in range(1, 300):
        deliver(timer, clock, wait_s=wait_s, compute_s=0.5)
    recent = timer.recent()
    assert (recent.first, len(recent.wait_s)) == (298 - 256, 256)
    assert recent.wait_s[-2:] == (298.0, 299.0)
    assert recent.compute_s[0] == pytest.approx(0.5)
    assert recent.total_s == pytest.approx(sum(range(2, 300)) + 298 * 0.5)


def test_timer_summary_from_another_thread_is_consistent() -> None:
    timer, clock = make_timer()
    done = threading.Event()
    seen: list[StepSummary] = []

    def watch() -> None:
        while not done.is_set():
            seen.append(timer.summary())

    thread = threading.Thread(target=watch)
    thread.start()
    for _ in range(500):
        deliver(timer, clock, wait_s=0.25, compute_s=0.25)
    done.set()
    thread.join(100)
    assert all(s.step_time_mean_s in (None, 0.5) for s in seen)


@pytest.mark.parametrize("options", [{"warmup_steps": -1}, {"step_wait_s": 0}, {"step_wait_s": math.nan}])
def test_timer_option_out_of_range_raises(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_timer(**options)


def test_summary_survives_json() -> None:
    timer, clock = make_timer(step_wait_s=0.5)
    for _ in range(4):
        deliver(timer, clock, wait_s=0.1, compute_s=0.1)
    summary = timer.summary()
    assert StepSummary.from_json(summary.to_json()) == summary


def test_summary_holds_what_batches_took_and_survives_json() -> None:
    timer, _ = make_timer()
    assert (timer.summary().compression, timer.summary().batch_bytes, timer.summary().saved_bytes) == (None, 0, 0)
    timer.traffic = Traffic("lz4")
    timer.traffic.add(1000, 600)
    timer.traffic.add(500, 0)
    summary = timer.summary()
    assert (summary.compression, summary.batch_bytes, summary.saved_bytes) == ("lz4", 1500, 600)
    value = json.loads(summary.to_json())
    assert decode(StepSummary, value) == summary
    del value["compression"], value["batch_bytes"], value["saved_bytes"]  # as an older version wrote it
    assert decode(StepSummary, value).compression is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": -1}, "ranks.0.num_steps: found -1"),
        ({"num_steps": 1.5}, "expected an integer"),
        ({"num_steps": True}, "expected an integer"),
        ({"num_steps": 10**30}, "expected a number from 0"),
        ({"utilisation": 1.2}, "utilisation: found 1.2"),
        ({"compute_total_s": math.nan}, "expected a finite number"),
        ({"name": "x" * 5000}, "at most 4096"),
        ({"name": None}, "expected a string"),
        ({"extra": 1}, "extra: unknown key"),
    ],
)
def test_summary_from_bad_json_names_the_key(change: dict[str, object], message: str) -> None:
    value = json.loads(make_timer()[0].summary().to_json()) | change
    with pytest.raises(ConfigError, match=message):
        decode(StepSummary, value, path="ranks.0")


def test_summary_from_json_without_a_key_names_it() -> None:
    value = json.loads(make_timer()[0].summary().to_json())
    del value["num_samples"]
    with pytest.raises(ConfigError, match="num_samples: missing"):
        decode(StepSummary, value)
    with pytest.raises(ConfigError, match="expected an object"):
        decode(StepSummary, [value])
