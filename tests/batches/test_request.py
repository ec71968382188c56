"""Requests for batches, and the indices in them that samplers yield."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from subjects import request

from hetero.batches.request import as_indices
from hetero.errors import ConfigError

torch = pytest.importorskip("torch")


def test_as_indices_of_samplers_yields_plain_forms() -> None:
    assert as_indices([1, np.int32(2), torch.tensor(3), True]).dtype == np.int64  # type: ignore[union-attr]
    assert as_indices(np.array([1, 2], np.int16)).tolist() == [1, 2]  # type: ignore[union-attr]
    assert as_indices(iter(["a", (np.int64(1), 2), 3])) == ("a", (1, 2), 3)
    assert len(as_indices([])) == 0


@pytest.mark.parametrize("index", [1.0, None, ("a",), torch.tensor([1, 2]), 2**63])
def test_as_indices_of_other_types_raises(index: Any) -> None:
    with pytest.raises(ConfigError, match="the sampler yielded"):
        as_indices([0, index])


def test_as_indices_of_array_is_a_copy() -> None:
    array = np.array([1, 2])
    indices = as_indices(array)
    array[:] = 7
    assert indices.tolist() == [1, 2]  # type: ignore[union-attr]


def test_as_indices_of_unsigned_array_beyond_64_bits_raises() -> None:
    assert as_indices(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]  # type: ignore[union-attr]
    assert len(as_indices(np.array([], np.uint64))) == 0
    with pytest.raises(ConfigError, match="beyond 64 bits: 9223372036854775808"):
        as_indices(np.array([0, 2**63], np.uint64))


def test_request_with_inconsistent_fields_raises() -> None:
    with pytest.raises(ConfigError, match="3 indices but 1 occurrences"):
        request(occurrences=np.zeros(1, np.uint32))
    with pytest.raises(ConfigError, match="3 indices, expected exactly 1"):
        request(collate=False)
