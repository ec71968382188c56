"""Epochs of the loader, resuming in the middle of one, samplers."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, Sampler, WeightedRandomSampler

from hetero.errors import ConfigError
from hetero.torch import DataLoader
from tests.support.torch.loaders import Noisy, be_rank, indices, loader_test_noisy, plain, rebuilt_by_tool


@given(
    num_samples=st.integers(0, 30),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 4),
    other=st.integers(1, 4),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    epochs=st.integers(0, 2),
    split=st.integers(0, 12),
)
def test_loader_state_at_any_split_and_world_size_gives_the_same_rest(
    num_samples: int,
    batch_size: int,
    world_size: int,
    other: int,
    shuffle: bool,
    drop_last: bool,
    epochs: int,
    split: int,
) -> None:
    assume(num_samples or not shuffle)
    global_batch = batch_size * world_size * other

    def run(
        world_size: int, state: dict[str, object] | None, take: list[int | None]
    ) -> tuple[list[list[list[int]]], list[dict[str, object]]]:
        """Return the global batches of passes over all ranks, and each rank's state after them."""
        merged: list[dict[int, list[int]]] = [{} for _ in take]
        states = []
        for rank in range(world_size):
            with pytest.MonkeyPatch.context() as patch:
                be_rank(patch, rank, world_size)
                loader = DataLoader(
                    range(num_samples),
                    batch_size=global_batch // world_size,
                    shuffle=shuffle,
                    drop_last=drop_last,
                    padding=False,  # what it repeats depends on the world size
                )
                if state is not None:
                    loader.load_state_dict(state)
                for number, count in enumerate(take):
                    for position, batch in enumerate(loader):
                        merged[number].setdefault(position, []).extend(batch.tolist())
                        if position + 1 == count:
                            break
                    states.append(loader.state_dict())
        assert all(found == states[-1] for found in states[len(take) - 1 :: max(1, len(take))])
        return [[sorted(indices) for indices in batches.values()] for batches in merged], states

    whole, _ = run(world_size, None, [None] * 5)
    length = len(whole[0])
    split = min(split, length)
    _, states = run(world_size, None, [None] * epochs + ([split] if split else []))
    rest, _ = run(other, states[-1] if states else None, [None, None])
    if split == 0 or (split == length and world_size > 1):  # without padding some ranks are through before others
        epochs_done = epochs + (split > 0)
        assert rest == whole[epochs_done : epochs_done + 2]
    else:  # after the last step of the loop nothing is left of the epoch
        assert rest == [whole[epochs][split:], whole[epochs + 1]]


def test_loader_state_inside_the_loop_after_break_and_at_the_end() -> None:
    whole = DataLoader(Noisy(10), batch_size=4, shuffle=True)
    epoch_0, epoch_1 = plain(whole), plain(whole)
    loader = DataLoader(Noisy(10), batch_size=4, shuffle=True, num_workers=2)
    states = [loader.state_dict()]
    for _batch in loader:
        states.append(loader.state_dict())  # noqa: PERF401 - inside the loop is the point
    states.append(loader.state_dict())
    for place, state in enumerate(states):
        resumed = DataLoader(Noisy(10), batch_size=4, shuffle=True)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        # The last one was taken after the loop, the one before in its last step: nothing is left of that epoch.
        assert plain(resumed) == (epoch_0[place:] if place < 4 else epoch_1)
        assert plain(resumed)[0] == (epoch_1 if place < 4 else plain(_at_epoch(whole, 2)))[0]


def _at_epoch(loader: Any, epoch: int) -> Any:
    loader.set_epoch(epoch)
    return loader


def test_loader_state_with_finished_epoch_named_again_is_an_empty_pass() -> None:
    loader = DataLoader(Noisy(10), batch_size=4)
    list(loader)
    resumed = DataLoader(Noisy(10), batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)  # for epoch in range(saved_epoch, ...), saved inside the last step of it
    assert list(resumed) == []
    resumed.set_epoch(1)
    assert len(list(resumed)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 1}, "seed 0, this loader has 1"),
        ({"batch_size": 5}, "global_batch 4, this loader has 5"),
        ({"shuffle": True}, "order sequential, this loader has shuffled"),
        ({"dataset": range(9)}, "num_samples 10, this loader has 9"),
        ({"sampler": [1, 2]}, "order sequential, this loader has sampler"),
    ],
)
def test_loader_state_of_another_loader_raises(options: dict[str, Any], message: str) -> None:
    state = DataLoader(range(10), batch_size=4).state_dict()
    with pytest.raises(ConfigError, match=message):
        DataLoader(**{"dataset": range(10), "batch_size": 4, **options}).load_state_dict(state)


def test_loader_set_epoch_after_load_state_warns(caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(range(10))
    loader.load_state_dict({**loader.state_dict(), "epoch": 4, "batches": 2})
    with caplog.at_level(logging.WARNING):
        loader.set_epoch(0)
    assert "discards the loaded state" in caplog.text


def test_loader_break_then_iter_is_the_next_epoch() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    for _ in loader:
        break
    second = indices(loader)
    loader.set_epoch(1)
    assert indices(loader) == second
    assert loader.state_dict()["epoch"] == 1


def test_loader_iterator_never_asked_is_no_epoch() -> None:
    loader = DataLoader(Noisy(), batch_size=4, shuffle=True)
    iter(loader)
    unused = iter(loader)
    assert loader.state_dict()["epoch"] == 0
    first = indices(loader)
    loader.set_epoch(0)
    assert indices(loader) == first
    assert indices(unused) != first


def test_loader_can_be_pickled_and_continues() -> None:
    loader = DataLoader(loader_test_noisy(10), batch_size=4, shuffle=True, num_workers=1)
    expected = plain(loader)
    loader.set_epoch(0)
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    copy.set_epoch(0)
    assert plain(copy) == expected


def test_loader_epoch_is_forwarded_to_the_sampler_and_stays_until_it_is_set_again() -> None:
    sampler = torch.utils.data.distributed.DistributedSampler(range(8), num_replicas=1, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(range(8), sampler=sampler)
    loader.set_epoch(3)
    assert sampler.epoch == 3
    list(loader)
    list(loader)
    assert sampler.epoch == 3


def test_loader_sampler_with_replacement_draws_repeats_differently() -> None:
    loader = DataLoader(Noisy(2), batch_size=8, sampler=WeightedRandomSampler([1.0, 1.0], 16))
    draws = {tuple(row.tolist()) for batch in loader for row in batch[1]}
    assert len(draws) == 16


def test_loader_sampler_state_replays_by_index_alone() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Noisy(5), batch_size=2, sampler=RandomSampler(range(5), replacement=True, num_samples=9))

    whole = make()
    epochs = [plain(whole), plain(whole)]
    loader = make()
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert plain(resumed) == epochs[0][2:]
    assert plain(resumed) == epochs[1]


class Stateful(Sampler[int]):
    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < 10:
            self.place += 1
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def test_loader_sampler_with_a_state_is_resumed_at_what_was_delivered() -> None:
    loader = DataLoader(Noisy(10), batch_size=3, sampler=Stateful(), num_workers=2)
    iterator = iter(loader)
    first = plain([next(iterator)])
    state = loader.state_dict()
    rest = plain(iterator)
    assert state["sampler"] == {"place": 3}
    resumed = DataLoader(Noisy(10), batch_size=3, sampler=Stateful())
    resumed.load_state_dict(state)
    assert plain(resumed) == rest
    assert first[0][0] == [0, 1, 2]


class Buckets(Sampler[list[int]]):
    """Makes its batches to know how many there are, or does not know."""

    def __init__(self, *, has_length: bool) -> None:
        self.has_length = has_length
        self.num_calls = 0

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(12).tolist()
        first = random.randint(1, 4)
        return iter([order[:first], *(order[place : place + 4] for place in range(first, 12, 4))])

    def __len__(self) -> int:
        if not self.has_length:
            raise NotImplementedError("the number of batches is not known")
        self.num_calls += 1
        return sum(1 for _ in self)


@pytest.mark.parametrize("has_length", [True, False])
def test_loader_state_measures_the_sampler_once_in_a_pass_and_leaves_the_trainer_alone(has_length: bool) -> None:
    sampler = Buckets(has_length=has_length)
    loader = DataLoader(Noisy(12), batch_sampler=sampler)
    batches = iter(loader)
    before = torch.get_rng_state(), random.getstate()
    first = next(batches)
    states = [loader.state_dict() for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert sampler.num_calls == has_length
    rest = plain(batches)
    assert states[0]["sampler_length"] == (len(rest) + 1 if has_length else None)
    resumed = DataLoader(Noisy(12), batch_sampler=Buckets(has_length=has_length))
    resumed.load_state_dict(states[2])
    assert resumed.state_dict() == states[2]
    assert plain(resumed) == rest != plain([first])


def test_loader_sampler_that_ignores_ranks_warns_once(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    world(1, 2)
    loader = DataLoader(range(4), sampler=RandomSampler(range(4)))
    assert len(list(loader)) == len(list(loader)) == 4
    assert caplog.text.count("every rank draws the same batches from RandomSampler") == 1


class Keeping(Stateful):
    """Goes on for ever."""

    def __iter__(self) -> Iterator[int]:
        while True:
            self.place += 1
            yield (self.place - 1) % 10


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 1, "prefetch_factor": 3}])
@pytest.mark.parametrize("rebuild", [False, True])
def test_loader_left_early_goes_on_from_what_was_delivered(options: dict[str, Any], rebuild: bool) -> None:
    loader: Any = DataLoader(Noisy(10), batch_size=2, sampler=Keeping(), **options)
    if rebuild:  # as a tool does
        loader = rebuilt_by_tool(loader)
    found = [indices(batch for _, batch in zip(range(3), loader, strict=False)) for _ in range(2)]
    assert found == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [0, 1]]]


def test_loader_with_a_generator_that_its_sampler_has_too_can_be_resumed_and_rebuilt() -> None:
    generator = torch.Generator().manual_seed(9)

    def make() -> DataLoader[Any]:
        return DataLoader(
            Noisy(8), batch_size=2, sampler=RandomSampler(range(8), generator=generator), generator=generator
        )

    first = make()
    epochs = [plain(first), plain(first)]
    again = make()
    assert [plain(again), plain(again)] == epochs
    first.set_epoch(1)
    iterator = iter(first)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(first.state_dict())
    assert plain(resumed) == epochs[1][1:]
