"""The order of several iterables: the stated shares, the same global batches for any number of ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hetero.errors import ConfigError
from hetero.plans.lane_mixtures import MixedLanes
from hetero.plans.lanes import LaneLayout
from hetero.plans.mixtures import Mixture

WEIGHTS = {"web": 70, "code": 25.5, "books": 4.4, "rare": 0.1}
NAMES = ("rare", "code", "books", "web")
LAYOUT = LaneLayout(num_lanes=8, chunk_samples=8, num_sources=len(NAMES))


def mixed(weights: Any = WEIGHTS, start: Any = None) -> MixedLanes:
    return MixedLanes(LAYOUT, Mixture(weights), NAMES, global_batch=32, start=start)


def samples(order: MixedLanes, step: int, *, world_size: int = 1) -> list[tuple[int, int]]:
    """Return lane and place of each sample of a step, rank by rank."""
    return [
        (part.lane, part.place + number)
        for rank in range(world_size)
        for part in order.parts(step, batch_size=32 // world_size, rank=rank, world_size=world_size)
        for number in range(part.num_samples)
    ]


@pytest.mark.parametrize("world_size", [2, 4, 8, 32])
def test_any_number_of_ranks_makes_the_same_global_batches(world_size: int) -> None:
    order, other = mixed(), mixed()
    for step in range(100):
        assert samples(other, step, world_size=world_size) == samples(order, step)


def test_lanes_give_each_sample_once_and_in_order_and_sources_their_shares() -> None:
    order = mixed()
    given = dict.fromkeys(range(LAYOUT.num_all_lanes), 0)
    for step in range(3000):
        for lane, place in samples(order, step):
            assert place == given[lane]
            given[lane] += 1
        if step % 7 == 0:
            assert all(order.place(lane, (step + 1) * 32) == count for lane, count in given.items())
        totals = [sum(given[source * 8 + lane] for lane in range(8)) for source in range(4)]
        for name, total in zip(NAMES, totals, strict=True):
            assert abs(total - (step + 1) * 32 * WEIGHTS[name] / 100) < 2


def test_weights_may_depend_on_the_step() -> None:
    order = mixed(lambda step: dict.fromkeys(NAMES, 0) | {"web" if step < 5 else "code": 1})
    for step in range(10):
        lanes = {lane // 8 for lane, _ in samples(order, step)}
        assert lanes == {NAMES.index("web" if step < 5 else "code")}


def test_a_later_object_goes_on_at_a_stated_position() -> None:
    order = mixed()
    for step in (0, 5, 1024, 1025, 3100):
        expected = samples(order, step)
        start = json.loads(json.dumps(order.start_before(step * 32)))
        assert samples(mixed(start=start), step, world_size=4) == expected
    assert start["chunk"] == 24 * 128 * 4


@pytest.mark.parametrize(("chunk_samples", "num_lanes"), [(1, 512), (8, 64), (2048, 1)])
def test_states_may_be_many_steps_behind_the_requests(chunk_samples: int, num_lanes: int) -> None:
    layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk_samples, num_sources=2)
    order = MixedLanes(layout, Mixture({"a": 3, "b": 1}), ["a", "b"], global_batch=512)
    for step in (300, 500, 700):
        assert list(order.parts(step, batch_size=512, rank=0, world_size=1))
        behind = (step - 250) * 512 // chunk_samples * chunk_samples
        places = [order.place(lane, behind) for lane in range(2 * num_lanes)]
        assert sum(places) == behind
        assert order.start_before(behind)["chunk"] * chunk_samples <= behind


def test_unfitting_names_and_damaged_states_are_refused() -> None:
    with pytest.raises(ConfigError, match="the Mixture has the sources web, and the data set has rare, code"):
        mixed({"web": 1})
    start = mixed().start_before(0)
    for other in ([], {}, start | {"names": NAMES[::-1]}):
        with pytest.raises(ConfigError, match="the loaded state has the sources .*\n  Return the same sources"):
            mixed(start=other)
    for wrong in ({"names": start["names"]}, start | {"given": [[0]]}, start | {"chunk": "x"}, start | {"rests": [1]}):
        with pytest.raises(ConfigError, match="the mixture of a loader's state is damaged"):
            mixed(start=wrong)
