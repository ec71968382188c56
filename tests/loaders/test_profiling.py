"""A pass of a profiled loader: what is fetched, what is repeated, and what the rank reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.batches.failures import dataset_error
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.errors import DatasetError
from hetero.loaders.measuring import profiling
from hetero.loaders.measuring.phases import ENOUGH_STEPS, EXCLUDED_STEPS, Phase
from hetero.loaders.measuring.profiling import LoaderProfiler, ProfiledBatches
from hetero.metrics.profile.parts import RankPart
from hetero.metrics.steps import StepTimer
from hetero.spec import DatasetSpec

SPEC = DatasetSpec("photos", '{"split":"train"}')
STEP_S = 0.25
"""Time of each step in these tests."""


class Clock:
    """A clock that the tests turn."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Kept(list[Any]):
    """Keeps batches as they are."""

    cpu_s = 0.0

    def keep(self, batch: Any) -> None:
        self.append(batch)

    def next(self) -> Any:
        return ("again", self[0])


class Session:
    """The parts of a session that a profiler uses."""

    def __init__(self, rank: int = 0, warmup_steps: int = 3) -> None:
        self.rank = rank
        self.options = SimpleNamespace(warmup_steps=warmup_steps, emulate_step_s=None)
        self.profile: Any = None

    def set_profile(self, profile: Any) -> None:
        self.profile = profile


class Source(Iterator[Any]):
    """Fetches batches, and takes requests ahead as loaders do."""

    def __init__(self, requests: Iterator[BatchRequest], *, num_prefetched: int = 3, fails_at: int = -1) -> None:
        self._requests = requests
        self._prefetched: list[BatchRequest] = []
        self._num_prefetched = num_prefetched
        self._fails_at = fails_at
        self.request: BatchRequest | None = None
        self.is_open = True

    def __next__(self) -> Any:
        while len(self._prefetched) < self._num_prefetched and (request := next(self._requests, None)) is not None:
            self._prefetched.append(request)
        if not self._prefetched:
            raise StopIteration
        self.request = self._prefetched.pop(0)
        if self.request.position == self._fails_at:
            raise dataset_error("x", dataset="photos", host="h", stage="sample")
        return self.request.position

    def close(self) -> None:
        self.is_open = False


def requests(count: int) -> Iterator[BatchRequest]:
    for position in range(count):
        work = IndexedWork(np.arange(4) + 4 * position)
        yield BatchRequest(spec=SPEC, work=work, seed=3, epoch=1, position=position)


class Requests(Iterator[BatchRequest]):
    """The requests of a pass, as `EpochRequests`."""

    def __init__(self, count: int) -> None:
        self._requests = requests(count)
        self.in_flight: deque[BatchRequest] = deque()

    def __next__(self) -> BatchRequest:
        self.in_flight.append(next(self._requests))
        return self.in_flight[-1]


@pytest.fixture(autouse=True)
def no_profilers() -> Iterator[None]:
    profiling._profilers.clear()
    profiling._latest = None
    yield
    profiling._profilers.clear()


class Job:
    """A loader whose steps take `STEP_S`."""

    def __init__(
        self,
        *,
        rank: int = 0,
        warmup_steps: int = 3,
        subject: Any = SPEC,
        name: str = "photos",
        may_add_next_epochs: bool = False,
    ) -> None:
        self.clock = Clock()
        self.session: Any = Session(rank, warmup_steps)
        self.measured: list[list[BatchRequest]] = []
        timer = StepTimer(name, clock=self.clock)
        self.pipeline: Any = SimpleNamespace(
            name=name,
            subject=subject,
            kind=(name, "photos", ""),
            timer=timer,
            num_batches=lambda: 1000,
            may_add_next_epochs=may_add_next_epochs,
            requests_ahead=may_add_next_epochs,
        )
        self.profiler = self.make_profiler()
        self.sources: list[Source] = []

    def make_profiler(self) -> LoaderProfiler:
        kept: Any = Kept()
        made = LoaderProfiler(
            self.pipeline, self.session, kept, num_processes=2, measure=self._measure, clock=self.clock
        )
        return made.shared(self.session)

    def _measure(self, requests: list[BatchRequest]) -> Any:
        self.measured.append(requests)
        raise ValueError("no file")

    def run_pass(self, count: int, *, validation: Job | None = None, every: int = 0, **options: Any) -> list[Any]:
        """Run a pass of ``count`` batches and return what the script got, or the position of a batch that raised.

        After each ``every`` batches, the script runs a pass of the loader of ``validation`` with two batches.
        """

        def open_source(requests: Iterator[BatchRequest]) -> Source:
            self.sources.append(Source(requests, **options))
            return self.sources[-1]

        planned: Any = Requests(count)
        batches = ProfiledBatches(self.profiler, planned, open_source)
        found: list[Any] = []
        while True:
            self.pipeline.timer.begin_wait()
            try:
                batch = next(batches)
            except StopIteration:
                self.pipeline.timer.pause()
                break
            except DatasetError:
                assert batches.request is planned.in_flight.popleft()
                found.append(f"raised {batches.request.position}")
                self.pipeline.timer.pause()
                continue
            assert batches.request is planned.in_flight.popleft()
            found.append((batches.request.position, batch))
            self.pipeline.timer.end_wait(4)
            self.clock.now_s += STEP_S
            if validation is not None and len(found) % every == 0:
                validation.run_pass(2)
                self.clock.now_s += 1.0
        batches.close()
        return found

    def part(self, *, is_last: bool = False) -> RankPart:
        return RankPart.from_json(self.session.profile(is_last))


NUM_RUNNING = 51
"""Steps of the job as it runs: whole windows of the 3 batches that the source takes ahead."""
NUM_FETCHED = 3 + NUM_RUNNING + 2
"""Deliveries until the headspace phase: a step is complete when the next batch is delivered."""


def test_pass_fetches_then_repeats_and_keeps_its_length() -> None:
    job = Job()
    found = job.run_pass(200)
    assert [position for position, _ in found] == list(range(200))
    fetched = [position for position, batch in found if batch == position]
    assert fetched == list(range(NUM_FETCHED - 1))
    assert {batch for _, batch in found[NUM_FETCHED - 1 :]} == {("again", 0)}
    assert not job.sources[0].is_open


def test_pass_that_begins_in_the_headspace_phase_fetches_nothing() -> None:
    job = Job()
    job.run_pass(NUM_FETCHED + 5)
    assert [position for position, _ in job.run_pass(7)] == list(range(7))
    assert len(job.sources) == 1


def test_batch_that_raised_is_left_out_and_the_next_ones_keep_their_order() -> None:
    job = Job()
    found = job.run_pass(120, fails_at=3)
    assert found[3] == "raised 3"
    assert [entry[0] for entry in found if not isinstance(entry, str)] == [*range(3), *range(4, 120)]


def test_loaders_of_one_name_and_data_set_share_their_phases() -> None:
    job = Job()
    job.run_pass(10)
    assert job.make_profiler() is job.profiler
    job.pipeline = SimpleNamespace(name="photos", kind=("photos", "photos", "other"), timer=StepTimer("photos"))
    assert job.make_profiler() is not job.profiler


def test_rank_reports_progress_first_and_figures_in_the_end() -> None:
    job = Job()
    job.run_pass(30)
    part = job.part()
    assert (part.phase, part.num_steps, part.num_planned, part.step_s) == ("as it runs", 26, NUM_RUNNING, None)
    job.run_pass(NUM_FETCHED + EXCLUDED_STEPS + ENOUGH_STEPS)
    part = job.part()
    assert (part.phase, part.loader, part.batch_samples, part.steps_per_epoch) == ("done", "photos", 4, 1000)
    assert part.step_s is not None
    assert part.headspace_s is not None
    assert (part.step_s.num_measured, part.step_s.mean) == (NUM_RUNNING, STEP_S)
    assert (part.headspace_s.num_measured, part.headspace_s.mean) == (ENOUGH_STEPS, STEP_S)


def test_work_for_hosts_begins_with_samples_that_were_not_fetched() -> None:
    job = Job()
    job.run_pass(400)
    work = job.part().work
    assert work is not None
    assert (work.dataset, work.arguments_json, work.batch_samples, work.seed, work.epoch) == (
        "photos",
        SPEC.arguments_json,
        4,
        3,
        1,
    )
    # Requests that the source had taken ahead come first.
    first = 4 * (NUM_FETCHED - 1)
    assert work.indices[:5] == tuple(range(first, first + 5))
    assert job.measured == []


def test_only_rank_0_sends_work() -> None:
    job = Job(rank=1)
    job.run_pass(400)
    assert (job.part().phase, job.part().work) == ("done", None)


def test_rank_measures_samples_of_an_object_itself_before_it_is_done() -> None:
    job = Job(subject=[1, 2, 3])
    job.run_pass(400)
    part = job.part()
    assert (part.phase, part.work) == ("done", None)
    assert len(job.measured) == 1
    assert "Measuring them in the rank failed: ValueError: no file" in part.note


def test_steps_that_contain_a_validation_do_not_count() -> None:
    job = Job()
    job.run_pass(30, validation=Job(name="validation"), every=8)
    part = job.part(is_last=True)
    assert part.step_s is not None
    assert set(part.step_s.values) == {STEP_S}
    assert (part.num_steps_total, part.step_s.num_measured) == (29, 29 - 3 - 3)


@pytest.mark.parametrize(("may_add_next_epochs", "num_measured"), [(False, 28), (True, 25)])
def test_first_wait_of_a_pass_counts_unless_other_runs_do_not_have_it(
    may_add_next_epochs: bool, num_measured: int
) -> None:
    job, validation = Job(may_add_next_epochs=may_add_next_epochs), Job(name="validation")
    for _ in range(4):
        job.run_pass(8)
        validation.run_pass(2)
    part = job.part(is_last=True)
    assert part.step_s is not None
    assert (part.num_steps_total, part.step_s.num_measured, part.requests_ahead) == (
        31,
        num_measured,
        may_add_next_epochs,
    )


def test_script_that_ends_early_reports_what_it_has() -> None:
    job = Job()
    job.run_pass(20)
    part = job.part(is_last=True)
    assert part.step_s is not None
    assert (part.phase, part.step_s.num_measured, part.headspace_s) == ("as it runs", 16, None)
    assert part.work is not None


def test_rank_is_done_after_its_time_even_in_a_long_validation() -> None:
    job = Job()
    job.run_pass(20)
    job.clock.now_s += 80.0
    assert job.profiler.phases.phase is Phase.RUNNING
    assert (job.part().phase, job.part().step_s is not None) == ("done", True)
