"""What hosts compare before they serve the same data set."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from hetero import datasets
from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import describe
from hetero.datasets import build, dataset
from hetero.errors import DatasetError
from tests.support.batches.subjects import Augmented, Keyless

torch = pytest.importorskip("torch")
data = torch.utils.data


def fingerprint(dataset_object: Any) -> str:
    return describe(BuiltDataset.from_object(dataset_object)).fingerprint


def test_describe_of_equal_data_is_equal() -> None:
    description = describe(BuiltDataset.from_object(Augmented()))
    assert description == describe(BuiltDataset.from_object(Augmented()))
    assert description.num_samples == 20
    assert {"python", "numpy", "torch", "cpu_capability", "PYTHONHASHSEED"} <= description.environment.keys()


def test_describe_of_other_length_or_order_differs() -> None:
    names = [f"{number}.jpg" for number in range(100)]
    prints = [fingerprint(each) for each in (names, names[::-1], names[:99], [])]
    assert len(set(prints)) == 4


def test_describe_leaves_generators_alone() -> None:
    state = random.getstate()
    fingerprint(Augmented())
    assert random.getstate() == state


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_describe_needs_half_a_sample_of_memory_more_than_the_data_set(dtype: Any, is_transposed: bool) -> None:
    class Volumes:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            volume = np.full((2, 1024, 1024 * 4 // np.dtype(dtype).itemsize), index + 1, dtype)
            return volume.T if is_transposed else volume

    num_bytes = Volumes()[0].nbytes
    tracemalloc.start()
    try:
        fingerprint(Volumes())
        assert tracemalloc.get_traced_memory()[1] <= 1.5 * num_bytes
    finally:
        tracemalloc.stop()


def test_describe_of_impure_data_is_equal_still() -> None:
    class Impure(Augmented):
        def __getitem__(self, index: int) -> Any:
            return np.random.default_rng().random()

    assert fingerprint(Impure()) == fingerprint(Impure()) != fingerprint(Augmented())


def test_describe_of_raising_sample_is_a_fact_like_others() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            if index == 0:
                raise OSError
            return super().__getitem__(index)

    assert fingerprint(Broken()) == fingerprint(Broken()) != fingerprint(Augmented())


def test_describe_without_length_says_so() -> None:
    assert describe(BuiltDataset.from_object(Keyless())).num_samples is None


def test_describe_with_own_fingerprint_fetches_nothing() -> None:
    class Untouchable(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise AssertionError

    for given, expected in (("v1", "v1"), (lambda built: f"size {len(built)}", "size 20")):
        spec = dataset(name="marked", fingerprint=given)(lambda: Untouchable())()
        assert describe(build(spec)).fingerprint == expected
        datasets._factories.clear()


def test_describe_with_fingerprint_that_draws_is_the_same_everywhere() -> None:
    drawing = dataset(name="drawing", fingerprint=lambda built: f"{random.random()} {np.random.rand()} {torch.rand(1)}")
    built = build(drawing(lambda: Augmented())())
    first = describe(built)
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        draw()
    assert describe(built) == first


def test_describe_with_length_raising_names_the_stage() -> None:
    class Broken(Augmented):
        def __len__(self) -> int:
            raise OSError("gone")

    with pytest.raises(DatasetError, match="failed in this process while it was described: OSError: gone"):
        describe(BuiltDataset.from_object(Broken()))


@pytest.mark.parametrize("kind", [SystemExit, KeyError, GeneratorExit])
def test_describe_of_a_length_that_raises_is_an_error_of_the_data_set(kind: type[BaseException]) -> None:
    class Broken(Augmented):
        def __len__(self) -> int:
            raise kind("no length")

    with pytest.raises(DatasetError, match=f"{kind.__name__}: .*no length"):
        describe(BuiltDataset.from_object(Broken()))
