"""Samples of nested, sparse, meta and other odd tensors: they break nothing that need not look into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hetero.batches.build import BuiltDataset  # noqa: E402
from hetero.batches.fetch import describe, fetch  # noqa: E402
from hetero.batches.purity.comparison import compare, digest, freeze, outline, sketch  # noqa: E402
from hetero.batches.structure.conversion import UnsupportedBatchError, flatten  # noqa: E402
from hetero.errors import DatasetError  # noqa: E402
from tests.support.batches.odd_tensors import ODD, make  # noqa: E402
from tests.support.batches.subjects import request  # noqa: E402

SIZE_UNKNOWN = {"uninitialised", "locked", "unreadable"}
CONTENT_UNKNOWN = SIZE_UNKNOWN | {"fake", "masked"}


class Odd:
    """Samples with an odd part."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"odd": make(self.kind), "label": torch.tensor(index), "noise": torch.rand(2)}


def plain(samples: list[Any]) -> Any:
    return torch.stack([sample["label"] + sample["noise"].sum() for sample in samples])


@pytest.mark.parametrize("kind", ODD)
def test_comparison_of_odd_values_do_not_raise(kind: str) -> None:
    one, same, other = [1, make(kind)], [1, make(kind)], [1, make(kind, 2.0)]
    assert compare(one, same) is None
    assert compare(freeze(one), same) is None
    assert sketch(one) == sketch(same)
    assert outline(one).startswith(f"list of 2 (int, {type(one[1]).__name__}")
    if kind not in SIZE_UNKNOWN:
        assert compare(one, other) is not None
    if kind not in CONTENT_UNKNOWN:
        assert digest(one) == digest(same)
        assert digest(one) != digest(other)


@pytest.mark.parametrize("kind", sorted(CONTENT_UNKNOWN))
def test_digest_of_unknown_content_raises_so_that_no_ledger_claims_to_know_it(kind: str) -> None:
    with pytest.raises((RuntimeError, PermissionError, UserWarning)):
        digest([1, make(kind)])


@pytest.mark.parametrize("kind", ODD)
def test_batch_that_is_plain_needs_no_look_into_its_samples(kind: str) -> None:
    built = BuiltDataset.from_object(Odd(kind), collate_fn=plain)
    assert fetch(built, request([0, 1, 2], verify=True)).shape == (3,)
    assert len(describe(built).fingerprint) == 32


@pytest.mark.parametrize("kind", ODD)
def test_collation_that_fails_is_reported_whatever_the_samples_are(kind: str) -> None:
    def fail(samples: list[Any]) -> Any:
        raise ZeroDivisionError("while collating")

    built = BuiltDataset.from_object(Odd(kind), collate_fn=fail)
    with pytest.raises(DatasetError, match=r"ZeroDivisionError: while collating \(sample 0 is dict of 3 \{'odd': "):
        fetch(built, request([0, 1]))


@pytest.mark.parametrize("kind", sorted({*ODD} - {"float8", "complex"}))
def test_batch_of_odd_values_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedBatchError, match=r"batch\['odd'\]: .* cannot be sent"):
        flatten({"odd": make(kind)})


def test_outline_of_jagged_tensors_does_not_depend_on_their_symbols() -> None:
    assert outline(make("jagged")) == outline(make("jagged")) == "NestedTensor torch.float32[2, *, 3]"


def test_masked_array_counts_its_mask() -> None:
    assert compare(np.ma.masked_array([1, 2], [True, False]), np.ma.masked_array([1, 2], [False, False])) is not None
