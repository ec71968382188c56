"""The requests of a pass, and after them those of the next epochs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.loaders.prefetching import EpochRequests, Prefetched, _discard_all
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.loaders.state import Start
from hetero.metrics.steps import Extent
from hetero.spec import DatasetSpec


class Planner:
    """A pipeline of epochs with a number of batches each."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes
        self.planned: list[int] = []
        self.extent = Extent()

    def shard(self) -> Shard:
        return Shard(0, 2)

    def num_samples(self) -> int:
        return 10

    def plan_selection(self, start: Start, selection: tuple[int, ...] = ()) -> Iterator[PlannedBatch]:
        return _planned(start.batches, self.sizes[min(start.epoch, len(self.sizes) - 1)], self.planned)

    def request(self, planned: PlannedBatch, epoch: int, *, is_prefetch: bool = False) -> BatchRequest:
        return BatchRequest(
            spec=DatasetSpec("object"),
            work=planned.work,
            seed=0,
            epoch=epoch,
            position=planned.position,
            verify=not is_prefetch,
        )


def _planned(first: int, end: int, planned: list[int]) -> Iterator[PlannedBatch]:
    for position in range(first, end):
        planned.append(position)
        yield PlannedBatch(position, IndexedWork(np.arange(1)))


class Source:
    """Batches that can be closed."""

    request: Any = None
    is_open = True
    may_be_kept = True

    def __next__(self) -> Any:
        raise StopIteration

    def close(self) -> None:
        self.is_open = False


def requests_of(planner: Planner, start: Start | None = None, *, adds_next_epochs: bool = True) -> EpochRequests:
    start = start or Start(0)
    return EpochRequests(planner, start, planner.plan_selection(start), adds_next_epochs=adds_next_epochs)


def taken(requests: EpochRequests, count: int) -> list[tuple[int, int]]:
    return [(request.epoch, request.position) for request in itertools.islice(requests, count)]


def test_epochs_follow_each_other_without_end() -> None:
    planner = Planner(2, 1)
    requests = requests_of(planner)
    assert taken(requests, 5) == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    assert [(each.start.epoch, each.num_requested, each.is_complete) for each in requests.epochs] == [
        (0, 2, True),
        (1, 1, True),
        (2, 1, True),
        (3, 1, True),
    ]


def test_it_is_known_with_the_last_request_of_an_epoch_that_it_is_the_last() -> None:
    planner = Planner(2)
    requests = requests_of(planner)
    found = []
    for _ in range(2):
        next(requests)
        requests.passed()
        found.append(requests.is_pass_over())
    assert found == [False, True]
    assert not next(requests).verify  # a check would be lost if the batch was discarded
    extent = planner.extent
    assert (extent.num_requested, extent.num_passed, extent.max_in_flight) == (3, 2, 1)


def test_rest_of_an_epoch_is_followed_by_the_next_one() -> None:
    planner = Planner(3)
    assert taken(requests_of(planner, Start(4, 2)), 3) == [(4, 2), (5, 0), (5, 1)]
    assert taken(requests_of(planner, Start(4, 3)), 2) == [(5, 0), (5, 1)]  # nothing is left of it


def test_epochs_without_batches_end_the_requests() -> None:
    planner = Planner(0)
    requests = requests_of(planner)
    for _ in range(3):
        assert taken(requests, 1) == []
    assert requests.is_pass_over()
    assert len(requests.epochs) == 2


def test_batches_of_a_users_sampler_are_planned_only_when_they_are_requested() -> None:
    planner = Planner(2)
    requests = requests_of(planner, adds_next_epochs=False)
    assert planner.planned == []
    assert taken(requests, 1) == [(0, 0)]
    assert planner.planned == [0]
    assert taken(requests, 5) == [(0, 1)]
    requests.passed()
    requests.passed()
    assert not requests.is_pass_over()  # the end of the batches is known


def test_requests_end_with_their_loader() -> None:
    planner: Planner | None = Planner(2)
    assert planner is not None
    requests = requests_of(planner)
    next(requests)
    del planner
    assert taken(requests, 5) == []


def passed(planner: Planner, num_requested: int, num_passed: int) -> EpochRequests:
    """Return the requests of a first epoch. Some were made, and some of their batches have passed."""
    requests = requests_of(planner)
    taken(requests, num_requested)
    for _ in range(num_passed):
        requests.passed()
    return requests


def kept(planner: Planner) -> tuple[Prefetched, Source]:
    """Return what a loader has after its first epoch, with a batch of the second one requested."""
    ahead, source = Prefetched(), Source()
    ahead.keep(source, passed(planner, 3, 2))
    return ahead, source


def test_pass_takes_what_was_kept_for_it_once() -> None:
    planner = Planner(2)
    ahead, source = kept(planner)
    found = ahead.take(Start(1, num_samples=10), Shard(0, 2))
    assert found is not None
    assert found[0] is source
    assert source.is_open
    assert ahead.take(Start(1, num_samples=10), Shard(0, 2)) is None


@pytest.mark.parametrize(
    ("start", "shard"),
    [
        (Start(2, num_samples=10), Shard(0, 2)),
        (Start(1, 1, num_samples=10), Shard(0, 2)),
        (Start(1, num_samples=11), Shard(0, 2)),
        (Start(1, num_samples=10), Shard(1, 2)),
        (Start(1, num_samples=10), Shard(0, 1)),
    ],
)
def test_what_was_kept_for_another_pass_is_closed(start: Start, shard: Shard) -> None:
    planner = Planner(2)
    ahead, source = kept(planner)
    assert ahead.take(start, shard) is None
    assert not source.is_open


def test_what_can_no_longer_be_used_is_closed() -> None:
    planner = Planner(2)
    ahead, source = kept(planner)
    source.may_be_kept = False
    assert ahead.take(Start(1, num_samples=10), Shard(0, 2)) is None
    assert not source.is_open


def test_forked_process_leaves_alone_what_its_parent_has_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(2)
    ahead, source = kept(planner)
    monkeypatch.setattr("os.getpid", lambda: 1)
    ahead.discard()
    assert ahead.take(Start(1, num_samples=10), Shard(0, 2)) is None
    assert source.is_open
    own = Source()
    ahead.keep(own, passed(planner, 3, 2))
    assert own.is_open
    found = ahead.take(Start(1, num_samples=10), Shard(0, 2))
    assert found is not None
    assert found[0] is own


@pytest.mark.parametrize(("num_requested", "num_passed"), [(2, 2), (3, 1), (1, 1)])
def test_nothing_is_kept_of_a_pass_that_is_not_through_or_not_followed(num_requested: int, num_passed: int) -> None:
    planner = Planner(2)
    source = Source()
    Prefetched().keep(source, passed(planner, num_requested, num_passed))
    assert not source.is_open


def test_only_one_reader_is_kept_and_it_ends_with_the_process() -> None:
    planner = Planner(2)
    ahead, source = kept(planner)
    second = Source()
    ahead.keep(second, passed(planner, 3, 2))
    assert (source.is_open, second.is_open) == (True, False)
    _discard_all()
    assert not source.is_open
