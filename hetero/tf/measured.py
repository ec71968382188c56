"""`MeasuredDataset`: a `tf.data.Dataset` that counts and measures steps, with or without tf.data.service."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from hetero.loaders.measuring.timing import LoaderTiming
from hetero.metrics.steps import StepTimer
from hetero.tf.deliveries import Deliveries, num_samples
from hetero.tf.iterators import ScriptIterator

__all__ = ["MeasuredDataset"]


class MeasuredDataset(tf.data.Dataset):  # type: ignore[misc]
    """A dataset that `hetero.tf.distribute` returns. It has the elements of another dataset, in the same order.

    It is a subclass of `tf.data.Dataset`, with the same ``element_spec`` and ``cardinality`` as the other dataset. Its
    transformations return ordinary datasets. A loop ``for batch in data`` counts and measures steps, and the job may
    end between two steps. `callback` does the same in Keras, and `measure` in loops over a dataset made from this one.

    Use it from one thread.

    Args:
        elements: The other dataset.
        name: Name in reports.
    """

    def __init__(self, elements: Any, name: str) -> None:
        deliveries = Deliveries()
        self._elements = elements
        self._noted = deliveries.behind(elements)
        self._steps = _Steps(name, deliveries)
        super().__init__(self._noted._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """Nested type specification of an element."""
        return self._elements.element_spec

    def __iter__(self) -> Any:
        """Return an iterator over a pass. Each batch that it returns to the script is a step."""
        # In a graph, use TensorFlow's own iterator, and measure nothing. A graph would run the Python code of the
        # iterator below only once, while it is traced.
        if not tf.executing_eagerly():
            return super().__iter__()
        # Forget the batches that an earlier iterator made ahead, because nothing consumes them now.
        self._steps.forget()
        return _MeasuredIterator(self, self._steps)

    def callback(self, batches_per_step: int | None = None) -> Any:
        """Return a Keras callback that counts and measures the steps of `fit`. Put it first in ``callbacks=``.

        If the job is asked to stop, the callback ends it between two steps. Pass ``fit`` this dataset, or a dataset
        made from it that has the same batches (by ``map``, ``prefetch``, ``repeat`` or ``take``, but not ``cache``).
        Use another dataset for validation.

        The data wait of a step is the time from the step's beginning until this dataset returned its batch. It is zero
        if TensorFlow fetched the batch ahead. With ``steps_per_execution`` every step counts, but the data wait is
        measured for the first batch of an execution only.

        Args:
            batches_per_step: Batches of this dataset that a step consumes. With
                ``strategy.distribute_datasets_from_function`` pass the number of replicas of this process. For
                ``data.batch(n)`` pass n. None means one batch, or this process's part of a batch that a strategy
                splits among several processes.

        Raises:
            ConfigError: If ``batches_per_step`` is not an integer of at least 1.
        """
        from hetero.tf.callback import ConsumptionCallback, check_batches_per_step

        steps = self._steps
        # Only without a number may a step consume less than a batch: one part of a batch that a strategy cuts.
        steps.is_cut = batches_per_step is None
        steps.batches_per_step = check_batches_per_step(1 if batches_per_step is None else batches_per_step)
        return ConsumptionCallback(steps, steps.batches_per_step)

    def measure(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a dataset made from this one. Each batch is one step.

        ::

            for batch in data.measure(strategy.experimental_distribute_dataset(data)):
                strategy.run(train_step, args=(batch,))

        Args:
            batches: A dataset, a distributed dataset or an iterator to iterate over.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        iterator = iter(batches)
        following = iterator.__next__
        # `next` of a _MeasuredIterator measures steps too. Do not use it, because each step would be measured twice.
        if isinstance(iterator, _MeasuredIterator):
            following = iterator.plain_next
        try:
            while True:
                try:
                    batch = self._steps.deliver(following)
                except StopIteration:
                    return
                yield batch
        finally:
            self._steps.pause()

    @property
    def step_timer(self) -> StepTimer:
        """Timer that measures step time and data wait."""
        return self._steps.timer

    def _inputs(self) -> list[Any]:
        return [self._noted]


class _MeasuredIterator(ScriptIterator):
    """An iterator over a `MeasuredDataset` that measures the steps of a script's loop, but not the steps of Keras."""

    def __init__(self, dataset: MeasuredDataset, steps: _Steps) -> None:
        super().__init__(dataset)
        self._steps = steps

    def _next_of_script(self, following: Callable[[], Any]) -> Any:
        return self._steps.deliver(following)

    def plain_next(self) -> Any:
        """Return the next batch without counting it."""
        return super(ScriptIterator, self).__next__()


class _Steps(LoaderTiming):
    """Counts and measures the training steps of one dataset, on the thread that trains.

    Args:
        name: Name in reports.
        deliveries: Record of the batches that left the dataset's pipeline.
    """

    def __init__(self, name: str, deliveries: Deliveries) -> None:
        super().__init__(name)
        self.batches_per_step = 1
        """Batches that a step consumes."""
        self.is_cut = False
        """Whether a strategy of several processes cuts each batch into one part per process. A step consumes a part."""
        self._parts_per_batch = 1
        """Parts that a batch is cut into. Each step consumes one of them."""
        self._deliveries = deliveries
        self._prefetched: deque[tuple[float, int]] = deque()
        """Time and size of each batch that left the pipeline and was not yet consumed."""
        self._parts: list[int] = []
        """Sizes of the remaining parts of the batch that is being consumed."""
        self._begun_s = 0.0
        """Time when the script or Keras began to wait for the batch of the present step, in seconds of `time.time`."""

    def deliver(self, following: Callable[[], Any]) -> Any:
        """Return the next batch, which ``following`` returns, and measure it as a step."""
        self.begin_step()
        try:
            batch = following()
        except BaseException:
            self.pause()
            raise
        self.timer.end_wait(int(num_samples(batch)))
        return batch

    def begin_training(self, num_pipelines: int) -> None:
        """Discard the batches that Keras asked for before training. See `TrainingSteps`."""
        self._parts_per_batch = num_pipelines if self.is_cut else 1
        self.forget()

    def forget(self) -> None:
        """Discard the batches that left the pipeline and were not consumed."""
        # `read` returns each batch only once, so `consume` will not get these batches.
        self._deliveries.read()
        self._prefetched.clear()
        self._parts.clear()

    def begin_step(self) -> None:
        """Begin to wait for the next batch. The job may end here.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        # time.time() is the clock of tf.timestamp(), which `Deliveries` uses.
        self._begun_s = time.time()
        self.await_step(owner=self)

    def consume(self, num_batches: int) -> None:
        """Record the next batches as consumed.

        They may belong to several steps. The wait for them ended when the last batch of the first of these steps left
        the pipeline, because this step could begin then.

        Args:
            num_batches: Number of batches. At the end of an epoch Keras may report more batches than left the pipeline.
                The excess is ignored.
        """
        self._prefetched.extend(self._deliveries.read())
        consumed: list[int] = []
        waited_s = 0.0
        while len(consumed) < num_batches and (self._parts or self._prefetched):
            if not self._parts:
                came_s, size = self._prefetched.popleft()
                self._parts = _parts(size, self._parts_per_batch)
                # This batch belongs to the first step. The last such batch gives the final value of ``waited_s``.
                if len(consumed) < self.batches_per_step:
                    waited_s = came_s - self._begun_s
            consumed.append(self._parts.pop())
        # Rounded up, because the last step of an epoch may have fewer batches. At least 1, because a step has ended
        # even if its batches came from a cache behind this dataset and did not leave the pipeline again.
        num_steps = max(1, -(-len(consumed) // self.batches_per_step))
        self.timer.end_wait(sum(consumed), waited_s=waited_s, num_steps=num_steps)

    def pause(self) -> None:
        """Stop the clock, because the next step does not follow directly. Idempotent."""
        self.end_timing(self)

    def end_training(self) -> None:
        """Stop the clock, and discard prefetched batches."""
        self.pause()
        self.forget()


def _parts(size: int, num_parts: int) -> list[int]:
    """Return the sizes of the parts of a batch of ``size`` samples. They differ by at most one sample."""
    return [size * (part + 1) // num_parts - size * part // num_parts for part in range(num_parts)]
