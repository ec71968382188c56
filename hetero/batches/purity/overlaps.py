"""Warnings about subsets of one data set that share samples, for example training and validation samples.

The global generators have the same seed whenever a factory runs. A factory that splits a data set with them therefore
makes the same split for ``split="train"`` and for ``split="val"``. A factory that uses another source (the time, a
generator without a seed) makes a different split each time it runs. If it returns parts of the split as torch's
``Subset``, the shared samples can be found, and a warning reports them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.imported import imported
from hetero.batches.purity.values import value_digest
from hetero.batches.structure.conversion import type_name
from hetero.spec import DatasetSpec

__all__ = ["Overlaps"]

_MAX_INDICES = 2**24
"""Size of the largest subset that is compared. Larger ones would take too much memory."""
_NUM_ENDS = 64
"""Number of items at each end of a list or array that are compared, because a list of files may have millions."""
_ADVICE = (
    "If one of them is for validation, samples leak into it. Split with the global generators of random, NumPy or "
    "torch, which are seeded alike for every factory, or with a seed of your own"
)


class Overlaps:
    """The subsets that this process has built. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._known: dict[DatasetSpec, tuple[tuple[str, bytes], npt.NDArray[np.int64]]] = {}
        """For each subset: name and digest of the data set inside it, and the indices into that data set."""
        self._reported: set[frozenset[DatasetSpec]] = set()
        """Pairs of subsets that a warning has named."""

    def add(self, spec: DatasetSpec, dataset: Any) -> tuple[str, ...]:
        """Add a data set, and return a warning for each earlier one that shares samples with it, once per pair.

        Args:
            spec: Spec of the data set that was built.
            dataset: Data set that the factory returned. Only torch's ``Subset`` is compared. It may be a subset of
                another ``Subset``.
        """
        torch_data = imported("torch.utils.data")
        if torch_data is None or type(dataset) is not torch_data.Subset or len(dataset) > _MAX_INDICES:
            return ()
        try:
            # `base` is a pair of a name for the warning and a digest.
            base, indices = _part(torch_data, dataset)
        except Exception:  # noqa: BLE001 - a data set without a length, or indices that are not numbers
            return ()
        found = []
        for other, (other_base, other_indices) in self._known.items():
            pair = frozenset((spec, other))
            if base != other_base or spec == other or pair in self._reported:
                continue
            if num_shared := len(np.intersect1d(other_indices, indices, assume_unique=True)):
                self._reported.add(pair)
                found.append(
                    f"data sets {other} and {spec} are subsets of the same {base[0]}, and {num_shared} samples are in "
                    f"both. {_ADVICE}."
                )
        self._known[spec] = base, indices
        return tuple(found)


def _part(torch_data: Any, dataset: Any) -> tuple[tuple[str, bytes], npt.NDArray[np.int64]]:
    """Return a name and a digest of the data set inside a subset, and the sorted indices into it.

    Two data sets with the same lists, arrays and paths count as the same. Transforms do not count, because training and
    validation with different transforms may still use the same files. Numbers and text may be options, which may
    also differ between training and validation. So numbers and text count only if the data set has no lists, arrays or
    paths.

    Raises:
        TypeError: If the indices are not integers, or the data set inside lacks a length.
    """
    indices: npt.NDArray[Any] = np.arange(len(dataset))
    while type(dataset) is torch_data.Subset:
        indices = np.asarray(dataset.indices)[indices]
        dataset = dataset.dataset
    if indices.dtype.kind not in "iu":
        raise TypeError(f"indices of type {indices.dtype}")
    attributes = sorted(vars(dataset).items()) if hasattr(dataset, "__dict__") else [("", dataset)]
    # `_ends` returns None for transforms, numbers, and text that is no path.
    contents = [(name, ends) for name, value in attributes if (ends := _ends(value)) is not None]
    contents = contents or [(name, value) for name, value in attributes if isinstance(value, str | int | float)]
    name = f"{len(dataset)} samples ({type_name(type(dataset))})"
    return (name, value_digest(contents)), np.unique(indices).astype(np.int64)


def _ends(value: Any) -> Any:
    """Return a path, or the ends of a list or array. None for other values, such as a transform."""
    if isinstance(value, os.PathLike) or (isinstance(value, str) and os.sep in value):
        return str(value)
    if hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "reshape"):
        flat = value.reshape(-1)
        return str(value.dtype), tuple(value.shape), np.asarray(flat[:_NUM_ENDS]), np.asarray(flat[-_NUM_ENDS:])
    if isinstance(value, Mapping):
        return _ends(list(value.items()))
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return None
    items = [*value[:_NUM_ENDS], *value[-_NUM_ENDS:]]
    return len(value), [each if isinstance(each, str | bytes | int | float) else _ends(each) for each in items]
