"""Data sets that are put together from a description: endpoints serve them, tests compute the same ones beside them."""

from __future__ import annotations

import collections
import random
import types
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data

import hetero
from hetero.endpoint import service

if __name__ == "__hetero_script__":  # in an endpoint
    service.MAX_DATASETS = 2**20  # each case is a data set of its own

Recipe = list[Any]
"""What a sample is made of: the name of a kind, and its options. Plain JSON values, as arguments of factories are."""


class Point(NamedTuple):
    """A sample with names."""

    x: Any
    y: Any


class Trouble(Exception):
    """An exception of the script's own."""


class Picky(Exception):
    """An exception that no single message makes."""

    def __init__(self, first: str, second: int) -> None:
        super().__init__(first, second)
        self.second = second


ERRORS: dict[str, Any] = {
    "file": lambda: FileNotFoundError(2, "No such file or directory", "photo.jpg"),
    "key": lambda: KeyError("label"),
    "own": lambda: Trouble("broken sample"),
    "picky": lambda: Picky("broken sample", 3),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "value": lambda: ValueError("broken sample"),
}


def make(recipe: Recipe, index: int) -> Any:
    """Return what ``recipe`` describes for one index."""
    kind, *options = recipe
    return _MAKERS[kind](index, *options)


def _tensor(index: int, dtype: str, shape: list[int], layout: str) -> torch.Tensor:
    count = int(np.prod(shape))
    values = ((torch.arange(count) + index) % 100).to(getattr(torch, dtype))
    if layout == "transposed" and shape:
        return values.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
    if layout == "channels_last" and len(shape) == 4:
        return values.reshape(shape).to(memory_format=torch.channels_last)
    return values.reshape(shape)


def _array(index: int, dtype: str, shape: list[int], order: Any) -> np.ndarray[Any, Any]:
    values = (np.arange(int(np.prod(shape))) + index) % 100
    return np.asarray(values.reshape(shape).astype(dtype), order=order)


def _mapping(index: int, parts: list[tuple[str, Recipe]]) -> dict[str, Any]:
    return {name: make(part, index) for name, part in parts}


_MAKERS: dict[str, Any] = {
    "int": lambda index: index,
    "float": lambda index: index / 3,
    "bool": lambda index: index % 2 == 0,
    "str": lambda index: f"sample {index}",
    "bytes": lambda index: b"\x00sample %d" % index,
    "none": lambda index: None,
    "complex": lambda index: complex(index, 1),
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda index, dtype: np.dtype(dtype).type(index),
    "noise": lambda index: (torch.rand(2), random.random(), float(np.random.rand())),
    "ragged": lambda index: torch.arange(index % 3 + 1),
    "dict": _mapping,
    "ordered": lambda index, parts: collections.OrderedDict(_mapping(index, parts)),
    "proxy": lambda index, parts: types.MappingProxyType(_mapping(index, parts)),
    "list": lambda index, parts: [make(part, index) for part in parts],
    "tuple": lambda index, parts: tuple(make(part, index) for part in parts),
    "point": lambda index, x, y: Point(make(x, index), make(y, index)),
}


class Composed(torch.utils.data.Dataset[Any]):
    """Samples of one recipe. Some raise. A bulk index is answered in bulk.

    Args:
        recipe: Of a sample.
        length: Samples.
        raises: Name of the exception in `ERRORS` of each sample that raises.
    """

    def __init__(self, recipe: Recipe, length: int, raises: dict[str, str]) -> None:
        self.recipe = recipe
        self.length = length
        self.raises = raises

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return [self[one] for one in index]
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} of {self.length}")
        index %= self.length
        if str(index) in self.raises:
            raise ERRORS[self.raises[str(index)]]()
        return make(self.recipe, index)


class Bulk(Composed):
    """The same with torch's batched method, which marks its lists."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self[index], len(indices)) for index in indices]


class Keyed(torch.utils.data.Dataset[Any]):
    """Samples by any hashable key."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: Any) -> Any:
        return repr(key), make(self.recipe, len(repr(key)))


def keep(samples: Any) -> Any:
    """Return the samples themselves."""
    return samples


def count(samples: Any) -> Any:
    """Return how many samples there are, with the first."""
    return len(samples), samples[0]


def refuse_odd(samples: Any) -> Any:
    """Raise for a batch of three samples."""
    if len(samples) == 3:
        raise Trouble("three samples")
    return samples


COLLATE = {"default": None, "keep": keep, "count": count, "refuse_odd": refuse_odd}


def compose(recipe: Recipe, length: int, raises: dict[str, str], kind: str) -> Any:
    """Return the data set of these arguments."""
    if kind == "keyed":
        return Keyed(recipe)
    return (Bulk if kind == "bulk" else Composed)(recipe, length, raises)


@hetero.dataset
def composed_default(recipe: Recipe, length: int, raises: dict[str, str], kind: str) -> Any:
    """Serve it with torch's collation."""
    return compose(recipe, length, raises, kind)


@hetero.dataset(collate_fn=keep)
def composed_keep(recipe: Recipe, length: int, raises: dict[str, str], kind: str) -> Any:
    """Serve it with batches that are lists of samples."""
    return compose(recipe, length, raises, kind)


@hetero.dataset(collate_fn=count)
def composed_count(recipe: Recipe, length: int, raises: dict[str, str], kind: str) -> Any:
    """Serve it with batches that are pairs."""
    return compose(recipe, length, raises, kind)


@hetero.dataset(collate_fn=refuse_odd)
def composed_refuse_odd(recipe: Recipe, length: int, raises: dict[str, str], kind: str) -> Any:
    """Serve it with a collation that sometimes raises."""
    return compose(recipe, length, raises, kind)


REGISTERED = {
    "default": composed_default,
    "keep": composed_keep,
    "count": composed_count,
    "refuse_odd": composed_refuse_odd,
}
