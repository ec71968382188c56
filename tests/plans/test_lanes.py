"""The order of lanes: the same global batches for any number of ranks, and each sample of a lane once."""

from __future__ import annotations

import pytest

from hetero.errors import ConfigError
from hetero.plans.lanes import LaneLayout


def global_batch(layout: LaneLayout, step: int, *, batch_size: int, world_size: int) -> list[tuple[int, int]]:
    """Return lane and place of each sample of a step, rank by rank."""
    return [
        (part.lane, part.place + number)
        for rank in range(world_size)
        for part in layout.parts(step, batch_size=batch_size, rank=rank, world_size=world_size)
        for number in range(part.num_samples)
    ]


@pytest.mark.parametrize(("num_lanes", "chunk"), [(8, 1), (8, 2), (4, 4), (16, 4), (2, 8), (3, 16), (1, 16)])
@pytest.mark.parametrize("world_size", [2, 4, 16])
def test_parts_of_any_number_of_ranks_make_the_same_global_batches(num_lanes: int, chunk: int, world_size: int) -> None:
    layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk)
    for step in range(12):
        alone = global_batch(layout, step, batch_size=16, world_size=1)
        assert global_batch(layout, step, batch_size=16 // world_size, world_size=world_size) == alone


@pytest.mark.parametrize(("num_lanes", "chunk"), [(8, 1), (4, 4), (16, 2), (3, 16), (1, 4)])
def test_parts_of_a_pass_give_each_sample_of_each_lane_once_and_in_order(num_lanes: int, chunk: int) -> None:
    layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk)
    places: dict[int, list[int]] = {}
    num_steps = 2 * 3 * num_lanes * chunk // 16 + 1
    for step in range(num_steps):
        for lane, place in global_batch(layout, step, batch_size=16, world_size=1):
            places.setdefault(lane, []).append(place)
    assert sorted(places) == list(range(num_lanes))
    assert sum(map(len, places.values())) == 16 * num_steps
    assert all(each == list(range(len(each))) for each in places.values())


def test_parts_take_a_chunk_of_each_lane_in_turn() -> None:
    layout = LaneLayout(num_lanes=3, chunk_samples=2)
    taken = [place for step in range(2) for place in global_batch(layout, step, batch_size=6, world_size=1)]
    assert taken[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert taken[6:] == [(0, 2), (0, 3), (1, 2), (1, 3), (2, 2), (2, 3)]


@pytest.mark.parametrize(("num_lanes", "chunk", "steps"), [(8, 2, 2), (8, 8, 8), (4, 2, 1), (4, 1, 1), (1, 8, 1)])
def test_steps_between_is_the_distance_of_two_chunks_of_a_lane(num_lanes: int, chunk: int, steps: int) -> None:
    layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk)
    assert layout.steps_between(global_batch=8) == steps
    lanes = [{lane for lane, _ in global_batch(layout, step, batch_size=8, world_size=1)} for step in range(20)]
    assert all(lanes[step] == lanes[step + steps] for step in range(10))
    assert not any(lanes[0] & lanes[step] for step in range(1, steps))


@pytest.mark.parametrize(
    ("num_lanes", "chunk", "batch_size", "world_size"),
    [(1, 4, 4, 1), (7, 4, 4, 1), (8, 2, 8, 2), (8, 4, 4, 2), (4, 4, 2, 2), (4, 4, 1, 8)],
)
def test_check_allows_lanes_that_stay_on_one_rank(num_lanes: int, chunk: int, batch_size: int, world_size: int) -> None:
    layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk)
    layout.check(batch_size=batch_size, world_size=world_size)
    ranks: dict[int, set[int]] = {}
    for step in range(3 * num_lanes):
        for rank in range(world_size):
            for part in layout.parts(step, batch_size=batch_size, rank=rank, world_size=world_size):
                ranks.setdefault(part.lane, set()).add(rank)
    # Ranks that share a chunk read the same lane, each of them its own samples.
    assert all(len(found) == max(1, chunk // batch_size) for found in ranks.values())


@pytest.mark.parametrize(
    ("num_lanes", "chunk", "batch_size", "world_size", "message"),
    [
        (6, 2, 8, 1, "6 lanes cannot be divided over a step.* 4 lanes\n  Pass lanes=4 or 8. Within an epoch"),
        (3, 2, 8, 1, "3 lanes cannot .*\n  Pass lanes=4. Within"),
        (6, 8, 8, 4, "6 lanes cannot .*\n  Pass lanes=4 or 8, or run 6 ranks. Within"),
        (7, 8, 8, 2, "7 lanes cannot .*\n  Pass lanes=6 or 8. Within"),  # seven lanes need 1 or 7 ranks
        (2, 8, 8, 4, "2 lanes cannot .*\n  Pass lanes=4. Within"),
        (6, 3, 8, 1, "chunk_samples is 3, and batch_size is 8 now\n  Choose them so that one divides the other"),
        (6, 6, 4, 3, "chunk_samples is 6, and batch_size is 4 now"),
    ],
)
def test_check_names_numbers_that_are_possible(
    num_lanes: int, chunk: int, batch_size: int, world_size: int, message: str
) -> None:
    layout = LaneLayout(num_lanes=num_lanes, chunk_samples=chunk)
    with pytest.raises(ConfigError, match=message):
        layout.check(batch_size=batch_size, world_size=world_size)


def test_check_of_a_chunk_larger_than_a_global_batch_does_not_advise_what_the_job_has() -> None:
    with pytest.raises(ConfigError) as raised:
        LaneLayout(num_lanes=4, chunk_samples=8).check(batch_size=4, world_size=1)
    assert "batch_size that divides 8" not in str(raised.value)  # 4 divides 8
