"""When batches left a pipeline of TensorFlow's, and how many samples each had: written inside the pipeline.

In `fit` the wait for a batch happens inside of TensorFlow's graph, and batches are made ahead by threads of its own.
What a step waited is then how long after its beginning its batch came out of the pipeline; nothing, if that was before.
The times are written by TensorFlow, in a variable: Python in the pipeline would contend with the script for the
interpreter, and hold up its end. One stage behind the last one is all that it takes: no second source beside the data,
which would keep TensorFlow from sharding by file, and none of its optimisations turned off.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a tf.Variable that is no strategy's

__all__ = ["Deliveries", "num_samples"]

_NUM_KEPT = 1024
"""Batches of which the latest times are kept: more than most executions have steps, or a pipeline is ahead."""


class Deliveries:
    """The latest batches that left a pipeline. One thread reads.

    One variable holds the count of all batches, and in turns a time and a size for each of the latest ones. Not a
    queue: those cannot be serialised, as some strategies do with a whole pipeline; and a full one would block it.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):  # where pipelines run
            self._log = ResourceVariable(
                np.zeros(1 + 2 * _NUM_KEPT), trainable=False, dtype=tf.float64, name="hetero_deliveries"
            )
        self._num_read = 0

    def behind(self, dataset: Any) -> Any:
        """Return a dataset of the same elements that notes each of them here."""
        is_unpacked = type(dataset.element_spec) is tuple  # as `map` passes elements of that very type

        def note(*element: Any) -> Any:
            self._note(num_samples(element))
            return element if is_unpacked else element[0]

        return dataset.map(tf.autograph.experimental.do_not_convert(note))

    def read(self) -> list[tuple[float, int]]:
        """Return, of the batches that came since the last call, when (seconds of `time.time`) and how many samples.

        Of more than are kept, the first ones count as long there, and as large as the oldest that is.
        """
        log = self._log.numpy()
        count = int(log[0])
        first = max(self._num_read, count - _NUM_KEPT)
        num_lost = first - self._num_read
        self._num_read = count
        places = (1 + 2 * (index % _NUM_KEPT) for index in range(first, count))
        kept = [(float(log[place]), int(log[place + 1])) for place in places]
        return [(0.0, size) for _, size in kept[:1]] * num_lost + kept

    def _note(self, size: Any) -> None:
        count = self._log.sparse_read([0])[0]
        place = 1 + 2 * (tf.cast(count, tf.int64) % _NUM_KEPT)
        places = tf.stack([tf.constant(0, tf.int64), place, place + 1])
        values = tf.stack([count + 1.0, tf.timestamp(), tf.cast(size, tf.float64)])
        self._log.scatter_nd_update(places[:, tf.newaxis], values)


def num_samples(batch: Any) -> Any:
    """Return the first dimension of a batch's first leaf, 1 if that has none: an int, or a scalar tensor in a graph."""
    leaf = next((leaf for leaf in tf.nest.flatten(batch) if leaf is not None), None)
    if isinstance(leaf, tf.distribute.DistributedValues):
        return sum(map(num_samples, leaf.values))
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        return tf.reduce_prod(leaf.dense_shape[:1])
    if not isinstance(leaf, tf.Tensor):
        return 1
    if leaf.shape.rank == 0:
        return 1
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return leaf.shape[0]
    return tf.reduce_prod(tf.shape(leaf, tf.int64)[:1])
