"""`MeasuredDataset`: a `tf.data.Dataset` whose steps are counted and measured, wherever its elements come from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from hetero.control.rank import session as control
from hetero.loaders.timing import LoaderTiming
from hetero.metrics.steps import StepTimer
from hetero.tf.deliveries import Deliveries, num_samples
from hetero.tf.iterators import ScriptIterator

__all__ = ["MeasuredDataset"]


class MeasuredDataset(tf.data.Dataset):  # type: ignore[misc]
    """The elements of a dataset, in its order; see `hetero.tf.distribute`, which makes it.

    A `tf.data.Dataset` by ``isinstance``, with the same ``element_spec`` and ``cardinality``; transformations return
    ordinary datasets over it. A loop ``for batch in data`` counts and measures its steps, and the job may end between
    two of them; so does `callback` in Keras, and `measure` in loops over a dataset made of this one.

    Not for several threads.

    Args:
        elements: The dataset.
        name: For reports.
    """

    def __init__(self, elements: Any, name: str) -> None:
        deliveries = Deliveries()
        self._elements = elements
        self._noted = deliveries.behind(elements)
        self._steps = _Steps(name, deliveries)
        super().__init__(self._noted._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """That of the dataset."""
        return self._elements.element_spec

    def __iter__(self) -> Any:
        """Return an iterator over a pass; what a loop of the script takes from it is a step."""
        if not tf.executing_eagerly():
            return super().__iter__()
        self._steps.forget()
        return _MeasuredIterator(self, self._steps)

    def callback(self, batches_per_step: int | None = None) -> Any:
        """Return a Keras callback that counts and measures the steps of `fit`; put it first in ``callbacks=``.

        The job may end between two steps. Pass ``fit`` this dataset, or one made of it that has the same batches
        (``map``, ``prefetch``, ``repeat``, ``take``; not ``cache``), and another one for validation. What a step waited
        is the time from its beginning until its batch came out of this dataset, as TensorFlow's clock says: nothing if
        that was made ahead. With ``steps_per_execution`` every step counts, but only the wait for the first one of an
        execution is known.

        Args:
            batches_per_step: What a step takes of this dataset where `fit` is not given its batches: as many as this
                process has replicas behind ``strategy.distribute_datasets_from_function``, n for ``data.batch(n)``.
                None: one; or the part that a strategy over several processes cuts off for this one.

        Raises:
            ConfigError: It is no integer of at least 1.
        """
        from hetero.tf.callback import MeasuringCallback, TakenCallback, check_batches_per_step

        steps = self._steps
        steps.parts_per_batch = steps.batches_per_step = 1
        if batches_per_step is None:
            return MeasuringCallback(steps, 1)
        steps.batches_per_step = check_batches_per_step(batches_per_step)
        return TakenCallback(steps, batches_per_step)

    def measure(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a dataset made of this one, each as a step of a loop over this one.

        ::

            for batch in data.measure(strategy.experimental_distribute_dataset(data)):
                strategy.run(train_step, args=(batch,))

        Args:
            batches: What is iterated over: a dataset, a distributed dataset, an iterator.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        iterator = iter(batches)
        following = iterator.__next__
        if isinstance(iterator, _MeasuredIterator):  # which would measure a second time
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
        """Measures step time and data wait."""
        return self._steps.timer

    def _inputs(self) -> list[Any]:
        return [self._noted]


class _MeasuredIterator(ScriptIterator):
    """An iterator over a `MeasuredDataset`; what it does not see, the callback counts."""

    def __init__(self, dataset: MeasuredDataset, steps: _Steps) -> None:
        super().__init__(dataset)
        self._steps = steps

    def _take(self, following: Callable[[], Any]) -> Any:
        return self._steps.deliver(following)

    def plain_next(self) -> Any:
        """Return the next batch without counting it."""
        return super(ScriptIterator, self).__next__()


class _Steps(LoaderTiming):
    """The steps that are trained with one dataset, on the thread that trains.

    Args:
        name: For reports.
        deliveries: Of the dataset's pipeline.
    """

    def __init__(self, name: str, deliveries: Deliveries) -> None:
        super().__init__(name)
        self.batches_per_step = 1
        """What a step takes."""
        self.parts_per_batch = 1
        """Into how many parts Keras' strategy cuts a batch, each for a step of its own."""
        self._deliveries = deliveries
        self._ahead: deque[tuple[float, int]] = deque()
        """Batches that came out of the pipeline and were not taken, each with its time and size."""
        self._parts: list[int] = []
        """Sizes of what is left of the batch that was taken last."""
        self._begun_s = 0.0

    def deliver(self, following: Callable[[], Any]) -> Any:
        """Return what ``following`` returns, the next batch, as that of a step."""
        self.begin_step()
        try:
            batch = following()
        except BaseException:
            self.pause()
            raise
        self.timer.end_wait(int(num_samples(batch)))
        return batch

    def begin_training(self) -> None:
        """Leave behind what Keras looked at before training."""
        self.forget()

    def forget(self) -> None:
        """Leave behind what came out of the pipeline and was not taken: a new pass begins."""
        self._deliveries.read()
        self._ahead.clear()
        self._parts.clear()

    def begin_step(self) -> None:
        """Begin to wait for the next batch; the job may end here.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        timer = self.begin_wait(self)
        self._begun_s = time.time()
        try:
            control.check_stop(timer)
        except BaseException:
            self.pause()
            raise

    def take(self, num_batches: int) -> None:
        """Note that the training has had the next batches; its wait for the first of them ended when that came out.

        Args:
            num_batches: More than came out are none: Keras says so of the last ones of an epoch.
        """
        self._ahead.extend(self._deliveries.read())
        taken: list[int] = []
        waited_s = 0.0
        while len(taken) < num_batches and (self._parts or self._ahead):
            if not self._parts:
                came_s, size = self._ahead.popleft()
                self._parts = _parts(size, self.parts_per_batch)
                if len(taken) < self.batches_per_step:  # of the first step
                    waited_s = came_s - self._begun_s
            taken.append(self._parts.pop())
        num_steps = max(1, -(-len(taken) // self.batches_per_step))
        self.timer.end_wait(sum(taken), waited_s=waited_s, num_steps=num_steps)

    def pause(self) -> None:
        """Stop the clock: what follows is no step. Idempotent."""
        self.end_timing(self)

    def end_training(self) -> None:
        """Stop the clock, and leave behind what TensorFlow asked for ahead."""
        self.pause()
        self.forget()


def _parts(size: int, num_parts: int) -> list[int]:
    return [size * (part + 1) // num_parts - size * part // num_parts for part in range(num_parts)]
