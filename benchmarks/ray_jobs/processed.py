"""What Ray Data's tasks and actors compute: batches of a pipeline, from indices.

Batches of fixed shapes travel as columns, one row per sample. Where shapes vary, a batch is one row: all its arrays in
one buffer, and a header that describes them. Ray's guide on scaling out collate functions recommends this.
"""

from __future__ import annotations

import functools
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.utils.data
from pipelines import Pipeline, load
from ray.data.collate_fn import ArrowBatchCollateFn

__all__ = ["BatchActor", "Unpack", "compute_batch", "compute_row"]


class BatchActor:
    """Computes batches in an actor, which keeps its data set.

    Args:
        name: Name of the pipeline.
        root: Folder of the photographs.
        length: Samples of an epoch.
    """

    def __init__(self, name: str, root: str, length: int) -> None:
        self._arguments = name, root, length
        _built(*self._arguments)

    def __call__(self, rows: dict[str, np.ndarray]) -> dict[str, Any]:
        return compute_batch(rows, *self._arguments)


def compute_batch(rows: dict[str, np.ndarray], name: str, root: str, length: int) -> dict[str, Any]:
    """Return a batch: columns of samples, or one row if shapes vary. A task keeps the data set for the next one.

    Args:
        rows: ``id``, numbers that give the indices.
        name: Name of the pipeline.
        root: Folder of the photographs.
        length: Samples of an epoch.
    """
    pipeline, dataset = _built(name, root, length)
    indices = [int(number) % length for number in rows["id"]]
    if hasattr(dataset, "__getitems__"):
        samples = dataset.__getitems__(indices)
    else:
        samples = [dataset[index] for index in indices]
    batch = (pipeline.collate or torch.utils.data.default_collate)(samples)
    if not pipeline.has_fixed_shapes:
        return _packed(batch)
    return {name: leaf.numpy() for name, leaf in _columns(batch).items()}


def compute_row(row: dict[str, Any], name: str, root: str, length: int) -> dict[str, Any]:
    """Return one sample as a row, for pipelines of fixed shapes. See `compute_batch`."""
    _, dataset = _built(name, root, length)
    columns = _columns(dataset[int(row["id"]) % length])
    return {name: leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf for name, leaf in columns.items()}


class Unpack(ArrowBatchCollateFn):
    """Makes a batch of the one row that `compute_batch` has made of it. Arrays are views of Ray's memory."""

    def __call__(self, batch: pa.Table) -> Any:
        header, data, sizes = (batch[name][0] for name in ("header", "data", "sizes"))
        buffers, begin, whole = [], 0, memoryview(data.as_buffer())
        for size in sizes.as_py():
            buffers.append(whole[begin : begin + size])
            begin += size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the arrays are read-only, and torch has no such tensors
            tree = pickle.loads(header.as_buffer(), buffers=buffers)  # noqa: S301 - made by our own task
            return _mapped(tree, np.ndarray, torch.from_numpy)


@functools.cache
def _built(name: str, root: str, length: int) -> tuple[Pipeline, Any]:
    torch.set_num_threads(1)
    pipeline = load(name)
    return pipeline, pipeline.build(length, root)


def _columns(batch: Any) -> Mapping[str, Any]:
    """Return the parts of a batch or sample by name."""
    if isinstance(batch, Mapping):
        return batch
    parts = batch if isinstance(batch, list | tuple) else [batch]
    return {f"part{number}": part for number, part in enumerate(parts)}


def _packed(batch: Any) -> dict[str, Any]:
    """Return a batch as one row."""
    buffers: list[pickle.PickleBuffer] = []
    tree = _mapped(batch, torch.Tensor, torch.Tensor.numpy)
    header = pickle.dumps(tree, protocol=5, buffer_callback=buffers.append)
    parts = [buffer.raw() for buffer in buffers]
    return {"header": [header], "data": [b"".join(parts)], "sizes": [[part.nbytes for part in parts]]}


def _mapped(batch: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return a nested batch with a function applied to each leaf of a type."""
    if isinstance(batch, kind):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, kind, function) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_mapped(value, kind, function) for value in batch]
    return batch
