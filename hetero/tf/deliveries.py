"""Records, inside a TensorFlow pipeline, when each batch left it and how many samples the batch had.

In `fit` the wait for a batch happens inside TensorFlow's graph, and TensorFlow's threads make batches ahead. Therefore
the wait of a step is the time from the step's beginning until its batch left the pipeline. If the batch left earlier,
the wait is zero.

TensorFlow writes the times to a variable, because Python in the pipeline would compete with the script for the
interpreter, and would delay the end of the process. The pipeline gets one more stage at its end. It does not get a
second source, because that would prevent TensorFlow from sharding by file. TensorFlow's optimisations stay on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable  # a tf.Variable that no strategy manages

__all__ = ["Deliveries", "num_samples"]

_NUM_KEPT = 1024
"""Number of latest batches to keep. It is larger than the steps of most executions, and than the batches that most
pipelines make ahead."""


class Deliveries:
    """The latest batches that left a pipeline. Only one thread may read.

    One variable holds the count of all batches, and then a time and a size for each of the latest batches. A queue
    would not work for two reasons. First, some strategies serialise a whole pipeline, and a queue cannot be serialised.
    Second, a full queue would block the pipeline.
    """

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):  # where pipelines run
            self._log = ResourceVariable(
                np.zeros(1 + 2 * _NUM_KEPT), trainable=False, dtype=tf.float64, name="hetero_deliveries"
            )
        self._num_read = 0

    def behind(self, dataset: Any) -> Any:
        """Return a dataset that takes its elements from ``dataset``, and adds the time and size of each to this record.

        The returned dataset is the next stage of the pipeline, behind ``dataset``.
        """
        is_unpacked = type(dataset.element_spec) is tuple  # `map` unpacks elements of exactly this type

        def note(*element: Any) -> Any:
            self._note(num_samples(element))
            return element if is_unpacked else element[0]

        # The function has only TensorFlow's operations, so autograph has nothing to convert.
        return dataset.map(tf.autograph.experimental.do_not_convert(note))

    def read(self) -> list[tuple[float, int]]:
        """Return a time (seconds of `time.time`) and a number of samples for each batch since the last call.

        If more batches came than the record has places, the first batches were overwritten. For each of them, the
        returned time is 0, as if the batch had come before any step, and the size is that of the oldest batch that is
        still in the record.
        """
        log = self._log.numpy()
        count = int(log[0])
        # The record has places for the latest batches only. The first batch to read may have been overwritten.
        first = max(self._num_read, count - _NUM_KEPT)
        num_lost = first - self._num_read
        self._num_read = count
        # The record is a ring: after the count, each batch has two places, for its time and its size.
        places = (1 + 2 * (index % _NUM_KEPT) for index in range(first, count))
        kept = [(float(log[place]), int(log[place + 1])) for place in places]
        lost = [(0.0, size) for _, size in kept[:1]] * num_lost
        return lost + kept

    def _note(self, size: Any) -> None:
        """Add the current time and a batch's size to the record. TensorFlow runs this in the pipeline's graph."""
        # Place 0 has the count. After it, each batch has two places in a ring, for its time and its size.
        count = self._log.sparse_read([0])[0]
        place = 1 + 2 * (tf.cast(count, tf.int64) % _NUM_KEPT)
        places = tf.stack([tf.constant(0, tf.int64), place, place + 1])
        values = tf.stack([count + 1.0, tf.timestamp(), tf.cast(size, tf.float64)])
        self._log.scatter_nd_update(places[:, tf.newaxis], values)


def num_samples(batch: Any) -> Any:
    """Return the first dimension of a batch's first leaf, as an int or, in a graph, a scalar tensor.

    Return 1 if the leaf does not have dimensions.
    """
    leaf = next((leaf for leaf in tf.nest.flatten(batch) if leaf is not None), None)
    # A strategy has split the batch among its replicas.
    if isinstance(leaf, tf.distribute.DistributedValues):
        return sum(map(num_samples, leaf.values))
    if isinstance(leaf, tf.RaggedTensor):
        return leaf.nrows()
    if isinstance(leaf, tf.SparseTensor):
        # For a scalar, ``dense_shape[:1]`` is empty, and the product of nothing is 1.
        return tf.reduce_prod(leaf.dense_shape[:1])
    if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0:
        return 1
    # In a graph the rank or the first dimension may be unknown. Then only the tensor itself has the number.
    if leaf.shape.rank is not None and leaf.shape[0] is not None:
        return leaf.shape[0]
    # For a scalar, ``shape[:1]`` is empty, and the product of nothing is 1.
    return tf.reduce_prod(tf.shape(leaf, tf.int64)[:1])
