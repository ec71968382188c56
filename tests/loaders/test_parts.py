"""The part of a data set that a canary run uses."""

from __future__ import annotations

import numpy as np
import pytest

from hetero.errors import ConfigError
from hetero.loaders.parts import FRACTION_VARIABLE, PART_SEED_VARIABLE, SamplePart, part_of
from hetero.loaders.sampling import BuiltInOrder, Shard


def test_no_variable_means_the_whole() -> None:
    assert part_of({}) is None


def test_variables_give_fraction_and_seed() -> None:
    assert part_of({FRACTION_VARIABLE: "0.02", PART_SEED_VARIABLE: "7"}) == SamplePart(fraction=0.02, seed=7)


@pytest.mark.parametrize(
    "environ",
    [
        {FRACTION_VARIABLE: "x"},
        {FRACTION_VARIABLE: "nan"},
        {FRACTION_VARIABLE: "0"},
        {FRACTION_VARIABLE: "1.5"},
        {FRACTION_VARIABLE: "0.5", PART_SEED_VARIABLE: "-1"},
    ],
)
def test_malformed_variable_is_rejected_by_name(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="HETERO_SAMPLE_"):
        part_of(environ)


@pytest.mark.parametrize(("whole", "fraction", "used"), [(1000, 0.02, 20), (10, 0.01, 1), (0, 0.5, 0), (7, 1.0, 7)])
def test_part_has_the_fraction_of_the_samples_and_at_least_one(whole: int, fraction: float, used: int) -> None:
    part = SamplePart(fraction=fraction)
    assert part.num_samples(whole) == used
    indices = part.indices(whole)
    assert len(indices) == len(set(indices.tolist())) == used
    assert list(indices) == sorted(indices)
    assert used == 0 or (indices.min() >= 0 and indices.max() < whole)


def test_part_depends_on_the_seed_alone() -> None:
    first, again, other = (SamplePart(fraction=0.1, seed=seed).indices(500) for seed in (1, 1, 2))
    assert (first == again).all()
    assert not (first == other).all()


@pytest.mark.parametrize("shuffle", [False, True])
def test_order_of_a_part_has_its_samples_once_on_all_ranks(shuffle: bool) -> None:
    part = SamplePart(fraction=0.1, seed=3).indices(400)
    order = BuiltInOrder(num_samples=len(part), batch_size=4, seed=5, shuffle=shuffle, part=part)
    delivered = [
        index
        for rank in range(2)
        for batch in order.batches(0, Shard(rank, 2))
        for index in np.asarray(batch.work.indices).tolist()
    ]
    assert sorted(delivered) == part.tolist()
