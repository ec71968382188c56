"""Validation samples in the training set: splits in factories, and subsets that share samples."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hetero
from hetero.batches import build as building
from hetero.batches.fetch import describe
from hetero.batches.purity.overlaps import Overlaps
from hetero.datasets import build
from hetero.spec import DatasetFactory, DatasetSpec

torch = pytest.importorskip("torch")
data = torch.utils.data


class Numbers(data.Dataset):
    def __init__(self, root: str = "/data", *, augment: bool = False) -> None:
        self.root = root
        self.augment = augment

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True)
def _no_subsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_overlaps", Overlaps())


@pytest.fixture
def register() -> Iterator[Any]:
    names: list[str] = []

    def register(function: Any) -> DatasetFactory:
        factory = hetero.dataset(function)
        names.append(factory.name)
        return factory

    yield register
    for name in names:
        hetero.datasets._factories.pop(name)


def _torch_split() -> tuple[Any, Any]:
    train, val = data.random_split(Numbers(), [0.8, 0.2])
    return train.indices, val.indices


def _numpy_split() -> tuple[Any, Any]:
    order = np.random.permutation(1000)
    return order[:800], order[800:]


def _python_split() -> tuple[Any, Any]:
    order = list(range(1000))
    random.shuffle(order)
    return order[:800], order[800:]


@pytest.mark.parametrize("split", [_torch_split, _numpy_split, _python_split])
def test_split_in_a_factory_for_two_arguments_shares_no_sample(
    split: Any, register: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def photos(split: str) -> Any:
        train, val = split_indices()
        return data.Subset(Numbers(), train if split == "train" else val)

    split_indices = split
    factory = register(photos)
    train, val = (build(factory(split=name)) for name in ("train", "val"))
    assert set(map(int, train.dataset.indices)) & set(map(int, val.dataset.indices)) == set()
    assert train.warnings + val.warnings == ()


def test_split_in_two_factories_shares_no_sample(register: Any) -> None:
    def train_photos(root: str) -> Any:
        return data.random_split(Numbers(), [0.8, 0.2])[0]

    def val_photos(root: str, size: int = 224) -> Any:
        return data.random_split(Numbers(), [0.8, 0.2])[1]

    train, val = (build(register(factory)(root="/data")) for factory in (train_photos, val_photos))
    assert set(train.dataset.indices) & set(val.dataset.indices) == set()


def test_split_that_draws_from_elsewhere_is_said_with_the_number_of_samples(
    register: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def drawn(split: str) -> Any:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))
        base = Numbers(augment=split == "train")
        return data.random_split(base, [0.8, 0.2], generator)[split == "val"]

    factory = register(drawn)
    train = build(factory(split="train"))
    val = build(factory(split="val"))
    num_shared = len(set(train.dataset.indices) & set(val.dataset.indices))
    assert num_shared > 100
    (warning,) = val.warnings
    assert (
        f"subsets of the same 1000 samples ({Numbers.__module__}.Numbers), and {num_shared} samples are in both"
        in warning
    )
    assert describe(val).warnings == val.warnings
    with caplog.at_level(logging.WARNING):
        assert len(factory(split="train")) == 800  # here, too, which splits anew
    assert build(factory(split="val")).warnings == ()  # said already


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (data.Subset(Numbers(), range(10)), data.Subset(Numbers(), range(10, 20))),
        (data.Subset(Numbers("/one"), range(10)), data.Subset(Numbers("/two"), range(10))),
        (data.Subset([1, 2, 3], [0]), data.Subset([4, 5, 6], [0])),
        (
            data.Subset(data.TensorDataset(torch.zeros(9)), [0]),
            data.Subset(data.TensorDataset(torch.ones(9)), [0]),
        ),
        (data.Subset(Numbers(), [0]), Numbers()),
        (data.Subset({"a": 1}, ["a"]), data.Subset({"a": 1}, ["a"])),
    ],
    ids=["disjoint", "other path", "other list", "other tensor", "no subset", "keys"],
)
def test_data_sets_without_shared_samples_are_passed_over(one: Any, other: Any) -> None:
    overlaps = Overlaps()
    assert overlaps.add(DatasetSpec("one"), one) == ()
    assert overlaps.add(DatasetSpec("other"), other) == ()


def test_subset_of_a_subset_is_compared_by_the_samples_of_the_base() -> None:
    overlaps = Overlaps()
    inner = data.Subset(Numbers(), np.arange(500, 1000))
    assert overlaps.add(DatasetSpec("one"), data.Subset(inner, [0, 1, 2])) == ()
    (warning,) = overlaps.add(DatasetSpec("other"), data.Subset(Numbers(), torch.tensor([501, 502, 503])))
    assert "2 samples are in both" in warning
