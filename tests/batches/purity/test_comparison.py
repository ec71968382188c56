"""Comparison and sketches of nested batches."""

from __future__ import annotations

import collections
import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.batches.purity.comparison import compare, digest, freeze, outline, sketch

torch = pytest.importorskip("torch")

Pair = collections.namedtuple("Pair", "image label")


@dataclasses.dataclass
class Record:
    text: str
    array: Any


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


class PictureLike:
    """What NumPy can view, as a PIL image."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.array


def nan(payload: int) -> np.ndarray[Any, Any]:
    return np.frombuffer(struct.pack("<I", 0x7FC00000 | payload), dtype=np.float32)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=10,
)


@given(values)
def test_compare_of_value_with_itself_is_none(value: Any) -> None:
    assert compare(value, value) is None
    assert compare(freeze(value), value) is None
    assert sketch(value) == sketch(value)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        (1, 2, ""),
        (1, 1.0, ""),
        (1, True, ""),
        (0.0, -0.0, ""),
        (None, 0, ""),
        ("a", b"a", ""),
        ([1, 2], (1, 2), ""),
        ([1, [2, 3]], [1, [2, 4]], "[1][1]"),
        ([1, 2], [1, 2, 3], ""),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ".keys()"),
        ({"a": 1}, collections.OrderedDict(a=1), ""),
        ({"a": {"b": [1]}}, {"a": {"b": [2]}}, "['a']['b'][0]"),
        (Pair(1, 2), (1, 2), ""),
        (Pair(1, "x"), Pair(1, "y"), "[1]"),
        (Record("a", 1), Record("a", 2), ".array"),
        (Opaque(1), Opaque(2), ".value"),
        ({1, 2}, {1, 3}, ""),
        (PictureLike(np.zeros(3)), PictureLike(np.ones(3)), ""),
        (nan(1), nan(2), ""),
        (np.zeros(2, np.int32), np.zeros(2, np.int64), ""),
        (np.zeros((2, 3)), np.zeros((3, 2)), ""),
        (np.float32(1), np.float64(1), ""),
        (np.array(["a"]), np.array(["b"]), ""),
        (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object), "[1]"),
        (torch.zeros(3), torch.tensor([0.0, 0.0, -0.0]), ""),
        (torch.zeros(3), np.zeros(3, np.float32), ""),
        (torch.from_numpy(nan(1).copy()), torch.from_numpy(nan(2).copy()), ""),
        (torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0, 0, 1], dtype=torch.bfloat16), ""),
        (torch.tensor([True]), torch.tensor([False]), ""),
        (torch.tensor([1 + 1j]).conj(), torch.tensor([1 + 1j]), ""),
        (torch.eye(2).to_sparse(), torch.eye(2), ""),
    ],
)
def test_compare_of_different_values_names_the_path(first: Any, second: Any, path: str) -> None:
    difference = compare([first], [second])
    assert difference is not None
    assert difference.path == f"[0]{path}"
    assert str(difference).startswith(f"batch[0]{path}: ")


@pytest.mark.parametrize(
    "make",
    [
        lambda: nan(7),
        lambda: torch.arange(12).reshape(3, 4).t(),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor([float("nan")], dtype=torch.bfloat16),
        lambda: torch.eye(3).to_sparse(),
        lambda: {"a": (1, Opaque(3)), "b": Record("a", np.arange(3))},
        lambda: np.array([None, "x"], dtype=object),
        lambda: object(),
    ],
)
def test_compare_of_equal_values_is_none(make: Any) -> None:
    assert compare(make(), make()) is None
    assert sketch(make()) == sketch(make())


def test_compare_of_cyclic_values_ends() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    assert compare(cycle, cycle) is None


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        (
            np.zeros(100, np.uint8),
            np.arange(100, dtype=np.uint8),
            "ndarray |u1[100], 99 of 100 bytes differ, the first at 1: 0 against 1",
        ),
        (
            np.array([[0.5, 1.0], [2.0, -0.0]]),
            np.array([[0.5, 1.5], [2.0, 0.0]]),
            "ndarray <f8[2, 2], 2 of 4 elements differ, the first at 1: 1.0 against 1.5",
        ),
        (
            torch.tensor([1, 2]),
            torch.tensor([1, 3]),
            "Tensor int64[2], 1 of 2 elements differ, the first at 1: 2 against 3",
        ),
        (0.25, 0.5, "float, 0.25 against 0.5"),
        (torch.tensor(True), torch.tensor(False), "Tensor bool[], True against False"),
        (nan(7), nan(8), "ndarray <f4[1], nan against nan"),
        ("cat", "dog", "str, 'cat' against 'dog'"),
        (839, 1518, "int, 839 against 1518"),
        (b"cat", b"dog", "bytes, b'cat' against b'dog'"),
        (
            np.array(["ab"] * 9),
            np.array(["ab"] * 8 + ["ac"]),
            "ndarray <U2[9], 1 of 72 bytes differ, the first at 68: 98 against 99",
        ),
        (
            torch.zeros(20, dtype=torch.bfloat16),
            torch.ones(20, dtype=torch.bfloat16),
            "Tensor bfloat16[20], 40 of 40 bytes differ, the first at 0: 0 against 128",
        ),
    ],
)
def test_difference_names_the_values(first: Any, second: Any, what: str) -> None:
    difference = compare(first, second)
    assert difference is not None
    assert difference.what == what
    frozen = compare(freeze(first), second)
    assert frozen is not None
    assert frozen.what == what


def test_difference_has_the_name_of_the_values() -> None:
    difference = compare({"a": [1.0]}, {"a": [2.0]})
    assert difference is not None
    assert str(difference) == "batch['a'][0]: float, 1.0 against 2.0"
    assert difference.within("result") == "result['a'][0]: float, 1.0 against 2.0"


def test_difference_of_strides_names_them() -> None:
    difference = compare(torch.zeros(2, 3), torch.zeros(3, 2).t())
    assert difference is not None
    assert difference.what == "Tensor float32[2, 3] against Tensor float32[2, 3] strides [1, 2]"


def test_digest_of_contiguous_arrays_is_what_it_was() -> None:
    """Ledgers of earlier versions stay comparable."""
    assert digest(np.arange(6, dtype=np.int32).reshape(2, 3)).hex() == "a25190f3f6501b7b55831f2de9d5da1b"
    assert digest({"a": torch.arange(6, dtype=torch.uint8).reshape(2, 3)}).hex() == "4cf9824a33914ce24c786a864d296922"


def test_sketch_of_rounded_values_is_the_same() -> None:
    generator = np.random.default_rng(0)
    image = generator.integers(1, 255, (3, 16, 16), dtype=np.uint8)
    floats = generator.normal(size=1000).astype(np.float32)
    rounded = (image + generator.integers(0, 2, image.shape)).astype(np.uint8)
    assert sketch((image, floats)) == sketch((image, np.nextafter(floats, np.float32(9))))
    assert sketch(image) != sketch(generator.integers(0, 40, (3, 16, 16), dtype=np.uint8))
    assert abs(float(image.mean()) - float(rounded.mean())) < 1


@pytest.mark.parametrize("dtype", ["u1", "i2", "f2", "f4", "c8", "i8", "M8[s]"])
def test_digest_and_sketch_of_an_array_larger_than_a_block_ignore_where_its_elements_are(dtype: str) -> None:
    values = np.random.default_rng(0).integers(0, 100, 3 * 70_001).astype(dtype).reshape(3, 70_001)
    every_other = np.repeat(values, 2, axis=1)[:, ::2]
    reversed_twice = np.ascontiguousarray(values[:, ::-1])[:, ::-1]
    for other in (every_other, reversed_twice):
        assert (digest(other), sketch(other)) == (digest(values), sketch(values))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.arange(100), np.arange(100)[::-1]),
        ("a", "b"),
        (np.zeros(4, np.float32), np.zeros(5, np.float32)),
        (np.arange(100.0), np.arange(100.0)[::-1]),
        (3.0, 4.0),
        (1.0, -1.0),
        (np.full(3, np.inf), np.zeros(3, np.int8)),
    ],
)
def test_sketch_of_other_data_differs(first: Any, second: Any) -> None:
    assert sketch(first) != sketch(second)


def test_outline_shows_types_and_shapes() -> None:
    text = outline({"image": torch.zeros(3, 4), "more": [1, (np.zeros(2, np.uint8), "x")]})
    assert "Tensor torch.float32[3, 4]" in text
    assert "list of 2 (int, tuple of 2 (ndarray uint8[2], str))" in text


@pytest.mark.parametrize("make", [np.zeros, torch.zeros, lambda size: torch.zeros(size).bfloat16()])
def test_frozen_value_does_not_change_with_its_memory(make: Any) -> None:
    array = make(3)
    value = {"a": [Opaque(array)]}
    frozen = freeze(value)
    assert compare(frozen, value) is None
    array[1] = 1
    assert str(compare(frozen, value)).startswith("batch['a'][0].value: ")
    assert str(compare(frozen, [1])) == "batch: dict of 1 against list of 1"


def test_digest_is_equal_where_compare_finds_no_difference() -> None:
    batch = {
        "image": torch.arange(12, dtype=torch.uint8).reshape(3, 4),
        "mask": np.arange(12.0).reshape(3, 4),
        "name": ["a", b"b", None, 1, 2.5, True],
        "pair": Pair(1, "x"),
        "record": Record("a", np.float32(1)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "date": np.array(["2026-01-01"], "datetime64[D]"),
    }
    same = {
        **batch,
        "image": torch.arange(24, dtype=torch.uint8).reshape(3, 4, 2)[:, :, 0].clone() // 2,
        "mask": np.arange(24.0).reshape(3, 8)[:, ::2] / 2,  # a copy of it is in C order
    }
    assert compare(batch, same) is None
    assert digest(batch) == digest(same)
    assert len(digest(batch)) == 16


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        ("a", b"a"),
        (["ab", "c"], ["a", "bc"]),
        ([1, 2], (1, 2)),
        ([[1], 2], [[1, 2]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.zeros(4), np.zeros((2, 2))),
        (np.zeros(4, np.float32), np.zeros(4, np.int32)),
        (np.zeros(4), torch.zeros(4, dtype=torch.float64)),
        (nan(0), nan(1)),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, np.nextafter(np.float32(2), np.float32(3))])),
        (torch.empty(0, 3), torch.empty(3, 0)),
        (torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4).t().contiguous().t()),
        (np.arange(12).reshape(3, 4), np.asfortranarray(np.arange(12).reshape(3, 4))),
        (torch.ones(1, 3, 2, 2), torch.ones(1, 3, 2, 2).to(memory_format=torch.channels_last)),
        (torch.ones(4, 1, 2, 2), torch.ones(4, 1, 2, 2).to(memory_format=torch.channels_last)),
    ],
)
def test_digest_counts_every_bit(first: Any, second: Any) -> None:
    assert compare(first, second) is not None
    assert digest(first) != digest(second)


@given(values, values)
def test_digest_agrees_with_compare(first: Any, second: Any) -> None:
    assert (digest(first) == digest(second)) == (compare(first, second) is None)
