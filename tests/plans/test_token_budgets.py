"""Batches by tokens: each sample once, ranks in balance, little padding, and a resume in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero import TokenBudget
from hetero.errors import ConfigError

LENGTHS = np.random.default_rng(3).lognormal(6, 0.8, 60_000).astype(np.int64).clip(8, 4096)


def steps_of(num_ranks: int, lengths: Any = LENGTHS, max_tokens: int = 16_384, **options: Any) -> list[list[list[int]]]:
    """Return the batches of each rank, step by step."""
    parts = []
    for rank in range(num_ranks):
        np.random.seed(5)
        parts.append(list(TokenBudget(lengths, max_tokens, shard=(rank, num_ranks), **options)))
    assert len({len(part) for part in parts}) == 1, "a rank has no batch"
    return [list(batches) for batches in zip(*parts, strict=True)]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=300),
    num_ranks=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_each_sample_comes_once(lengths: list[int], num_ranks: int, shuffle: bool, drop_last: bool) -> None:
    steps = steps_of(num_ranks, lengths, 60, shuffle=shuffle, drop_last=drop_last)
    flat = [index for step in steps for batch in step for index in batch]
    if drop_last:
        assert len(set(flat)) == len(flat)
    else:
        assert set(flat) == set(range(len(lengths)))
        assert len(flat) < len(lengths) + num_ranks
    for step in steps:
        assert len({len(batch) for batch in step}) == 1
        assert all(len(batch) * max(lengths[index] for index in batch) <= 60 for batch in step)


def test_eight_ranks_of_log_normal_lengths_are_in_balance_and_hardly_padded() -> None:
    steps = steps_of(8)
    used = sum(int(LENGTHS[batch].sum()) for step in steps for batch in step)
    padded = sum(len(batch) * int(LENGTHS[batch].max()) for step in steps for batch in step)
    assert 1 - used / padded <= 0.05
    # The last step has what is left of all pools.
    for step in steps[:-1]:
        tokens = [int(LENGTHS[batch].sum()) for batch in step]
        assert max(tokens) <= 1.02 * min(tokens), tokens


def test_loader_delivers_a_budget_and_resumes_it() -> None:
    torch = pytest.importorskip("torch")
    from hetero.torch import DataLoader

    class Texts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 500

        def __getitem__(self, index: int) -> Any:
            return torch.full((int(LENGTHS[index]) % 50 + 1,), index)

    def pad(samples: list[Any]) -> Any:
        return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)

    lengths = LENGTHS[:500] % 50 + 1

    def loader() -> Any:
        return DataLoader(Texts(), batch_sampler=TokenBudget(lengths, 256, shard=(0, 1)), collate_fn=pad, seed=2)

    whole = [batch.tolist() for batch in loader()]
    assert {row[0] for batch in whole for row in batch} == set(range(500))
    first = loader()
    iterator = iter(first)
    begin = [next(iterator).tolist() for _ in range(9)]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert begin + [batch.tolist() for batch in resumed] == whole
    # The next epoch has other batches.
    assert [batch.tolist() for batch in resumed] != whole
    lengths = lengths[:499]
    with pytest.raises(ConfigError, match="499 lengths, and the data set has 500 samples"):
        next(iter(loader()))


def test_data_set_without_a_length_is_not_compared_with_the_lengths() -> None:
    torch = pytest.importorskip("torch")
    from hetero.torch import DataLoader

    class Numbers(torch.utils.data.Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            return index

    loader = DataLoader(Numbers(), batch_sampler=TokenBudget([3] * 20, 12, shard=(0, 1)))
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(20))


def test_lengths_that_cannot_be_meant(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([3, 4]))
    assert len(TokenBudget(tmp_path / "lengths.npy", 4, shard=(0, 1))) == 2
    for lengths, message in (
        ([3, 9, 5], "sample 1 has 9 tokens, and max_tokens is 8"),
        ([3, 0], "sample 1 has a length below 1"),
        ([[3]], "expected whole numbers"),
        ([0.5], "expected whole numbers"),
        (tmp_path / "none.npy", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            TokenBudget(lengths, 8)
