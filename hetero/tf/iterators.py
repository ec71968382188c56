"""Telling what the script takes of a dataset from what Keras and graphs take."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator  # what iter() of a dataset returns; has no other name

__all__ = ["ScriptIterator"]

_KERAS = ("keras", "tf_keras")


class ScriptIterator(OwnedIterator):  # type: ignore[misc]
    """An iterator over a dataset, for the script and for Keras.

    Keras hands it to graphs, which take from the resource that it stands for and not by ``next``; or calls ``next``
    from its own code, to build a model or to run eagerly. Neither comes to `_take`: a callback sees those.
    """

    def __next__(self) -> Any:
        """Return the next batch; blocks until it is there.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        if not tf.executing_eagerly() or _is_keras(sys._getframe(1)):
            return super().__next__()
        return self._take(super().__next__)

    def _take(self, following: Callable[[], Any]) -> Any:
        """Return what ``following`` returns, the next batch, to the script; it raises StopIteration at the end."""
        raise NotImplementedError


def _is_keras(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in _KERAS
