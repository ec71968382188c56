"""Digests of the values of globals."""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import logging
import re
import threading
from collections import deque
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetero.batches.purity.values import plain_digest, value_digest

torch = pytest.importorskip("torch")


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Options:
    size: int
    names: tuple[str, ...] = ()


class Plain:
    def __init__(self, size: int) -> None:
        self.size = size


class Slotted:
    __slots__ = "size"

    def __init__(self, size: int) -> None:
        self.size = size


DIFFERENT: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    2,
    2**200,
    0.0,
    1.0,
    float("nan"),
    1j,
    "",
    "a",
    b"a",
    PurePosixPath("a"),
    Color.RED,
    Color.BLUE,
    (),
    [],
    (1,),
    [1],
    [1, 2],
    {},
    {"a": 1},
    {"a": 2},
    {"a": 1, "b": 2},
    set(),
    {1},
    {1, 2},
    range(3),
    dt.date(2024, 1, 1),
    dt.timedelta(seconds=1),
    decimal.Decimal("1.5"),
    re.compile("a"),
    np.int64(1),
    np.float32(1),
    np.zeros(3),
    np.zeros(3, np.float32),
    np.zeros((3, 1)),
    np.ones(3),
    np.zeros(300_000),
    np.ones(300_000),
    torch.zeros(3),
    torch.zeros(3, dtype=torch.bfloat16),
    torch.zeros(300_000),
    torch.ones(3),
    list(range(40_000)),
    list(range(1, 40_001)),
    argparse.Namespace(size=1),
    argparse.Namespace(size=2),
    SimpleNamespace(size=1),
    Options(1),
    Options(2),
    Plain(1),
    Plain(2),
]


def test_digest_of_values_that_differ_differs_and_of_equal_ones_is_the_same() -> None:
    digests = [plain_digest(value) for value in DIFFERENT]
    assert None not in digests
    assert len(set(digests)) == len(DIFFERENT)
    assert plain_digest({"a": 1, "b": 2}) != plain_digest({"b": 2, "a": 1})  # classes may be numbered in this order
    assert plain_digest({1, 2}) == plain_digest({2, 1})


def test_digest_covers_an_attribute_in_the_only_slot() -> None:
    assert value_digest(Slotted(1)) != value_digest(Slotted(2))


@pytest.mark.parametrize(
    "value",
    [np.zeros(2**20), torch.zeros(2**21), "x" * (2**22 + 1), list(range(10**6)), [[n] * 300 for n in range(6_000)]],
    ids=["array", "tensor", "text", "list", "nested"],
)
def test_digest_of_a_large_value_is_empty(value: Any) -> None:
    assert plain_digest(value) == ""


class Hostile:
    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return Hostile
        raise RuntimeError("leave me alone")


@pytest.mark.parametrize(
    "value",
    [
        len,
        Plain,
        logging,
        logging.getLogger("x"),
        threading.Lock(),
        torch.nn.Linear(1, 1),
        torch.device("cpu"),
        np.random.default_rng(0),
        [len],
        {"a": object()},
        np.array([object()]),
        torch.zeros(3).to_sparse(),
        torch.zeros(2, device="meta"),
        Hostile(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_digest_of_what_is_no_plain_data_is_none(value: Any) -> None:
    assert plain_digest(value) is None


def cyclic() -> list[Any]:
    cycle: list[Any] = []
    cycle.append(cycle)
    return cycle


def test_digest_of_a_cycle_is_that_of_an_equal_one() -> None:
    assert plain_digest(cyclic()) == plain_digest(cyclic()) != plain_digest([[]])
    assert plain_digest([cyclic(), cyclic()]) == plain_digest([cyclic(), cyclic()])


def test_digest_does_not_depend_on_what_is_shared() -> None:
    part = [1, "a"]
    assert plain_digest([part, part]) == plain_digest([[1, "a"], [1, "a"]])


def scaled(value: int) -> Any:
    def inner(index: int) -> int:
        return index * value

    return inner


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(1), scaled(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, 1), functools.partial(min, 1)),
        (lambda: 1, lambda: 2),
        (Plain, Options),
        (Plain(range(3)), Plain(range(4))),  # type: ignore[arg-type]
        (Plain(deque([1])), Plain(deque([2]))),  # type: ignore[arg-type]
        (torch.nn.ReLU(inplace=True), torch.nn.ReLU()),
        (torch.zeros(3).to_sparse(), torch.ones(3).to_sparse()),
        ([threading.Lock()], [threading.Event()]),
    ],
    ids=str,
)
def test_digest_of_everything_that_a_value_holds(one: Any, other: Any) -> None:
    assert value_digest(one) == value_digest(one) != value_digest(other)


def test_digest_of_everything_ignores_what_cannot_be_inspected() -> None:
    assert value_digest([Hostile(), 1]) == value_digest([Hostile(), 1]) != value_digest([Hostile(), 2])
    assert value_digest(threading.Lock()) == value_digest(threading.Lock())
