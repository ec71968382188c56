"""Mixtures: shares in each step and over all steps, every sample of a source before one comes again, any world size."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import Mixture, Sources
from hetero.errors import ConfigError
from hetero.loaders.sampling import BuiltInOrder, Shard
from hetero.plans.mixtures import MixturePlan
from hetero.plans.plan import Source
from hetero.plans.windows import WindowLayout

SOURCES = (
    Source(name="web", num_samples=1000),
    Source(
        name="code",
        num_samples=300,
        layout=WindowLayout.of_units(np.full(30, 10), window_rows=40, num_lanes=4, chunk_rows=5),
    ),
    Source(name="books", num_samples=7),
)
FIRST = {"web": 0, "code": 1000, "books": 1300}


def schedule(step: int) -> dict[str, float]:
    return {"web": 0.8, "code": 0.2, "books": 0.0} if step < 50 else {"web": 0.5, "code": 0.3, "books": 0.2}


def source_of(index: int) -> str:
    return max((name for name in FIRST if FIRST[name] <= index), key=FIRST.get)  # type: ignore[arg-type]


@given(
    shares=st.lists(st.floats(0, 1), min_size=2, max_size=9).filter(lambda shares: sum(shares) > 0),
    global_batch=st.integers(1, 70),
    num_steps=st.integers(1, 200),
)
def test_each_source_is_less_than_two_samples_away_from_its_share(
    shares: list[float], global_batch: int, num_steps: int
) -> None:
    sources = [Source(name=str(number), num_samples=5) for number in range(len(shares))]
    mixture = Mixture({source.name: share for source, share in zip(sources, shares, strict=True)})
    order = MixturePlan(mixture, sources).order(seed=1, epoch=0, global_batch=global_batch)
    counts = order.counts(num_steps)
    assert (counts.sum(axis=1) == global_batch).all()
    assert (counts >= 0).all()
    wanted = np.outer(np.arange(1, num_steps + 1) * global_batch, mixture.shares(0))
    assert np.abs(np.cumsum(counts, axis=0) - wanted).max() < 2


@pytest.mark.parametrize("mixture", [Mixture({"web": 7, "code": 2, "books": 1}), Mixture(schedule)])
@pytest.mark.parametrize("start", [0, 3, 77, 119])
def test_batches_are_the_same_for_each_world_size_and_from_each_position(mixture: Mixture, start: int) -> None:
    plan = MixturePlan(mixture, SOURCES)

    def steps(world_size: int, start: int) -> list[list[tuple[int, int]]]:
        order = BuiltInOrder(
            num_samples=plan.num_samples,
            batch_size=12 // world_size,
            seed=4,
            shuffle=True,
            drop_last=True,
            plan=plan,
        )
        parts = [list(order.batches(1, Shard(rank, world_size), start=start)) for rank in range(world_size)]
        return [
            [
                pair
                for batch in batches
                for pair in zip(
                    batch.work.indices.tolist(),  # type: ignore[union-attr, attr-defined]
                    np.zeros(12) if batch.work.occurrences is None else batch.work.occurrences,  # type: ignore[attr-defined]
                    strict=False,
                )
            ]
            for batches in zip(*parts, strict=True)
        ]

    whole = steps(1, 0)
    assert len(whole) == 1307 // 12
    assert steps(4, start) == whole[start:]


def test_a_source_gives_each_sample_once_before_one_comes_again() -> None:
    plan = MixturePlan(Mixture({"web": 1, "code": 1, "books": 1}, samples=3000), SOURCES)
    order = plan.order(seed=2, epoch=0, global_batch=10)
    indices, occurrences = order.draw(np.arange(3000))
    assert occurrences is not None
    counts = Counter(indices.tolist())
    by_source = Counter(source_of(index) for index in indices.tolist())
    assert all(count == 1000 for count in by_source.values())
    assert {counts[index] for index in range(1000)} == {1}
    assert {counts[index] for index in range(1300, 1307)} == {142, 143}
    # The lanes of a source with layout are as long as each other, and give equally much.
    assert {counts[index] for index in range(1000, 1300)} <= {3, 4}
    # Each time that a sample comes is another occurrence.
    pairs = list(zip(indices.tolist(), occurrences.tolist(), strict=True))
    assert len(set(pairs)) == 3000
    for index in (0, 1100, 1305):
        assert sorted(times for other, times in pairs if other == index) == list(range(counts[index]))


def test_epochs_differ_and_a_schedule_goes_on() -> None:
    plan = MixturePlan(Mixture(schedule, samples=400), SOURCES)
    first, second = (plan.order(seed=0, epoch=epoch, global_batch=10) for epoch in (0, 1))
    assert (first.counts(40)[:, 2] == 0).all()
    # The second epoch begins with step 40.
    assert (second.counts(10)[:, 2] == 0).all()
    assert (second.counts(40)[10:, 2] == 2).all()
    assert first.draw(np.arange(20))[0].tolist() != second.draw(np.arange(20))[0].tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixture({"a": -1}), "expected numbers >= 0"),
        (lambda: Mixture({"a": float("nan"), "b": 1}), "expected numbers >= 0"),
        (lambda: Mixture({"a": 0}), "not all 0"),
        (lambda: Mixture({}), "not all 0"),
        (lambda: Mixture([0.5, 0.5]), "expected numbers by the names"),  # type: ignore[arg-type]
        (lambda: Mixture({"a": 1}, samples=0), "samples of a Mixture is 0"),
        (lambda: Mixture(lambda step: {"a": 1} if step < 3 else {"b": 1}).shares(3), "returns the sources b in step 3"),
        (lambda: MixturePlan(Mixture({"web": 1}), SOURCES), "the data set has web, code, books"),
        (lambda: MixturePlan(Mixture({"a": 1}), [Source(name="", num_samples=3)]), "none with a name"),
        (lambda: MixturePlan(Mixture({"a": 1}), [Source(name="a", num_samples=0)]), "source a of the Mixture has no"),
        (lambda: Sources(), "has no data sets"),
        (lambda: Sources(a=iter([1])), "source a is a list_iterator"),
    ],
)
def test_mixtures_that_cannot_be_meant(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_sources_are_one_data_set() -> None:
    data = Sources(a=[1, 2, 3], b=range(10, 14))
    assert len(data) == 7
    assert [data[index] for index in (0, 2, 3, 6, -1)] == [1, 3, 10, 13, 13]
    assert [(source.name, source.num_samples) for source in data.sources] == [("a", 3), ("b", 4)]
    with pytest.raises(IndexError):
        data[7]
    assert list(pickle.loads(pickle.dumps(data))) == list(copy.deepcopy(data)) == list(data)
