"""Which samples stay what they are when they are sent without collation."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest

from hetero.batches.structure.conversion import UnsupportedBatchError, flatten, unflatten
from hetero.batches.structure.trees import is_plain

torch = pytest.importorskip("torch")

Pair = collections.namedtuple("Pair", "one two")


def nested(levels: int) -> Any:
    return [nested(levels - 1)] if levels else 1


def with_attribute() -> Any:
    tensor = torch.zeros(2)
    tensor.label = 1
    return tensor


@pytest.mark.parametrize(
    "sample",
    [
        None,
        (np.zeros(3), torch.zeros(2), np.int64(4), 1, 2.0, 1j, True, "text", b"bytes"),
        {"image": torch.zeros(2, 3).T, 3: [1, 2], None: collections.OrderedDict(a=1)},
        nested(7),
        np.zeros((4, 5, 3)).transpose(2, 0, 1),
        np.zeros((4, 5), order="F")[None],
        np.zeros((0, 3)),
    ],
    ids=["none", "parts", "dicts", "nested", "planes", "columns", "empty"],
)
def test_plain_sample_comes_back_with_its_types(sample: Any) -> None:
    assert is_plain(sample)

    def types(value: Any) -> Any:
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return type(value), [types(item) for item in items]

    assert types(unflatten(*flatten(sample))) == types(sample)


@pytest.mark.parametrize(
    "sample",
    [
        {1, 2},
        Pair(1, 2),
        (Pair(1, 2),),
        with_attribute(),
        torch.nn.Parameter(torch.zeros(1)),
        np.ma.zeros(3),
        collections.defaultdict(int),
        {(1, 2): 3},
        object(),
        nested(8),
        np.broadcast_to(np.zeros((4, 4, 1)), (4, 4, 3)),
        np.broadcast_to(np.zeros((4, 4, 1)), (4, 4, 3)).transpose(2, 0, 1),
        np.zeros(8)[::2],
        np.zeros(8)[::-1],
        np.frombuffer(b"12345678", np.uint8),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_other_samples_are_not_plain(sample: Any) -> None:
    assert not is_plain(sample)


def test_plain_sample_with_a_gradient_cannot_be_sent_at_all() -> None:
    sample = torch.zeros(2, requires_grad=True)
    assert is_plain(sample)
    with pytest.raises(UnsupportedBatchError):
        flatten(sample)
