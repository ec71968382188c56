"""The order in windows: each row once, at any position, with the same rows for every division of the ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.loaders.parts import SamplePart
from hetero.loaders.sampling import BuiltInOrder, Shard
from hetero.plans.permutations import permuted
from hetero.plans.windows import WindowLayout, WindowOrder, WindowPlan
from tests.plans.shuffle_quality import ORDERS, figures

layouts = st.builds(
    lambda rows, window_rows, num_lanes, chunk_rows: WindowLayout.of_units(
        np.array(rows), window_rows=window_rows, num_lanes=num_lanes, chunk_rows=chunk_rows
    ),
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 100),
    st.integers(1, 9),
    st.integers(1, 20),
)


def order_of(layout: WindowLayout, seed: int = 1, epoch: int = 0) -> list[int]:
    order = WindowOrder(layout, seed=seed, epoch=epoch)
    return order.draw(np.arange(layout.num_rows))[0].tolist()


@given(layout=layouts, seed=st.integers(-(2**63), 2**63 - 1), epoch=st.integers(0, 2**64 - 1))
def test_each_row_comes_once_and_each_position_alone_gives_the_same(
    layout: WindowLayout, seed: int, epoch: int
) -> None:
    rows = order_of(layout, seed, epoch)
    assert sorted(rows) == list(range(layout.num_rows))
    order = WindowOrder(layout, seed=seed, epoch=epoch)
    assert [order.draw(np.array([position]))[0].item() for position in range(0, len(rows), 7)] == rows[::7]


def test_rows_of_a_chunk_come_from_one_window_of_one_lane() -> None:
    layout = WindowLayout.of_units(np.full(64, 100), window_rows=400, num_lanes=4, chunk_rows=10)
    order = WindowOrder(layout, seed=3, epoch=0)
    rows, _ = order.draw(np.arange(6400))
    # A window has the rows of five units at most, because a unit may be divided between two windows.
    for begin in range(0, len(rows), 10):
        assert len(set((rows[begin : begin + 10] // 100).tolist())) <= 5
    # Each lane reads its 16 units from the first to the last. So at any time four windows are open.
    for begin in range(0, len(rows), 1600):
        assert len(set((rows[begin : begin + 1600] // 100).tolist())) <= 4 * 5


def test_epochs_and_seeds_give_different_orders() -> None:
    layout = WindowLayout.of_units(np.full(20, 50), window_rows=100, num_lanes=3, chunk_rows=8)
    orders = [order_of(layout, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (-1, 0))]
    assert len({tuple(order) for order in orders}) == 4


def test_neighbours_stay_neighbours_as_often_as_by_chance() -> None:
    size, num_permutations = 4096, 200
    values, sizes = np.arange(size), np.full(size, size)
    num_pairs = sum(
        int((np.abs(np.diff(permuted(values, sizes, np.full(size, 7919 * key, np.uint64)))) == 1).sum())
        for key in range(num_permutations)
    )
    # Chance gives two pairs for each permutation, with a standard deviation of the sum of 20.
    assert abs(num_pairs - 2 * num_permutations) < 70


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_share_global_batches_of_neighbours(num_ranks: int) -> None:
    layout = WindowLayout.of_units(np.full(13, 50), window_rows=100, num_lanes=3, chunk_rows=8)

    def global_batches(world_size: int) -> list[list[int]]:
        order = BuiltInOrder(
            num_samples=650, batch_size=8 // world_size, seed=5, shuffle=True, padding=False, plan=WindowPlan(layout)
        )
        parts = [list(order.batches(2, Shard(rank, world_size))) for rank in range(world_size)]
        return [
            sorted(
                index for part in parts for batch in part if batch.position == position for index in batch.work.indices
            )
            for position in range(82)
        ]

    assert global_batches(num_ranks) == global_batches(1)
    assert sorted(itertools.chain(*global_batches(num_ranks))) == list(range(650))


def test_layout_survives_the_wire_and_damage_is_an_error() -> None:
    layout = WindowLayout.of_units(np.array([3, 1, 4]), window_rows=2, num_lanes=5, chunk_rows=6)
    again = WindowLayout.from_bytes(layout.to_bytes())
    assert order_of(again) == order_of(layout)
    for content in (b"", b"x" * 100, layout.to_bytes()[:-9]):
        with pytest.raises(ConfigError, match="the window order of the data set is damaged"):
            WindowLayout.from_bytes(content)
    with pytest.raises(ConfigError, match="window_rows"):
        WindowLayout.of_units(np.array([3]), window_rows=0, num_lanes=1, chunk_rows=1)


def test_part_of_a_layout_has_the_share_of_the_rows_in_whole_units_and_the_begin_of_one() -> None:
    layout = WindowLayout.of_units(np.arange(1, 101), window_rows=50, num_lanes=2, chunk_rows=5)
    part = layout.part(0.3, np.random.default_rng(1))
    rows = order_of(part)
    assert len(rows) == len(set(rows)) == part.num_rows
    assert part.num_rows == round(0.3 * 5050)
    whole = {begin: begin + size for begin, size in zip(layout.unit_begins.tolist(), range(1, 101), strict=True)}
    units = dict(zip(part.unit_begins.tolist(), part.unit_rows.tolist(), strict=True))
    assert set(rows) == {row for begin, size in units.items() for row in range(begin, begin + size)}
    assert sum(begin + size != whole[begin] for begin, size in units.items()) <= 1
    assert layout.part(1e-9, np.random.default_rng(1)).num_rows == 1
    assert order_of(layout.part(1.0, np.random.default_rng(1))) == order_of(layout)
    indices = SamplePart(fraction=0.3, seed=1).indices(5050, layout)
    assert sorted(order_of(SamplePart(fraction=0.3, seed=1).layout(layout))) == indices.tolist()


def test_windows_mix_a_batch_better_than_a_buffer_of_10000_rows() -> None:
    mixed_units, buffer_units = (figures(ORDERS[name]())[2] for name in (list(ORDERS)[1], list(ORDERS)[4]))
    assert mixed_units > 4 * buffer_units
