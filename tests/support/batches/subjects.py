"""Data sets that draw, and requests for them."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest

from hetero.batches.indexed import IndexedWork
from hetero.batches.indices import as_indices
from hetero.batches.purity.comparison import compare
from hetero.batches.request import BatchRequest
from hetero.errors import DatasetError, SampleFailure
from hetero.spec import DatasetSpec

torch = pytest.importorskip("torch")
data = torch.utils.data


class Augmented(data.Dataset[Any]):
    """Draws from all three global generators."""

    def __init__(self, size: int = 20) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return {"index": index, "noise": torch.rand(3), "numpy": np.random.rand(2), "flip": random.random()}


class Batched(Augmented):
    """Has torch's batched protocol."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(index, float(np.random.rand()), len(indices)) for index in indices]


class Seeded:
    """Holds another generator."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.generator = np.random.default_rng()

    def on_seed(self, key: int) -> None:
        self.keys.append(key)
        self.generator = np.random.default_rng(key)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return float(self.generator.random())


class Keyless:
    def __getitem__(self, index: int) -> int:
        return index


def request(indices: Any = (3, 1, 4), occurrences: Any = None, **options: Any) -> BatchRequest:
    options = {"seed": 17, "epoch": 2, "position": 5, **options}
    return BatchRequest(spec=DatasetSpec("any"), work=IndexedWork(as_indices(indices), occurrences), **options)


def failure(raised: pytest.ExceptionInfo[DatasetError]) -> SampleFailure:
    record = pickle.loads(pickle.dumps(raised.value)).record
    assert isinstance(record, SampleFailure)
    return record


def same(first: Any, second: Any) -> bool:
    return compare(first, second) is None
