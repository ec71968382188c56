"""The loader's own order over any number of ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch.utils.data
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.loaders.pipeline import shard_of_environment
from hetero.loaders.sampling import BuiltInOrder, PlannedBatch, Shard, epoch_permutation

SIZES = st.integers(0, 60)
ORDERS = st.builds(
    BuiltInOrder,
    num_samples=SIZES,
    batch_size=st.integers(1, 7),
    seed=st.integers(-(2**63), 2**63 - 1),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    padding=st.booleans(),
)


def all_batches(order: BuiltInOrder, world_size: int, epoch: int = 0, start: int = 0) -> list[list[PlannedBatch]]:
    return [list(order.batches(epoch, Shard(rank, world_size), start=start)) for rank in range(world_size)]


def test_permutation_same_seed_and_epoch_is_same() -> None:
    first = epoch_permutation(1000, seed=-5, epoch=3)
    assert first.dtype == np.int64
    assert sorted(first.tolist()) == list(range(1000))
    assert np.array_equal(first, epoch_permutation(1000, seed=-5, epoch=3))
    assert not np.array_equal(first, epoch_permutation(1000, seed=-5, epoch=4))
    assert not np.array_equal(first, epoch_permutation(1000, seed=5, epoch=3))


def test_permutation_pinned_values_do_not_change() -> None:
    # A checkpoint of an older version continues in this order.
    assert epoch_permutation(10, seed=17, epoch=2).tolist() == [6, 4, 7, 5, 2, 1, 0, 9, 8, 3]


def test_permutation_leaves_global_generators() -> None:
    before = random.getstate(), np.random.get_state()[1].tobytes()
    epoch_permutation(100, seed=0, epoch=0)
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before


@given(order=ORDERS, world_size=st.integers(1, 5), epoch=st.integers(0, 9))
def test_order_every_sample_exactly_once_plus_padding(order: BuiltInOrder, world_size: int, epoch: int) -> None:
    ranks = all_batches(order, world_size, epoch)
    counts = Counter(index for batches in ranks for batch in batches for index in batch.work.indices.tolist())
    repeats = sum(counts.values()) - len(counts)
    if order.drop_last:
        assert repeats == 0
        assert order.num_samples - len(counts) < order.batch_size * world_size
    else:
        assert set(counts) == set(range(order.num_samples))
        assert repeats <= (world_size - 1 if order.padding else 0)


@given(order=ORDERS, world_size=st.integers(1, 5))
def test_order_lengths_are_what_is_yielded(order: BuiltInOrder, world_size: int) -> None:
    ranks = all_batches(order, world_size)
    for rank, batches in enumerate(ranks):
        assert len(batches) == order.num_batches(Shard(rank, world_size))
        assert sum(len(batch.work.indices) for batch in batches) == order.num_samples_of(Shard(rank, world_size))
    if order.padding or order.drop_last:
        assert len({tuple(len(batch.work.indices) for batch in batches) for batches in ranks}) == 1


@given(order=ORDERS, world_size=st.integers(1, 5), epoch=st.integers(0, 3), start=st.integers(0, 5))
def test_whole_batches_dealt_out_to_ranks_are_those_of_torch_and_accelerate(
    order: BuiltInOrder, world_size: int, epoch: int, start: int
) -> None:
    permutation = list(range(order.num_samples))
    if order.shuffle:
        permutation = epoch_permutation(order.num_samples, seed=order.seed, epoch=epoch).tolist()
    plain = torch.utils.data.BatchSampler(permutation, order.batch_size, order.drop_last)
    expected = list(plain)
    if world_size > 1 and (order.padding or order.drop_last):
        shards = [list(BatchSamplerShard(plain, world_size, rank)) for rank in range(world_size)]
        expected = [batch for batches in zip(*shards, strict=True) for batch in batches]
    yielded = list(order.whole_batches(epoch, world_size, start=start))
    assert [batch.work.indices.tolist() for batch in yielded] == expected[start * world_size :]
    assert order.num_whole_batches(world_size) == len(expected)
    assert [(batch.position, batch.rank) for batch in yielded] == [
        divmod(number, world_size) for number in range(start * world_size, len(expected))
    ]
    drawn = Counter[tuple[int, int]]()
    for batch in order.whole_batches(epoch, world_size):
        repeats = [0] * len(batch.work.indices) if batch.work.occurrences is None else batch.work.occurrences.tolist()
        drawn.update(zip(batch.work.indices.tolist(), repeats, strict=True))
    assert set(drawn.values()) <= {1}


@given(order=ORDERS, world_size=st.integers(1, 5))
def test_whole_batches_have_the_global_batches_of_the_ranks(order: BuiltInOrder, world_size: int) -> None:
    def first_times(batches: Iterable[PlannedBatch]) -> dict[int, set[int]]:
        merged: dict[int, set[int]] = {}
        for batch in batches:
            indices = set(batch.work.indices.tolist())
            if batch.work.occurrences is not None:
                indices = set(batch.work.indices[batch.work.occurrences == 0].tolist())
            merged.setdefault(batch.position, set()).update(indices)
        return merged

    ranks = all_batches(order, world_size)
    assert first_times(order.whole_batches(0, world_size)) == first_times(itertools.chain(*ranks))


@given(order=ORDERS, world_size=st.integers(1, 4), factor=st.integers(1, 3), split=st.integers(0, 12))
def test_order_continued_at_another_world_size_gives_the_same_global_batches(
    order: BuiltInOrder, world_size: int, factor: int, split: int
) -> None:
    other = BuiltInOrder(
        num_samples=order.num_samples,
        batch_size=order.batch_size * factor,
        seed=order.seed,
        shuffle=order.shuffle,
        drop_last=order.drop_last,
        padding=False,
    )
    smaller = BuiltInOrder(
        num_samples=order.num_samples,
        batch_size=order.batch_size,
        seed=order.seed,
        shuffle=order.shuffle,
        drop_last=order.drop_last,
        padding=False,
    )
    whole = global_batches(smaller, world_size * factor)
    assert global_batches(other, world_size, start=split) == whole[split:]


def global_batches(order: BuiltInOrder, world_size: int, start: int = 0) -> list[list[int]]:
    merged: dict[int, list[int]] = {}
    for rank in range(world_size):
        for batch in order.batches(1, Shard(rank, world_size), start=start):
            merged.setdefault(batch.position, []).extend(batch.work.indices.tolist())
    return [sorted(indices) for _, indices in sorted(merged.items())]


def test_order_strided_batches_are_elements_of_the_global_batch() -> None:
    order = BuiltInOrder(num_samples=12, batch_size=3, seed=0)
    rank_0, rank_1 = all_batches(order, 2)
    assert [batch.work.indices.tolist() for batch in rank_0] == [[0, 2, 4], [6, 8, 10]]
    assert [batch.work.indices.tolist() for batch in rank_1] == [[1, 3, 5], [7, 9, 11]]
    assert [batch.position for batch in rank_1] == [0, 1]


@pytest.mark.parametrize(
    ("num_samples", "world_size", "expected"),
    [
        (5, 2, [[0, 2, 4], [1, 3, 0]]),  # one repeat, from the start of the order
        (1, 3, [[0], [0], [0]]),  # fewer samples than ranks: the order starts over more than once
        (6, 3, [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_order_padding_starts_over_and_counts_as_repeats(
    num_samples: int, world_size: int, expected: list[list[int]]
) -> None:
    order = BuiltInOrder(num_samples=num_samples, batch_size=4, seed=0)
    ranks = all_batches(order, world_size)
    assert [[index for batch in batches for index in batch.work.indices.tolist()] for batches in ranks] == expected
    seen: Counter[int] = Counter()
    for place in range(max(map(len, expected))):
        for batches in ranks:
            occurrences = batches[0].work.occurrences
            index = batches[0].work.indices.tolist()[place]
            assert (0 if occurrences is None else occurrences[place]) == seen[index]
            seen[index] += 1


def test_shard_out_of_range_raises() -> None:
    with pytest.raises(ConfigError, match="rank 2 is out of range"):
        Shard(2, 2)


@pytest.mark.parametrize(
    ("torchrun", "mpirun", "expected"),
    [
        (("1", "2"), (None, None), Shard(1, 2)),
        ((None, None), ("3", "4"), Shard(3, 4)),  # Horovod's, without a launcher of ours
        (("1", "2"), ("3", "4"), Shard(1, 2)),
        ((None, None), ("3", None), Shard()),
        ((None, None), (None, None), Shard()),
    ],
)
def test_shard_without_a_launcher_is_that_of_whoever_made_the_process(
    monkeypatch: pytest.MonkeyPatch,
    torchrun: tuple[str | None, str | None],
    mpirun: tuple[str | None, str | None],
    expected: Shard,
) -> None:
    names = ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    for name, value in zip(names, (*torchrun, *mpirun), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert shard_of_environment() == expected
