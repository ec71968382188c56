"""An iterator that distinguishes batches for the script's loop from batches for Keras and graphs.

The class has its own module, because both kinds of dataset use it and because `hetero.tf.callback` imports Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator  # type of iter(dataset), not exported elsewhere

__all__ = ["ScriptIterator"]

_KERAS = ("keras", "tf_keras")


class ScriptIterator(OwnedIterator):  # type: ignore[misc]
    """An iterator over a dataset, for the script and for Keras.

    Keras passes the iterator to graphs, which read batches without calling ``next``. Keras also calls ``next`` from its
    own code, to build a model or to run eagerly. In both cases `_next_of_script` is not called, because a callback
    counts these batches.
    """

    def __next__(self) -> Any:
        """Return the next batch. Blocks until it has arrived.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        # Keras and graphs take batches ahead of the training, so a batch that they take is not consumed yet. A callback
        # reports it later. Frame 1 is the caller of ``next``.
        if not tf.executing_eagerly() or _is_keras(sys._getframe(1)):
            return super().__next__()
        return self._next_of_script(super().__next__)

    def _next_of_script(self, following: Callable[[], Any]) -> Any:
        """Return the next batch to the script. ``following`` returns the batch, and raises StopIteration at the end."""
        raise NotImplementedError


def _is_keras(frame: FrameType) -> bool:
    """Return whether the code of a frame belongs to Keras."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _KERAS
