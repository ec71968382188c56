"""Users' samplers: any kind, reproducible, occurrences counted."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from hetero.batches.indices import as_indices
from hetero.loaders.state import Start
from hetero.torch.order.sampler import OccurrenceCounter, SamplerOrder
from tests.support.torch.samplers import Endless


def order_of(sampler: Any, *, is_batch_sampler: bool = False, batch_size: int = 4, seed: int = 0) -> SamplerOrder:
    return SamplerOrder(sampler, is_batch_sampler=is_batch_sampler, batch_size=batch_size, drop_last=False, seed=seed)


def drawn(order: SamplerOrder, epoch: int = 0, **options: Any) -> list[Any]:
    return [batch.work.indices.tolist() for batch in order.batches(Start(epoch, **options))]


class GloballyRandom(Sampler[int]):
    """Draws from all three global generators, between yields."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(10):
            yield int(torch.randint(1000, ())) + random.randrange(1000) + int(np.random.randint(1000))

    def __len__(self) -> int:
        return 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: GloballyRandom(),
        lambda: RandomSampler(range(10)),
        lambda: RandomSampler(range(10), replacement=True, num_samples=13),
        lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 17),
        lambda: SubsetRandomSampler([3, 5, 8, 9, 11]),
        lambda: RandomSampler(range(10), generator=torch.Generator().manual_seed(5)),
    ],
)
def test_sampler_random_is_reproducible_and_leaves_the_trainer_alone(make: Any) -> None:
    before = torch.get_rng_state(), random.getstate()
    order = order_of(make())
    first = drawn(order)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    torch.rand(3)
    assert drawn(order) == first
    assert drawn(order_of(make())) == first
    assert drawn(order, epoch=1) != first
    assert drawn(order_of(make(), seed=1)) != first
    assert drawn(order, batches=1) == first[1:]
    assert order.num_batches() == len(first)


@pytest.mark.parametrize("batched", [False, True])
def test_sampler_of_torch_and_a_subclass_of_it_draw_alike(batched: bool) -> None:
    class Derived(RandomSampler):
        """May draw from any generator, as far as anyone can tell."""

    orders = []
    for kind in (RandomSampler, Derived):
        sampler: Any = kind(range(40), replacement=True)
        sampler = BatchSampler(sampler, 4, drop_last=False) if batched else sampler
        before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        orders.append(drawn(order_of(sampler, is_batch_sampler=batched, seed=3), epoch=2))
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (random.getstate(), str(np.random.get_state())) == before[1:]
    assert orders[0] == orders[1]


def test_sampler_that_raises_leaves_the_trainer_alone() -> None:
    sampler = WeightedRandomSampler([1.0], 1)
    sampler.weights = torch.tensor([-1.0])
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        drawn(order_of(sampler))
    assert torch.equal(torch.get_rng_state(), before)


def test_sampler_generator_with_another_seed_gives_another_order() -> None:
    one, other = (order_of(RandomSampler(range(99), generator=torch.Generator().manual_seed(s))) for s in (1, 2))
    assert drawn(one) != drawn(other)


def test_sampler_distributed_is_drawn_as_it_is_and_its_epoch_is_the_scripts() -> None:
    sampler = DistributedSampler(range(10), num_replicas=2, rank=1)  # type: ignore[arg-type]
    order = order_of(sampler)
    expected = DistributedSampler(range(10), num_replicas=2, rank=1)  # type: ignore[arg-type]
    assert list(chain(*drawn(order, epoch=4))) == list(expected)
    order.set_epoch(4)
    expected.set_epoch(4)
    assert list(chain(*drawn(order, epoch=4))) == list(expected)


def test_sampler_epoch_set_by_the_user_is_noticed_and_nothing_of_ours_is_in_the_sampler() -> None:
    sampler = DistributedSampler(range(10), num_replicas=1, rank=0)  # type: ignore[arg-type]
    order = order_of(sampler)
    assert order.epoch_set_by_user() is None
    sampler.set_epoch(3)
    assert order.epoch_set_by_user() == 3
    order.set_epoch(3)
    assert order.epoch_set_by_user() is None
    drawn(order, 3)
    assert type(sampler.epoch) is int


def test_batch_sampler_batches_are_kept_and_may_differ_in_size() -> None:
    order = order_of([[1, 2], [3], (4, 5, 6)], is_batch_sampler=True)
    assert drawn(order) == [[1, 2], [3], [4, 5, 6]]
    assert order.num_batches() == 3


def test_batch_sampler_epoch_reaches_the_sampler_inside() -> None:
    inner = DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
    order = order_of(BatchSampler(inner, 3, False), is_batch_sampler=True)
    order.set_epoch(1)
    first = drawn(order, epoch=1)
    order.set_epoch(2)
    assert drawn(order, epoch=2) != first
    assert inner.epoch == 2


def test_sampler_keys_of_other_types_are_counted_too() -> None:
    order = order_of(["a", (1, 2), "a"], batch_size=2)
    batches = list(order.batches(Start(0)))
    assert [batch.work.indices for batch in batches] == [("a", (1, 2)), ("a",)]
    assert batches[0].work.occurrences is None
    assert batches[1].work.occurrences is not None
    assert batches[1].work.occurrences.tolist() == [1]


def test_sampler_endless_is_drawn_lazily() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 7

    batches = order_of(endless()).batches(Start(0))
    assert next(batches).work.occurrences.tolist() == [0, 1, 2, 3]
    assert next(batches).work.occurrences.tolist() == [4, 5, 6, 7]


class Counting(Sampler[int]):
    """Has a state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            yield self.place * 11 % 10
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_sampler_with_state_resumes_without_replay_and_draws_alike() -> None:
    whole = list(order_of(Counting()).batches(Start(0)))
    order = order_of(Counting())
    rest = list(order.batches(Start(0, 1, whole[0].sampler_state, whole[0].num_drawn)))
    assert whole[0].sampler_state == {"place": 4}
    assert [b.work.indices.tolist() for b in rest] == [b.work.indices.tolist() for b in whole[1:]]
    assert [b.work.occurrences.tolist() for b in rest] == [b.work.occurrences.tolist() for b in whole[1:]]
    assert [b.position for b in rest] == [1, 2]


def test_sampler_generator_is_left_as_it_was_and_others_of_it_draw_the_same() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    before = generator.get_state()
    sampler = RandomSampler(range(10), generator=generator)
    first, second = order_of(sampler), order_of(RandomSampler(range(10), generator=generator))
    expected = [drawn(first, epoch) for epoch in range(3)]
    assert torch.equal(generator.get_state(), before)
    assert generator.initial_seed() == 5
    assert [drawn(second, epoch) for epoch in range(3)] == expected
    assert [drawn(order_of(sampler), epoch) for epoch in range(3)] == expected
    assert expected[0] != expected[1]


def test_sampler_generator_of_a_draw_that_raises_is_left_as_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler([1.0], 1, generator=generator)
    sampler.weights = torch.tensor([-1.0])
    before = generator.get_state()
    with pytest.raises(RuntimeError):
        drawn(order_of(sampler))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("own", [True, False])
def test_sampler_generator_serves_two_living_iterators(own: bool) -> None:
    generator = torch.Generator().manual_seed(5) if own else torch.default_generator
    order = order_of(RandomSampler(range(40), replacement=True, generator=generator))
    expected = [drawn(order, epoch) for epoch in (0, 1)]
    pairs = zip(order.batches(Start(0)), order.batches(Start(1)), strict=True)
    both = [(one.work.indices.tolist(), other.work.indices.tolist()) for one, other in pairs]
    assert [list(batches) for batches in zip(*both, strict=True)] == expected


def test_batch_sampler_that_fills_one_array_again_leaves_batches_alone() -> None:
    class Reusing(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            buffer = np.zeros(2, dtype=np.int64)
            for first in range(0, 6, 2):
                buffer[:] = first, first + 1
                yield buffer

    batches = list(order_of(Reusing(), is_batch_sampler=True).batches(Start(0)))
    assert [batch.work.indices.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


def test_sampler_that_shuffles_in_set_epoch_is_reproducible_and_leaves_the_trainer_alone() -> None:
    class Shuffling(Sampler[int]):
        order: tuple[int, ...] = ()

        def set_epoch(self, epoch: int) -> None:
            self.order = tuple(random.sample(range(20), 20))

        def __iter__(self) -> Iterator[int]:
            return iter(self.order)

    def drawn_in(epoch: int) -> list[Any]:
        order = order_of(Shuffling())
        order.set_epoch(epoch)
        return drawn(order, epoch)

    before = random.getstate()
    first = drawn_in(1)
    assert random.getstate() == before
    random.random()
    assert drawn_in(1) == first != drawn_in(2)


class Aliasing(Sampler[int]):
    """Hands out and takes over its very state."""

    def __init__(self) -> None:
        self.state = {"seen": [0]}

    def __iter__(self) -> Iterator[int]:
        while self.state["seen"][-1] < 6:
            self.state["seen"].append(self.state["seen"][-1] + 1)
            yield self.state["seen"][-1]
        self.state = {"seen": [0]}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_sampler_state_is_a_copy_both_ways() -> None:
    whole = list(order_of(Aliasing(), batch_size=2).batches(Start(0)))
    state = whole[0].sampler_state
    assert state == {"seen": [0, 1, 2]}
    rest = list(order_of(Aliasing(), batch_size=2).batches(Start(0, 1, state, 2)))
    assert [batch.work.indices.tolist() for batch in rest] == [[3, 4], [5, 6]]
    assert state == {"seen": [0, 1, 2]}


class Restarting(Sampler[int]):
    """Starts every iteration anew, but the first one after a state was loaded: as torchdata's distributed sampler."""

    def __init__(self) -> None:
        self.place = 0
        self.loaded: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.place, self.loaded = self.loaded or 0, None
        while self.place < 10:
            self.place += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state["place"]


@pytest.mark.parametrize("ahead", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("make", "delivered", "expected"),
    [
        (Endless, 1, 4),
        (Endless, 3, 12),
        (Counting, 1, 5),
        (Counting, 2, 9),
        (Counting, 3, 1),  # that was all of the epoch
        (Restarting, 1, 0),
        (Restarting, 2, 0),
        (Restarting, 3, 0),
    ],
)
def test_sampler_with_state_left_early_goes_on_from_what_was_delivered(
    make: Any, delivered: int, expected: int, ahead: int
) -> None:
    order = order_of(make())
    for batch in list(itertools.islice(order.batches(Start(0)), delivered + ahead))[:delivered]:
        order.delivered(batch.sampler_state)
    assert drawn_first(order, epoch=1)[0] == expected


def drawn_first(order: SamplerOrder, epoch: int) -> Any:
    return next(order.batches(Start(epoch))).work.indices.tolist()


def test_sampler_with_state_resumed_and_left_early_goes_on_from_what_was_delivered() -> None:
    order = order_of(Endless())
    resumed = order.batches(Start(0, 2, {"place": 8}, 8))
    first, *_ahead = itertools.islice(resumed, 3)
    assert first.work.indices.tolist() == [8, 9, 10, 11]
    order.delivered(first.sampler_state)
    assert drawn_first(order, epoch=1) == [12, 13, 14, 15]


def test_sampler_with_state_that_completed_a_pass_keeps_what_it_changed() -> None:
    class Alternating(Counting):
        """Has an epoch."""

        turn = 0

        def __iter__(self) -> Iterator[int]:
            for index in super().__iter__():
                yield index + 100 * self.turn
            self.turn += 1

        def state_dict(self) -> dict[str, int]:
            return {"place": self.place, "turn": self.turn}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.place, self.turn = state["place"], state["turn"]

    order = order_of(Alternating())
    for completes in (True, False):  # the latter: the last batch was taken, and no more asked for
        for epoch in range(2):
            batches = list(order.batches(Start(epoch)))
            assert len(batches) == 3
            assert batches[0].work.indices[0] // 100 == epoch + 2 * (not completes)
            for batch in batches:
                order.delivered(batch.sampler_state)
            if completes:
                order.completed()


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=9), max_size=8), st.booleans())
def test_occurrences_equal_a_plain_count(batches: list[list[int]], shift: bool) -> None:
    counter = OccurrenceCounter()
    seen: Counter[int] = Counter()
    for indices in batches:
        if shift:  # too large for the array
            indices = [index + 2**40 for index in indices]
        expected = []
        for index in indices:
            expected.append(seen[index])
            seen[index] += 1
        found = counter.count(np.array(indices, dtype=np.int64))
        assert (found is None) == (not any(expected))
        if found is not None:
            assert found.tolist() == expected


@pytest.mark.parametrize("far", [[2**31], [-1], ["key"], [(1, 2)]])
def test_occurrences_do_not_depend_on_what_else_is_in_the_batch(far: list[Any]) -> None:
    counter = OccurrenceCounter()
    batches: list[list[Any]] = [[5], [5, *far], [5, 70], [70, *far], [5, 5]]
    found = [counter.count(as_indices(batch)) for batch in batches]
    assert [None if one is None else one.tolist() for one in found] == [None, [1, 0], [2, 0], [1, 1], [3, 4]]


def test_counter_counts_indices_of_any_type() -> None:
    """Lists lack a hash, and NaN is not equal to itself. A bool is the integer that it is to a list or dictionary."""
    nan = float("nan")
    batch = [[1, 2], None, [1, 2], nan, b"a", nan, ("a", [1]), ("a", [1]), "a", 1, True, 1.0, 2**70, 2**70, -1, -1.0]
    assert OccurrenceCounter().count(as_indices(batch)).tolist() == [  # type: ignore[union-attr]
        *(0, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0)
    ]
