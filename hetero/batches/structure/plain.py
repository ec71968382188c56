"""Whether a sample is the same object after a trip to another process, whatever the user's code then does with it."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

from hetero.batches.imported import imported
from hetero.batches.structure.layouts import is_dense

__all__ = ["is_plain"]

_SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes})
_MAX_DEPTH = 7
"""One less than a batch may have, because a part of a batch is a list of samples."""


def is_plain(sample: Any) -> bool:
    """Return whether a sample consists of tensors, arrays, numbers, text, and lists, tuples and dicts of these alone.

    Their exact types count, and tensors have no attributes of the user's. Arrays can be written to, and their elements
    fill their memory without gaps. Records and sets, which a batch may hold, are not plain: a record may have more
    attributes than fields, and a set may come in another order.
    """
    torch = imported("torch")

    def is_plain_part(value: Any, depth: int) -> bool:
        kind = type(value)
        if kind in _SCALARS or issubclass(kind, np.generic):
            return True
        if kind is np.ndarray:
            return bool(value.flags.writeable) and _is_dense(value)
        if torch is not None and kind is torch.Tensor:
            return not vars(value)
        if depth == _MAX_DEPTH:
            return False
        if kind is list or kind is tuple:
            return all(is_plain_part(item, depth + 1) for item in value)
        if kind is dict or kind is collections.OrderedDict:
            return all(type(key) in _SCALARS and is_plain_part(item, depth + 1) for key, item in value.items())
        return False

    return is_plain_part(sample, 0)


def _is_dense(array: Any) -> bool:
    flags = array.flags
    strides = [stride // array.itemsize if array.itemsize else 0 for stride in array.strides]
    return bool(flags.c_contiguous or flags.f_contiguous or (min(strides) > 0 and is_dense(array.shape, strides)))
