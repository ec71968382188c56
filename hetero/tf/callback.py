"""The Keras callback that says which batches training has taken."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from hetero.errors import ConfigError

__all__ = ["CuttableSteps", "MeasuringCallback", "TakenCallback", "TrainingSteps", "check_batches_per_step"]


class TrainingSteps(Protocol):
    """Whom the callback tells, on the thread that trains."""

    def begin_training(self) -> None:
        """Note that what was taken before was Keras looking at the data."""

    def begin_step(self) -> None:
        """Begin to wait for the next batch; the job may end here.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """

    def take(self, num_batches: int) -> None:
        """Note that training has taken the next batches; at the end of an epoch they may be fewer."""

    def pause(self) -> None:
        """Stop the clock: what follows is no step. Idempotent."""

    def end_training(self) -> None:
        """Stop the clock, and leave behind what TensorFlow asked for ahead."""


class TakenCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts the batches of training steps, measures these, and ends the job between two of them if it is to stop.

    Args:
        steps: Of the dataset that is trained on.
        batches_per_step: What each step takes of it, at least 1.
    """

    def __init__(self, steps: TrainingSteps, batches_per_step: int) -> None:
        super().__init__()
        self._steps = steps
        self._batches_per_step = batches_per_step

    def on_train_begin(self, logs: Any = None) -> None:
        """Leave behind what Keras looked at before training."""
        self._steps.begin_training()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a step; the job may end here."""
        self._steps.begin_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the batches of the step."""
        # Not from their numbers: what these are differs between versions of Keras.
        steps = getattr(self.model, "steps_per_execution", None)  # in Keras 2 a variable, perhaps a strategy's
        num_steps = 1 if steps is None else int(tf.convert_to_tensor(steps))
        self._steps.take(num_steps * self._batches_per_step)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stop the clock: validation is no step."""
        self._steps.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock between epochs."""
        self._steps.pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop the clock, and leave behind what TensorFlow asked for ahead."""
        self._steps.end_training()


class CuttableSteps(TrainingSteps, Protocol):
    """Whom the callback tells in addition how a strategy cuts batches."""

    parts_per_batch: int
    """Into how many, each for a step of its own."""


class MeasuringCallback(TakenCallback):
    """A `TakenCallback` for a dataset that `fit` may be given as that of a strategy over several processes."""

    def __init__(self, steps: CuttableSteps, batches_per_step: int) -> None:
        super().__init__(steps, batches_per_step)
        self._cuttable = steps

    def on_train_begin(self, logs: Any = None) -> None:
        """See how batches are cut, and leave behind what Keras looked at before training."""
        self._cuttable.parts_per_batch = _num_pipelines(getattr(self.model, "distribute_strategy", None))
        super().on_train_begin(logs)


def check_batches_per_step(batches_per_step: int) -> int:
    """Return how many batches a step takes; refuse what is no number of them.

    Raises:
        ConfigError: It is no integer of at least 1.
    """
    if type(batches_per_step) is not int or batches_per_step < 1:
        raise ConfigError(f"batches_per_step is {batches_per_step!r}, expected an integer of at least 1")
    return batches_per_step


def _num_pipelines(strategy: Any) -> int:
    """Return how many processes of a strategy read a dataset each.

    `experimental_distribute_dataset`, which `fit` calls for a dataset, takes a batch for that of all of them, and cuts
    it into so many parts.
    """
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return 1
    num_replicas: int = strategy.num_replicas_in_sync
    return max(1, num_replicas // len(strategy.extended.worker_devices))
