"""Batches of NumPy arrays, for data sets that do not use torch.

It is a separate module because `hetero.collate_arrays` must not import torch or the rest of this package.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["collate_arrays"]

_NUMBERS: dict[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}


def collate_arrays(samples: Sequence[Any]) -> Any:
    """Return a batch like that of torch's ``default_collate``, with NumPy arrays instead of tensors.

    Arrays and NumPy scalars are stacked along a new first dimension. Python's numbers become one array (bool, int64,
    float64). Str and bytes become a list. Dictionaries, lists, tuples and namedtuples are collated item by item and
    keep their type.

    Args:
        samples: At least one sample. All samples have the same structure.

    Raises:
        TypeError: If a sample holds any other type.
        ValueError: If shapes, lengths or keys differ.
    """
    first = samples[0]
    kind = type(first)
    if isinstance(first, np.ndarray | np.generic):
        return np.stack([np.asarray(sample) for sample in samples])
    if kind in _NUMBERS:
        # If one number is a float, NumPy makes floats of all. Reject other types, because NumPy would make an array of
        # str or objects.
        kinds = {type(sample) for sample in samples}
        if not kinds <= _NUMBERS.keys():
            raise TypeError(f"numbers and {', '.join(sorted(other.__name__ for other in kinds))} in one batch")
        return np.array(samples, dtype=_NUMBERS[kind] if len(kinds) == 1 else None)
    if kind in (str, bytes):
        return list(samples)
    if isinstance(first, dict):
        if any(set(sample) != set(first) for sample in samples):
            raise ValueError(f"samples differ in their keys; the first has {sorted(map(str, first))}")
        # Copy the first dictionary, to keep its type, for example OrderedDict.
        collated = copy.copy(first)
        for key in first:
            collated[key] = collate_arrays([sample[key] for sample in samples])
        return collated
    if isinstance(first, list | tuple):
        if any(len(sample) != len(first) for sample in samples):
            raise ValueError(f"samples differ in their number of parts; the first has {len(first)}")
        parts = [collate_arrays(column) for column in zip(*samples, strict=True)]
        # The class of a namedtuple takes the items as separate arguments.
        return parts if isinstance(first, list) else tuple.__new__(kind, parts)
    raise TypeError(
        f"cannot make an array of {kind.__name__}; samples consist of arrays, numbers, text, dicts, lists and tuples"
    )
