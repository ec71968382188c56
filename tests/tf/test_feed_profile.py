"""The feed of a profile run repeats batches after some time. The test plays TensorFlow."""

from __future__ import annotations

import types
from collections import deque
from typing import Any

import pytest

from hetero.loaders.measuring import phases, profiling
from hetero.metrics.profile.parts import RankPart
from tests.support.tf.plain_feed import PlainFeed, epochs


class Kept(list[Any]):
    """Keeps batches as they are, and marks the ones that it hands out."""

    cpu_s = 0.0

    def keep(self, batch: Any) -> None:
        self.append(batch)

    def next(self) -> Any:
        return ["again", *self[0]]


class ProfileRun:
    """A profile run of a feed. TensorFlow takes batches ahead, and each step consumes some of them."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, num_prefetched: int, batches_per_step: int = 1, enough_steps: int = 4
    ) -> None:
        monkeypatch.setattr(phases, "ENOUGH_S", 0.0)
        monkeypatch.setattr(phases, "ENOUGH_STEPS", enough_steps)
        monkeypatch.setattr(profiling, "_profilers", {})
        self.options = types.SimpleNamespace(warmup_steps=2, emulate_step_s=None)
        self.rank, self.remote = 0, False
        self.num_prefetched = num_prefetched
        self.feed = PlainFeed(20_000)
        self.feed.batches_per_step = batches_per_step
        self.feed.profile(self, Kept())  # type: ignore[arg-type]
        self.produced = self.feed.produce()
        self.buffer: deque[Any] = deque()
        self.steps: list[list[Any]] = []

    def set_profile(self, report: Any) -> None:
        self.report = report

    @property
    def phases(self) -> phases.Phases:
        assert self.feed._profiler is not None
        return self.feed._profiler.phases

    def step(self) -> None:
        self.feed.begin_step()
        while len(self.buffer) < self.num_prefetched:
            self.buffer.append(next(self.produced))
        self.steps.append([self.buffer.popleft() for _ in range(self.feed.batches_per_step)])
        self.feed.consume(self.feed.batches_per_step)

    def run_until(self, phase: phases.Phase) -> None:
        while self.phases.phase is not phase:
            self.step()

    def part(self, *, is_last: bool = False) -> RankPart:
        return RankPart.from_json(self.report(is_last))


def test_profile_run_does_not_measure_batches_that_tensorflow_had_taken_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ProfileRun(monkeypatch, num_prefetched=6)
    run.run_until(phases.Phase.HEADSPACE)
    assert run.phases.window >= 6  # the warm-up and the steps as the job runs have emptied the buffer several times
    num_fetched_steps = len(run.steps)
    assert run.steps == [[batch] for batch in epochs(0, 0, 20_000)[:num_fetched_steps]]
    for _ in range(5):  # batches in TensorFlow's buffer
        run.step()
        assert run.steps[-1][0][0] != "again"
        assert run.phases.num_steps == 0
    run.step()
    assert (run.steps[-1][0][0], run.phases.num_steps) == ("again", 0)  # its step contains a fetched batch
    run.run_until(phases.Phase.DONE)
    num_repeated_steps = sum(step[0][0] == "again" for step in run.steps)
    assert len(run.phases.headspace_s) == num_repeated_steps - 1 - phases.EXCLUDED_STEPS == 4
    assert run.feed.num_living_readers() == 0
    assert run.feed.place() == (0, len(run.steps))  # schedules of the script count on it
    run.step()
    part = run.part()
    assert (part.phase, part.batch_samples, part.steps_per_epoch) == ("done", 2, 10_000)
    assert part.data_wait_s is not None
    assert part.data_wait_s.basis == "measured"
    assert part.work is not None
    assert part.work.batch_samples == 2


def test_profile_run_with_several_batches_per_step_counts_all_and_computes_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = ProfileRun(monkeypatch, num_prefetched=4, batches_per_step=2, enough_steps=12)
    run.run_until(phases.Phase.HEADSPACE)
    assert run.part(is_last=True).data_wait_s is None  # only the wait for the first batch of each step is known
    run.run_until(phases.Phase.DONE)
    run.step()
    part = run.part()
    assert (part.batch_samples, part.steps_per_epoch) == (4, 5_000)
    assert part.work is not None
    assert part.work.batch_samples == 2
    assert part.step_s is not None
    assert part.headspace_s is not None
    assert part.data_wait_s is not None
    assert part.data_wait_s.basis == "modelled"
    assert part.data_wait_s.mean == pytest.approx(max(0.0, part.step_s.mean - part.headspace_s.mean), abs=1e-6)


def test_kept_batches_come_again_in_the_passes_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    run = ProfileRun(monkeypatch, num_prefetched=1)
    run.run_until(phases.Phase.DONE)
    num_readers = len(run.feed.readers)
    following = run.feed.produce()
    assert next(following)[0] == "again"
    assert len(run.feed.readers) == num_readers
