"""The Keras callback that says which batches training has taken."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hetero.tf.feed import Feed

__all__ = ["TakenCallback"]


class TakenCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the batches of training steps, measures these, and ends the job between two of them if it is to stop.

    Args:
        feed: Of the dataset that is trained on.
        batches_per_step: What each step takes of it, at least 1.
    """

    def __init__(self, feed: Feed, batches_per_step: int) -> None:
        super().__init__()
        self._feed = feed
        self._batches_per_step = batches_per_step

    def on_train_begin(self, logs: Any = None) -> None:
        """Leave behind what Keras looked at before training."""
        self._feed.begin_training()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a step; the job may end here."""
        self._feed.begin_step(is_counted=False)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batches of the step."""
        # Not from their numbers: what these are differs between versions of Keras.
        steps = getattr(self.model, "steps_per_execution", None)  # in Keras 2 a variable, perhaps a strategy's
        num_steps = 1 if steps is None else int(tf.convert_to_tensor(steps))
        self._feed.take(num_steps * self._batches_per_step)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stop the clock: validation is no step."""
        self._feed.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock between epochs."""
        self._feed.pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop the clock, and leave behind what TensorFlow asked for ahead."""
        self._feed.end_training()
