"""Warnings about subsets of one data set that share samples, for example training and validation samples.

The global generators have the same seed whenever a factory runs. A factory that splits a data set with them therefore
makes the same split for ``split="train"`` and for ``split="val"``. A factory that uses another source (the time, a
generator without a seed) makes a different split each time it runs. If it returns parts of the split as torch's
``Subset``, the shared samples can be found, and a warning reports them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.imported import imported
from hetero.batches.structure.conversion import type_name
from hetero.spec import DatasetSpec

__all__ = ["Overlaps"]

_MAX_INDICES = 2**24
"""Size of the largest subset that is compared. Larger ones would take too much memory."""
_MAX_KNOWN = 64
_NUM_LOOKED_AT = 64
"""Items at each end of a list or array that are compared, because a list of files may have millions."""
_ADVICE = (
    "If one of them is for validation, samples leak into it. Split with the global generators of random, NumPy or "
    "torch, which are seeded alike for every factory, or with a seed of your own"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of one subset."""

    spec: DatasetSpec
    base: bytes
    """Digest by `_identity` of the data set inside the subset."""
    base_name: str
    num_base_samples: int
    indices: npt.NDArray[np.int64]
    """Indices into the data set inside the subset, sorted and without repeats."""


class Overlaps:
    """The subsets that this process has built. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._known: dict[DatasetSpec, _Part] = {}
        self._reported: set[frozenset[DatasetSpec]] = set()

    def add(self, spec: DatasetSpec, dataset: Any) -> tuple[str, ...]:
        """Add a data set, and return a warning for each earlier one that shares samples with it, once per pair.

        Args:
            spec: Spec of the data set that was built.
            dataset: Data set that the factory returned. It is ignored unless it is torch's ``Subset``, which may be a
                subset of another ``Subset``.
        """
        part = _part(spec, dataset)
        if part is None:
            return ()
        found = []
        for other in self._known.values():
            pair = frozenset((spec, other.spec))
            if pair not in self._reported and (text := _shared(other, part)):
                self._reported.add(pair)
                found.append(text)
        self._known[spec] = part
        while len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return tuple(found)


def _part(spec: DatasetSpec, dataset: Any) -> _Part | None:
    torch_data = imported("torch.utils.data")
    if torch_data is None or type(dataset) is not torch_data.Subset:
        return None
    indices: npt.NDArray[Any] | None = None
    try:
        while type(dataset) is torch_data.Subset:
            own = np.asarray(dataset.indices)
            if own.ndim != 1 or own.size > _MAX_INDICES or (own.size and own.dtype.kind not in "iu"):
                return None
            indices = own if indices is None else own[indices]
            dataset = dataset.dataset
        num_samples = len(dataset)
        base = _identity(dataset)
    except Exception:  # noqa: BLE001 - a data set without a length, or indices that are not numbers
        return None
    assert indices is not None
    return _Part(spec, base, type_name(type(dataset)), num_samples, np.unique(indices).astype(np.int64))


def _shared(one: _Part, other: _Part) -> str:
    """Return a warning about samples that two subsets of one data set share. Empty for all other subsets."""
    same = one.base == other.base and one.num_base_samples == other.num_base_samples
    if not same or one.base_name != other.base_name or one.spec == other.spec:
        return ""
    num_shared = len(np.intersect1d(one.indices, other.indices, assume_unique=True))
    if not num_shared:
        return ""
    return (
        f"data sets {one.spec} and {other.spec} are subsets of the same {one.num_base_samples} samples "
        f"({one.base_name}), and {num_shared} samples are in both. {_ADVICE}."
    )


def _identity(dataset: Any) -> bytes:
    """Return a digest of the lists, arrays and paths of a data set.

    Numbers and str are used only if there are no lists, arrays or paths, because they may be options, such as the name
    of a transform. The same files count as the same samples even if the transform differs.
    """
    attributes = vars(dataset) if hasattr(dataset, "__dict__") else {}
    named = sorted(attributes.items()) or [("", dataset)]
    held = [(name, outline) for name, value in named if (outline := b"".join(_outline(value)))]
    if not held:
        held = [(name, repr(value).encode()) for name, value in named if isinstance(value, str | int | float)]
    hasher = blake2b(digest_size=16)
    for name, outline in held:
        hasher.update(b"%d %d " % (len(name), len(outline)) + name.encode() + outline)
    return hasher.digest()


def _outline(value: Any, depth: int = 0) -> Iterator[bytes]:
    """Yield bytes that differ for different lists, arrays and paths. Yield nothing for other values."""
    if isinstance(value, os.PathLike) or (isinstance(value, str | bytes) and (depth or os.sep in str(value))):
        yield str(value).encode("utf-8", "surrogatepass")
    elif hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "reshape"):
        flat = value.reshape(-1)
        ends = [np.asarray(end).tobytes() for end in (flat[:_NUM_LOOKED_AT], flat[-_NUM_LOOKED_AT:])]
        yield f"{value.dtype} {tuple(value.shape)} ".encode() + b"".join(ends)
    elif isinstance(value, Mapping) and depth < 3:
        yield from _outline(list(value.items()), depth)
    elif isinstance(value, Sequence | set | frozenset) and depth < 3:
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        yield b"%d items " % len(items)
        for item in [*items[:_NUM_LOOKED_AT], *items[-_NUM_LOOKED_AT:]]:
            yield from _outline(item, depth + 1)
    elif depth and isinstance(value, int | float):
        yield repr(value).encode()
