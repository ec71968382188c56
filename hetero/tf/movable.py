"""What tf.data.service can make of a dataset elsewhere: looked at before anything is sent there."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from hetero.errors import ConfigError

__all__ = ["check_divisible", "check_movable", "check_whole", "parts_of"]

_PYTHON_OPS = frozenset({"EagerPyFunc", "PyFunc", "PyFuncStateless"})
_ZIP, _SHARD = "_ZipDataset", "_ShardDataset"


def parts_of(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and all those that it is made of, each once."""
    seen: set[int] = set()
    waiting = [dataset]
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            waiting.extend(each._inputs())
            yield each


def check_movable(dataset: Any) -> None:
    """Refuse what the service cannot send, datasets as elements; and Python, as far as that can be seen.

    Raises:
        ConfigError: It has such elements, or runs Python; names the operation.
    """
    import tensorflow as tf

    if any(isinstance(spec, tf.data.DatasetSpec) for spec in tf.nest.flatten(dataset.element_spec)):
        raise ConfigError(
            "the dataset's elements have datasets in them, which tf.data.service cannot send\n"
            "  That is what window makes: flatten it first (.flat_map), use batch, or pass placement='local'."
        )
    for each in parts_of(dataset):
        for function in each._functions():
            graph = function.function.graph.as_graph_def()
            nodes = itertools.chain(graph.node, *(inner.node_def for inner in graph.library.function))
            found = next((node.op for node in nodes if node.op in _PYTHON_OPS), None)
            if found is not None:
                raise ConfigError(
                    f"the dataset runs Python ({found}), which tf.data.service cannot take to other machines\n"
                    "  That is what from_generator, tf.py_function and tf.numpy_function make. Put the Python into a\n"
                    "  registered data set and use hetero.tf.from_dataset, or pass placement='local'."
                )


def check_divisible(dataset: Any) -> None:
    """Refuse a dataset that zips several, for dynamic sharding.

    The dispatcher hands out the pieces of each source by itself: of two that are zipped, a worker gets other pieces of
    the one than of the other, and pairs images with labels of others. TensorFlow says nothing. Datasets that are zipped
    within a function, of `interleave` say, are whole.

    Raises:
        ConfigError: It does.
    """
    if any(type(each).__name__ == _ZIP and len(each._inputs()) > 1 for each in parts_of(dataset)):
        raise ConfigError(
            "the dataset zips several sources, which sharding='dynamic' would pair wrongly: it divides each by itself\n"
            "  Dataset.zip, enumerate and Keras' image_dataset_from_directory make such ones. Begin with one source:\n"
            "  from_tensor_slices((paths, labels)), for example; or pass sharding='data' or 'off'."
        )


def check_whole(dataset: Any, *, rank: int, world_size: int) -> None:
    """Refuse a rank's own part of the data: all ranks read from what one of them has registered.

    Rank 0 is let through, for which others end the job: every script may take the first part of some.

    Raises:
        ConfigError: It is one.
    """
    for each in parts_of(dataset):
        if rank and type(each).__name__ == _SHARD and (int(each._num_shards), int(each._index)) == (world_size, rank):
            raise ConfigError(
                f"the dataset is shard {rank} of {world_size}, as this is rank {rank}: other parts are not seen\n"
                "  Leave out shard(...) before distribute: the ranks share the elements of the whole dataset."
            )
