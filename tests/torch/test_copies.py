"""Copies of nested batches."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from hetero.batches.purity import compare
from hetero.torch.copies import copy_leaves

Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    array: Any
    text: str = "text"


class Extended(collections.UserDict[str, Any]):
    """As the batches of some tokenisers."""


@pytest.mark.parametrize("leaf", [torch.arange(3), np.arange(3), torch.arange(6)[::2], np.arange(6)[::2]])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda leaf: leaf,
        lambda leaf: [leaf, 1, "a", None],
        lambda leaf: (leaf, 2.5),
        lambda leaf: {"a": leaf, 3: b"b"},
        lambda leaf: collections.OrderedDict(b=1, a=[leaf]),
        lambda leaf: collections.defaultdict(list, a=(leaf,)),
        lambda leaf: Pair(leaf, 1),
        lambda leaf: Record(leaf),
        lambda leaf: Extended(a={"b": leaf}),
    ],
)
def test_copy_is_equal_and_shares_no_memory(wrap: Any, leaf: Any) -> None:
    value = wrap(leaf)
    copied = copy_leaves(value)
    assert compare(value, copied) is None
    before = leaf.tolist()
    find_leaf(copied)[:] = 7
    assert leaf.tolist() == before


def find_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return value
    if isinstance(value, Record):
        return value.array
    items = list(value.values()) if hasattr(value, "values") else list(value)
    return find_leaf(next(item for item in items if not isinstance(item, int | str)))


@pytest.mark.parametrize(
    "value", [torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(2, 3).t()]
)
def test_copy_keeps_strides(value: torch.Tensor) -> None:
    assert copy_leaves(value).stride() == value.stride()
    assert copy_leaves(value.numpy()).strides == value.numpy().strides


def test_copy_of_a_small_view_is_small() -> None:
    assert copy_leaves(torch.zeros(10**6)[:3]).untyped_storage().nbytes() == 12


@pytest.mark.parametrize("value", [object(), torch.zeros(2, 3).max(dim=0), torch.Size([1]), {1, 2}])
def test_copy_of_other_objects_is_the_object(value: Any) -> None:
    assert copy_leaves(value) is value
