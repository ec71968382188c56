"""Indices that samplers yield, in Python's own types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hetero.batches.indices import as_indices
from hetero.errors import ConfigError

torch = pytest.importorskip("torch")


def test_as_indices_of_samplers_yields_plain_forms() -> None:
    assert as_indices([1, np.int32(2), torch.tensor(3)]).dtype == np.int64  # type: ignore[union-attr]
    assert as_indices(np.array([1, 2], np.int16)).tolist() == [1, 2]  # type: ignore[union-attr]
    assert as_indices(iter(["a", (np.int64(1), 2), 3])) == ("a", (1, 2), 3)
    assert len(as_indices([])) == 0


@pytest.mark.parametrize(
    ("index", "plain"),
    [
        (2**63, 2**63),
        (1.0, 1.0),
        (True, True),
        (b"a", b"a"),
        (None, None),
        (("a", 1, None), ("a", 1, None)),
        ([3, 4], [3, 4]),
        ([(1, [2.5, b"x"])], [(1, [2.5, b"x"])]),
        ((np.int64(1), np.float32(0.5)), (1, 0.5)),
        ([np.int64(1), torch.tensor(2)], [1, 2]),
        (np.float64(0.5), 0.5),
        (np.bool_(True), True),
        (np.bytes_(b"a"), b"a"),
        (torch.tensor(0.5), 0.5),
        ((), ()),
    ],
)
def test_as_indices_of_keys_yields_pythons_own_types(index: Any, plain: Any) -> None:
    (found, other) = as_indices([index, 0])
    assert (repr(found), other) == (repr(plain), 0)
    assert as_indices([index, index]) == (plain, plain)


def test_as_indices_of_lists_copies_them() -> None:
    index = [1, [2]]
    (found,) = as_indices([index])
    index[1].append(3)  # type: ignore[attr-defined]
    index.append(4)
    assert found == [1, [2]]


@pytest.mark.parametrize("index", [torch.tensor([1, 2]), np.arange(2), {1}, 1j, object(), slice(3), [[object()]]])
def test_as_indices_of_other_types_raises(index: Any) -> None:
    with pytest.raises(ConfigError, match=r"the sampler yielded .*\n  expected: an integer"):
        as_indices([0, index])


def test_as_indices_of_a_list_within_itself_raises() -> None:
    index: list[Any] = []
    index.append(index)
    with pytest.raises(ConfigError, match="nests deeper than 8 levels"):
        as_indices([index])


def test_as_indices_of_array_is_a_copy() -> None:
    array = np.array([1, 2])
    indices = as_indices(array)
    array[:] = 7
    assert indices.tolist() == [1, 2]  # type: ignore[union-attr]


def test_as_indices_of_unsigned_array_beyond_64_bits_are_integers() -> None:
    assert as_indices(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]  # type: ignore[union-attr]
    assert len(as_indices(np.array([], np.uint64))) == 0
    assert as_indices(np.array([0, 2**63], np.uint64)) == (0, 2**63)
