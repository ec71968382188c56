"""Subsets of one data set that share samples: validation samples that the model was trained on.

A factory that splits its data draws from generators that are seeded alike for every factory, so that ``split="train"``
and ``split="val"`` split alike. One that draws from anything else (the time, a generator without a seed) splits
differently each time it runs. Where the parts are torch's ``Subset``, this shows, and a sentence says so.
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
from hetero.batches.structure import type_name
from hetero.spec import DatasetSpec

__all__ = ["Overlaps"]

_MAX_INDICES = 2**24
"""Larger subsets are not compared: they would take too much memory."""
_MAX_KNOWN = 64
_NUM_LOOKED_AT = 16  # items of a long list, at each end
_ADVICE = (
    "If one of them is for validation, samples leak into it. Split with the global generators of random, NumPy or "
    "torch, which are seeded alike for every factory, or with a seed of your own"
)


@dataclass(frozen=True, slots=True)
class _Part:
    """The samples of one data set that is a subset."""

    spec: DatasetSpec
    base: bytes
    """Digest of what tells the data sets apart that subsets are made of."""
    base_name: str
    num_base_samples: int
    indices: npt.NDArray[np.int64]
    """Sorted, without repeats."""


class Overlaps:
    """The subsets that this process has built. One thread at a time."""

    def __init__(self) -> None:
        self._known: dict[DatasetSpec, _Part] = {}
        self._told: set[frozenset[DatasetSpec]] = set()

    def add(self, spec: DatasetSpec, dataset: Any) -> tuple[str, ...]:
        """Return a sentence for each data set added before that shares samples with this one, once for each pair.

        Args:
            spec: What was built.
            dataset: What the factory returned. Only torch's ``Subset``, and one of another one, is looked at.
        """
        part = _part(spec, dataset)
        if part is None:
            return ()
        found = []
        for other in self._known.values():
            pair = frozenset((spec, other.spec))
            if pair not in self._told and (text := _shared(other, part)):
                self._told.add(pair)
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
    except Exception:  # noqa: BLE001 - data sets without a length, indices that are no numbers
        return None
    assert indices is not None
    return _Part(spec, base, type_name(type(dataset)), num_samples, np.unique(indices).astype(np.int64))


def _shared(one: _Part, other: _Part) -> str:
    """Return what is to be said of two subsets; empty if they share nothing, or are not of the same samples."""
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
    """Return a digest of what a data set holds: its lists, arrays and paths; else its numbers and texts.

    Flags are left out where there is anything better: the same files with another transform are the same samples.
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
    """Yield what tells one list, array or path from another; nothing for values of other kinds."""
    if isinstance(value, os.PathLike) or (isinstance(value, str | bytes) and (depth or os.sep in str(value))):
        yield str(value).encode("utf-8", "surrogatepass")
    elif hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "reshape"):
        flat = value.reshape(-1)
        ends = [np.asarray(end).tobytes() for end in (flat[:64], flat[-64:])]
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
