"""Batches of NumPy arrays: what torch's default makes, without torch."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

import hetero
from hetero.batches.collation import collate_arrays


class Pair(NamedTuple):
    image: np.ndarray[Any, Any]
    label: int


SAMPLES: list[Any] = [
    np.arange(6, dtype=np.uint8).reshape(2, 3),
    np.float32(1.5),
    7,
    2.5,
    True,
    "text",
    b"bytes",
    {"image": np.zeros((2, 2), np.float32), "label": 3, "name": "photo"},
    (np.ones(3), 1),
    [np.ones(3), "a"],
    Pair(np.ones(2), 4),
    {"nested": [(1, {"deep": np.int16(3)})]},
]


def assert_same(ours: Any, theirs: Any) -> None:
    """Expect the same values and dtypes. torch makes a list of a tuple, and tensors of arrays."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple) and not isinstance(theirs[0], str | bytes):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    elif hasattr(theirs, "numpy"):
        assert ours.dtype == theirs.numpy().dtype
        np.testing.assert_array_equal(ours, theirs.numpy())
    else:
        assert list(ours) == list(theirs)  # texts


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_collate_arrays_makes_what_torchs_default_makes(sample: Any) -> None:
    torch_data = pytest.importorskip("torch.utils.data")
    assert_same(collate_arrays([sample] * 3), torch_data.default_collate([sample] * 3))


def test_collate_arrays_keeps_the_types_of_containers_and_leaves_samples_alone() -> None:
    samples = [OrderedDict(b=1, a=2), OrderedDict(a=4, b=3)]
    ordered = collate_arrays(samples)
    assert type(ordered) is OrderedDict
    assert [(key, values.tolist()) for key, values in ordered.items()] == [("b", [1, 3]), ("a", [2, 4])]
    assert samples[0] == OrderedDict(b=1, a=2)
    batch = collate_arrays([Pair(np.ones(2), 4), Pair(np.zeros(2), 5)])
    assert type(batch) is Pair
    assert batch.label.tolist() == [4, 5]
    assert type(collate_arrays([(1, 2), (3, 4)])) is tuple


@pytest.mark.parametrize(
    ("samples", "kind", "words"),
    [
        ([np.zeros(2), np.zeros(3)], ValueError, "shape"),
        ([{"a": 1}, {"b": 1}], ValueError, "keys; the first has"),
        ([(1, 2), (1,)], ValueError, "number of parts; the first has 2"),
        ([1, "a"], TypeError, "numbers and int, str in one batch"),
        ([None, None], TypeError, "cannot make an array of NoneType"),
    ],
)
def test_collate_arrays_of_samples_that_differ_says_how(samples: list[Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        collate_arrays(samples)


def test_collate_arrays_is_public_and_imports_no_torch() -> None:
    assert hetero.collate_arrays is collate_arrays
    code = "import sys, hetero; hetero.collate_arrays([1, 2]); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
