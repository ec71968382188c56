"""Indexed work: digests of the samples of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.indexed import IndexedWork
from hetero.batches.indices import as_indices

keys = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.tuples(st.integers(-5, 5), st.integers(-5, 5))


def work(values: Iterable[Any], occurrences: Any = None) -> IndexedWork:
    return IndexedWork(as_indices(values), occurrences)


def total(parts: list[bytes]) -> list[int]:
    return np.array([np.frombuffer(part, "<u8") for part in parts]).sum(axis=0, dtype=np.uint64).tolist()


@given(st.lists(keys, max_size=12), st.integers(1, 4), st.randoms(use_true_random=False))
def test_samples_sum_of_parts_is_that_of_the_whole_in_any_order(values: list[Any], ranks: int, random: Any) -> None:
    occurrences = np.array([random.randrange(3) for _ in values], np.uint32)
    for leave_out in (False, True):
        whole = work(values, occurrences).samples_sum(leave_out_repeats=leave_out)
        places = list(range(len(values)))
        random.shuffle(places)
        if all(isinstance(value, int) for value in values) or all(not isinstance(value, int) for value in values):
            parts = [
                work([values[place] for place in places[rank::ranks]], occurrences[places[rank::ranks]]).samples_sum(
                    leave_out_repeats=leave_out
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
    assert work(one).digest() != work(other).digest()


def test_indices_digest_counts_occurrences_but_not_their_absence() -> None:
    zeros = np.zeros(2, np.uint32)
    assert work([1, 2]).digest() == work([1, 2], zeros).digest()
    assert work([1, 2]).digest() != work([1, 2], zeros + 1).digest()


def test_samples_sum_tells_samples_apart_and_leaves_out_padding() -> None:
    batch = work([5, 6, 5], np.array([0, 0, 1], np.uint32))
    padded = batch.samples_sum(leave_out_repeats=True)
    assert padded == work([5, 6]).samples_sum(leave_out_repeats=True)
    assert padded != batch.samples_sum(leave_out_repeats=False)
    assert len({work([n, n + 1]).samples_sum(leave_out_repeats=True) for n in range(1000)}) == 1000
