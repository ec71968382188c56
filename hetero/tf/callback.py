"""The Keras callback that reports which batches the training has consumed."""

from __future__ import annotations

from typing import Any, Protocol

import tensorflow as tf

from hetero.errors import ConfigError

__all__ = ["ConsumptionCallback", "TrainingSteps", "check_batches_per_step"]


class TrainingSteps(Protocol):
    """Receiver of the callback's reports, on the thread that trains."""

    def begin_training(self, num_pipelines: int) -> None:
        """Discard the batches that Keras asked for before training, for example to build a model.

        Args:
            num_pipelines: Processes among which the strategy of `fit` divides each batch of a dataset.
        """

    def begin_step(self) -> None:
        """Begin to wait for the next batch. The job may end here.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """

    def consume(self, num_batches: int) -> None:
        """Record the next batches as consumed. At the end of an epoch there may be fewer than ``num_batches``."""

    def pause(self) -> None:
        """Stop the clock, because the next step does not follow directly. Idempotent."""

    def end_training(self) -> None:
        """Stop the clock, and discard prefetched batches."""


class ConsumptionCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the batches of training steps and measures the steps. Ends the job between two steps if it must stop.

    Args:
        steps: Receiver of the reports. It belongs to the training dataset.
        batches_per_step: Batches of the dataset that each step consumes, at least 1.
    """

    def __init__(self, steps: TrainingSteps, batches_per_step: int) -> None:
        super().__init__()
        self._steps = steps
        self._batches_per_step = batches_per_step

    def on_train_begin(self, logs: Any = None) -> None:
        """Discard the batches that Keras asked for before training."""
        self._steps.begin_training(_num_reading_processes(getattr(self.model, "distribute_strategy", None)))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begin a step. The job may end here."""
        self._steps.begin_step()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Report the batches of the step."""
        # Do not use ``batch``, because versions of Keras number the batches differently.
        # In Keras 2, ``steps_per_execution`` is a tf.Variable, which may be distributed.
        steps = getattr(self.model, "steps_per_execution", None)
        # Convert the variable to a tensor first, because int() alone rejects a mirrored variable. Without the
        # conversion, fit ended after one step with tf-keras 2.21 and MultiWorkerMirroredStrategy.
        num_steps = 1 if steps is None else int(tf.convert_to_tensor(steps))
        self._steps.consume(num_steps * self._batches_per_step)

    def on_test_begin(self, logs: Any = None) -> None:
        """Stop the clock, because validation is not a step."""
        self._steps.pause()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop the clock between epochs."""
        self._steps.pause()

    def on_train_end(self, logs: Any = None) -> None:
        """Stop the clock, and discard prefetched batches."""
        self._steps.end_training()


def check_batches_per_step(batches_per_step: int) -> int:
    """Return the number of batches that a step consumes, if it is valid.

    Raises:
        ConfigError: If it is not an integer of at least 1.
    """
    if type(batches_per_step) is not int or batches_per_step < 1:
        raise ConfigError(f"batches_per_step is {batches_per_step!r}, expected an integer of at least 1")
    return batches_per_step


def _num_reading_processes(strategy: Any) -> int:
    """Return how many processes of a strategy read the dataset, each in a pipeline of its own.

    `fit` calls TensorFlow's `experimental_distribute_dataset` for a dataset. TensorFlow then treats a batch as the
    global batch of all these processes, and cuts it into one part for each.
    """
    # With one replica there is one process. Some strategies with one replica have no ``worker_devices``.
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return 1
    # ``worker_devices`` are the devices of this process, with one replica each.
    num_replicas: int = strategy.num_replicas_in_sync
    return max(1, num_replicas // len(strategy.extended.worker_devices))
