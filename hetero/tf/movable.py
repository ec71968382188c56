"""Checks whether tf.data.service can make a dataset on other machines, before the dataset is sent to the service."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hetero.errors import ConfigError

__all__ = ["check_divisible", "check_movable", "check_whole", "parts_of"]

_PYTHON_OPS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_ZIP, _SHARD = "_ZipDataset", "_ShardDataset"


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and all datasets that it is made from, each once."""
    seen: set[int] = set()
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            waiting.extend(each._inputs())
            yield each


def check_movable(dataset: Any) -> None:
    """Check that the service can send the dataset's elements, and that the dataset does not visibly run Python.

    The service cannot send elements that contain datasets.

    Raises:
        ConfigError: If elements contain datasets, or if the dataset runs Python. The message names the operation.
    """
    import tensorflow as tf

    # Without this check, TensorFlow would fail in C++ at the first read.
    if any(isinstance(spec, tf.data.DatasetSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        raise ConfigError(
            "the elements of the dataset contain datasets, which tf.data.service cannot send\n"
            "  window makes such elements. Call .flat_map before distribute, use batch instead of window, or pass\n"
            "  placement='local'."
        )
    for each in parts_of(dataset):
        for function in each._functions():
            graph = function.function.graph.as_graph_def()
            nodes = itertools.chain(graph.node, *(inner.node_def for inner in graph.library.function))
            found = next((node.op for node in nodes if node.op in _PYTHON_OPS), None)
            if found is not None:
                raise ConfigError(
                    f"the dataset runs Python ({found}), which tf.data.service cannot run on other machines\n"
                    "  from_generator, tf.py_function and tf.numpy_function run Python. Put the Python into a\n"
                    "  registered data set and use hetero.tf.from_dataset, or pass placement='local'."
                )


def check_divisible(dataset: Any) -> None:
    """Check that a dataset for dynamic sharding does not zip several sources.

    The dispatcher hands out the pieces of each source separately. If images and labels are zipped, a worker may get
    labels of other images. TensorFlow reports no error. A function of the dataset, for example the function that
    `interleave` gets, may zip datasets, because one worker runs the whole function.

    Raises:
        ConfigError: If the dataset zips several sources.
    """
    # In a test with two workers, 216 of 1,000 pairs were wrong.
    if any(type(each).__name__ == _ZIP and len(each._inputs()) > 1 for each in parts_of(dataset)):
        raise ConfigError(
            "the dataset zips several sources, and sharding='dynamic' would pair their elements wrongly\n"
            "  It divides each source separately. Dataset.zip, enumerate and Keras' image_dataset_from_directory zip\n"
            "  sources. Begin with one source, for example from_tensor_slices((paths, labels)), or pass\n"
            "  sharding='data' or 'off'."
        )


def check_whole(dataset: Any, *, rank: int, world_size: int) -> None:
    """Check that a dataset is not only this rank's part of the data. All ranks read the dataset that one rank sends.

    Rank 0 is not checked, because a script may use the first part of a dataset on purpose. If rank 0 did shard by rank,
    this check fails on the other ranks.

    Raises:
        ConfigError: If the dataset is this rank's part.
    """
    for each in parts_of(dataset):
        # Scripts for several workers begin with shard(). With such a dataset, no rank would see the parts of the other
        # ranks, and nothing would report it.
        if rank and type(each).__name__ == _SHARD and (int(each._num_shards), int(each._index)) == (world_size, rank):
            raise ConfigError(
                f"the dataset of rank {rank} is shard {rank} of {world_size}, expected the whole dataset\n"
                "  Remove shard(...) before distribute, because the ranks share the elements of one dataset."
            )
