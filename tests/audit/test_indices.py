"""Digests of what a batch is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.audit.indices import indices_digest, samples_sum
from hetero.batches.request import as_indices

keys = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.tuples(st.integers(-5, 5), st.integers(-5, 5))


def total(parts: list[bytes]) -> list[int]:
    return np.array([np.frombuffer(part, "<u8") for part in parts]).sum(axis=0, dtype=np.uint64).tolist()


@given(st.lists(keys, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_samples_sum_of_parts_is_that_of_the_whole_in_any_order(values: list[Any], ranks: int, random: Any) -> None:
    occurrences = np.array([random.randrange(3) for _ in values], np.uint32)
    for leave_out in (False, True):
        whole = samples_sum(as_indices(values), occurrences, leave_out_repeats=leave_out)
        places = list(range(len(values)))
        random.shuffle(places)
        if all(isinstance(value, int) for value in values) or all(not isinstance(value, int) for value in values):
            parts = [
                samples_sum(
                    as_indices([values[place] for place in places[rank::ranks]]),
                    occurrences[places[rank::ranks]],
                    leave_out_repeats=leave_out,
                )
                for rank in range(ranks)
            ]
            assert total(parts) == np.frombuffer(whole, "<u8").tolist()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([1, 2], [1, 3]),
        ([1], [1, 1]),
        ([], [0]),
        ([1], ["1"]),
        (["a", "b"], ["ab"]),
        ([(1, 2)], [(1, 3)]),
    ],
)
def test_indices_digest_tells_lists_apart(one: list[Any], other: list[Any]) -> None:
    assert indices_digest(as_indices(one), None) != indices_digest(as_indices(other), None)


def test_indices_digest_counts_occurrences_but_not_their_absence() -> None:
    indices = as_indices([1, 2])
    zeros = np.zeros(2, np.uint32)
    assert indices_digest(indices, None) == indices_digest(indices, zeros)
    assert indices_digest(indices, None) != indices_digest(indices, zeros + 1)


def test_samples_sum_tells_samples_apart_and_leaves_out_padding() -> None:
    batch = as_indices([5, 6, 5])
    repeats = np.array([0, 0, 1], np.uint32)
    padded = samples_sum(batch, repeats, leave_out_repeats=True)
    assert padded == samples_sum(as_indices([5, 6]), None, leave_out_repeats=True)
    assert padded != samples_sum(batch, repeats, leave_out_repeats=False)
    assert len({samples_sum(as_indices([n, n + 1]), None, leave_out_repeats=True) for n in range(1000)}) == 1000
