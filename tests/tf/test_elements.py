"""Batches as elements, and the specification that they fit."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'tensorflow>=2.16'")

from hetero.errors import ConfigError  # noqa: E402
from hetero.tf.elements import (  # noqa: E402
    check_element,
    check_spec,
    copied_element,
    derive_spec,
    element_nbytes,
    num_samples_of,
    to_element,
)


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclasses.dataclass
class Record:
    image: Any


def spec_of(first: Any, second: Any, *, num_first: int = 4, num_second: int = 2, drop_last: bool = False) -> Any:
    probes = [(num_first, to_element(first)), (num_second, to_element(second))]
    return derive_spec(probes, batch_size=4, drop_last=drop_last)


def test_element_keeps_structure_and_makes_arrays_of_all_leaves() -> None:
    image = np.zeros((2, 3), np.uint8)
    batch = {
        "image": image,
        "names": ["a", "ä"],
        "raw": [b"x", b"y"],
        "counts": [1, 2],
        "epoch": 3,
        "rate": 0.5,
        "last": True,
        "name": "train",
        "pair": Pair(image, [1.0, 2.0]),
        "texts": ("a", "b"),
        "parts": [image, image],
        "scalar": np.float32(2),
    }
    element = to_element(batch)
    assert element["image"] is image
    assert element["names"].tolist() == [b"a", "ä".encode()]
    assert element["raw"].dtype == object
    assert (element["counts"].dtype, element["epoch"].dtype, element["rate"].dtype) == ("int64", "int64", "float64")
    assert (element["last"].dtype, element["name"].shape, element["name"][()]) == (np.dtype(bool), (), b"train")
    assert type(element["pair"]) is Pair
    assert element["texts"].tolist() == [b"a", b"b"]
    assert type(element["parts"]) is tuple
    assert (element["scalar"].shape, element["scalar"].dtype) == ((), "float32")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": None}, r"batch\['image'\] is None, which cannot be a tensor"),
        ((1, [Record(1)]), r"batch\[1\]\[0\] is a .*Record, which cannot be a tensor"),
        (Pair(1, {1, 2}), r"batch.label is a set"),
        ({"a": 1, 2: 1}, "batch has keys of several types"),
    ],
)
def test_what_is_no_element_is_named(batch: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        to_element(batch)


def test_torchs_tensors_are_elements_without_a_copy() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(3)
    element = to_element([tensor, torch.ones(2, dtype=torch.bfloat16)])
    assert np.shares_memory(element[0], tensor.numpy())
    assert tf.as_dtype(element[1].dtype) is tf.bfloat16
    assert element[1].astype(np.float32).tolist() == [1.0, 1.0]


def test_spec_has_none_for_what_differs() -> None:
    first = {"image": np.zeros((4, 8), np.uint8), "name": ["a"] * 4, "tokens": np.zeros((4, 7)), "scale": 1}
    second = {"image": np.zeros((2, 8), np.uint8), "name": ["a"] * 2, "tokens": np.zeros((2, 5)), "scale": 1}
    assert spec_of(first, second) == {
        "image": tf.TensorSpec([None, 8], tf.uint8),
        "name": tf.TensorSpec([None], tf.string),
        "tokens": tf.TensorSpec([None, None], tf.float64),
        "scale": tf.TensorSpec([], tf.int64),
    }
    whole = spec_of(first, second, drop_last=True)
    assert whole["image"] == tf.TensorSpec([4, 8], tf.uint8)
    assert whole["tokens"] == tf.TensorSpec([4, None], tf.float64)


def test_spec_of_several_rows_per_sample_or_of_a_small_data_set_is_that_of_a_whole_batch() -> None:
    assert spec_of(np.zeros((8, 3)), np.zeros((4, 3)), drop_last=True).shape == [8, 3]
    assert spec_of(np.zeros(1), np.zeros(2), num_first=1, num_second=2, drop_last=True).shape == [4]


def test_spec_of_batches_of_the_data_sets_own_has_no_first_dimension() -> None:
    probes = [(1, to_element([np.zeros((4, 3, 5)), 1])), (1, to_element([np.zeros((4, 2, 5)), 1]))]
    spec = derive_spec(probes, batch_size=None, drop_last=True)
    assert spec == (tf.TensorSpec([None, None, 5], tf.float64), tf.TensorSpec([], tf.int64))
    assert num_samples_of(probes[0][1]) == 4
    assert num_samples_of(to_element((1, 2.0))) == 1


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"a": np.zeros(4)}, {"b": np.zeros(2)}, "batch is a dict of 'a' in one batch, expected a dict of 'b'"),
        (
            [np.zeros(4)] * 3,
            [np.zeros(2)] * 2,
            "a tuple of 3 in one batch, expected a tuple of 2(.|\n)*varies",
        ),
        ((np.zeros(4), 1), (np.zeros(2), (1,)), r"batch\[1\] is a tensor in one batch, expected a tuple of 1"),
        ([np.zeros(4), 1], [np.zeros(2), 1.0], r"batch\[1\] has dtype int64 in one batch and float64"),
        (np.zeros((4, 1)), np.zeros(2), r"batch has shape \(4, 1\) in a batch of 4 samples and \(2,\) in one of 2"),
    ],
)
def test_batches_without_one_spec_are_named(first: Any, second: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(first, second)


def test_element_that_does_not_fit_is_named_with_what_was_expected() -> None:
    spec = {"tokens": tf.TensorSpec([None, 7], tf.int64), "name": tf.TensorSpec([None], tf.string)}
    check_element(to_element({"tokens": np.zeros((3, 7), np.int64), "name": ["a", "b", "c"]}), spec)
    for batch, words in (
        ({"tokens": np.zeros((3, 8), "int64"), "name": []}, r"\['tokens'\] has shape \(3, 8\), expected \(None, 7\)"),
        (
            {"tokens": np.zeros((3, 7)), "name": ["a"]},
            r"has dtype float64, expected int64(.|\n)*one dtype in",
        ),
        (
            {"tokens": np.zeros((3, 7), np.int64)},
            "batch is a dict of 'tokens' in one batch, expected a dict of 'to",
        ),
        ({"tokens": (1, 2), "name": ["a"]}, r"batch\['tokens'\] is a tuple of 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_element(to_element(batch), spec)
    with pytest.raises(ConfigError, match="element_spec="):
        check_element(to_element({"tokens": np.zeros((3, 8), np.int64), "name": ["a"]}), spec)


def test_users_spec_must_be_one() -> None:
    spec = (tf.TensorSpec([None], tf.int64), {"a": tf.TensorSpec([], tf.string)})
    assert check_spec(spec) == spec
    for wrong in (tf.int64, (tf.TensorSpec([]), None), [tf.TensorSpec([])]):
        with pytest.raises(ConfigError, match="expected tf.TensorSpec"):
            check_spec(wrong)


def test_copied_element_has_memory_of_its_own() -> None:
    batch = {"pair": Pair(np.ones((2, 3), np.float32), np.zeros(2, np.int64)), "names": ["a", "b"]}
    copied = copied_element(batch)
    batch["pair"].image.fill(7)
    assert type(copied["pair"]) is Pair
    assert (copied["pair"].image.tolist(), copied["names"].tolist()) == ([[1, 1, 1]] * 2, [b"a", b"b"])
    assert element_nbytes({"pair": batch["pair"]}) == 2 * 3 * 4 + 2 * 8
