"""Copies of nested batches."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hetero.batches.purity.comparison import compare
from hetero.torch.leaf_copies import copy_leaves
from hetero.torch.shared_memory import shared_bytes
from tests.support.batches.odd_tensors import ODD, make

Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    array: Any
    text: str = "text"


class Extended(collections.UserDict[str, Any]):
    """As the batches of some tokenisers."""


class LockedDict(dict[str, Any]):
    """Immutable after it was made."""

    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("immutable")


class LockedMapping(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class LockedSequence(Sequence[Any]):
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = tuple(items)

    def __getitem__(self, position: Any) -> Any:
        return self._items[position]

    def __len__(self) -> int:
        return len(self._items)


class Peculiar(LockedSequence):
    """Cannot be made from its items."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__((first, second))


class Triple(collections.namedtuple("Triple", "first second third")):
    def __new__(cls, first: Any, second: Any, third: Any) -> Triple:
        return super().__new__(cls, first, second, third)


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
        lambda leaf: types.MappingProxyType({"a": [leaf]}),
        lambda leaf: LockedDict(a=leaf, b=1),
        lambda leaf: LockedMapping({"a": [leaf], "b": 1}),
        lambda leaf: LockedSequence([leaf, 1]),
        lambda leaf: collections.deque([1, leaf], maxlen=2),
        lambda leaf: collections.UserList([1, leaf]),
        lambda leaf: Triple(leaf, 1, 2),
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


@pytest.mark.parametrize("kind", ODD)
def test_copy_of_an_odd_tensor_is_equal_and_of_its_type(kind: str) -> None:
    value = make(kind)
    copied = copy_leaves({"a": [value]})["a"][0]
    assert type(copied) is type(value)
    assert compare(copied, value) is None
    shared_bytes({"a": [value]})


def test_copy_of_a_tensor_that_begins_a_graph_begins_one_too() -> None:
    for value in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))):
        copied = copy_leaves(value)
        assert copied.is_leaf
        assert copied.requires_grad
        assert copied.data_ptr() != value.data_ptr()


def test_copy_of_a_small_view_is_small() -> None:
    assert copy_leaves(torch.zeros(10**6)[:3]).untyped_storage().nbytes() == 12


def test_copy_of_a_container_that_refuses_is_the_container() -> None:
    value = Peculiar(torch.zeros(2), 1)
    assert copy_leaves([value])[0] is value


@pytest.mark.parametrize(
    "value",
    [frozenset({1}), types.MappingProxyType({"a": 1}), object(), torch.zeros(2, 3).max(dim=0), torch.Size([1]), {1, 2}],
)
def test_copy_of_other_objects_is_the_object(value: Any) -> None:
    assert copy_leaves(value) is value
