"""`FedDataset`: a `tf.data.Dataset` that knows how much of it the training has taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from hetero.batches.failures import with_user_type
from hetero.control.rank import session as control
from hetero.control.rank.stopping import StopError
from hetero.errors import ConfigError, DatasetError
from hetero.metrics.steps import StepTimer
from hetero.tf.elements import check_element, check_spec, derive_spec, num_samples_of, to_element
from hetero.tf.feed import Feed
from hetero.tf.iterators import ScriptIterator
from hetero.tf.passes import Claim

__all__ = ["FedDataset"]


class FedDataset(tf.data.Dataset):  # type: ignore[misc]
    """Batches of a registered data set; see `hetero.tf.from_dataset`, which makes it.

    A `tf.data.Dataset` by ``isinstance``: transformations return ordinary datasets over it. ``len`` and
    ``cardinality`` are the batches of a whole epoch on this rank, also where a loaded state makes the next pass
    shorter; of datasets made of it TensorFlow does not know them.

    Not for several threads.

    Args:
        feed: Where its elements come from.
        element_spec: Nested `tf.TensorSpec`; None: from two batches.

    Raises:
        ConfigError: The specification is none, or batches cannot be elements.
    """

    def __init__(self, feed: Feed, element_spec: Any = None) -> None:
        if element_spec is None:
            probes = [(num_samples, to_element(batch)) for num_samples, batch in feed.probe()]
            spec = derive_spec(probes, batch_size=feed.options.batch_size, drop_last=feed.options.drop_last)
        else:
            spec = check_spec(element_spec)
            feed.order()  # what is wrong with the data set is to be raised here, and not in TensorFlow's thread

        def convert(batch: Any) -> Any:
            element = to_element(batch)
            check_element(element, spec)
            return element

        feed.convert = convert
        if feed.options.batch_size is None:
            feed.size_of = num_samples_of
        self._feed = feed
        unsharded = tf.data.Options()
        # Every rank has its own part of the data already.
        unsharded.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self._elements = tf.data.Dataset.from_generator(feed.produce, output_signature=spec).with_options(unsharded)
        super().__init__(self._elements._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """Nested `tf.TensorSpec` of a batch."""
        return self._elements.element_spec

    def cardinality(self) -> Any:
        """Return the batches of a whole epoch on this rank, an int64 scalar."""
        return tf.constant(self._feed.num_batches(), tf.int64)

    def __iter__(self) -> Any:
        """Return an iterator over the next epoch; what a loop of the script takes from it counts as taken."""
        if not tf.executing_eagerly():
            return super().__iter__()
        return _CountingIterator(self, self._feed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; passes after it go on from there.

        Passes that have begun, which ``repeat`` and ``prefetch`` do early, go on as they are, and no longer count.

        Raises:
            ConfigError: If ``epoch`` is no integer of at least 0.
        """
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the place behind the last batch that was taken: the same on every rank, plain values, under 1 KiB.

        Valid at any time, and for any world size with the same ``batch_size`` x world size. ``hetero.torch.DataLoader``
        takes it too.

        Raises:
            ConfigError: Nobody said which batches were taken, see `mark_taken`.
        """
        return self._feed.state().to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue with the batch after the last one that was taken when the state was.

        A state taken at the end of an epoch continues with the next one. Living iterators are not affected. Where the
        next pass is shorter than others, ``fit`` without ``steps_per_epoch`` warns at its end and goes on.

        Raises:
            ConfigError: If it is no state, or of another seed, data set length, order or global batch.
        """
        self._feed.load_state(state_dict)

    def callback(self, batches_per_step: int = 1) -> Any:
        """Return a Keras callback that says which batches training has taken; put it first in ``callbacks=``.

        Make it just before `fit`: what Keras looks at to build a model is told apart by being asked for after that.

        Lets the job stop between steps, and measures step time and data wait. With ``steps_per_execution`` every step
        counts, but only the wait for the first batch of an execution is known.

        Args:
            batches_per_step: What a step takes of this dataset: as many as this process has replicas behind
                ``strategy.distribute_datasets_from_function``, n where `fit` is given ``data.batch(n)``.

        Raises:
            ConfigError: It is no integer of at least 1.
        """
        from hetero.tf.callback import TakenCallback, check_batches_per_step

        self._feed.batches_per_step = check_batches_per_step(batches_per_step)
        self._feed.promise_to_take()
        return TakenCallback(self._feed, batches_per_step)

    def measure(self, batches: Iterable[Any], batches_per_step: int = 1) -> Iterator[Any]:
        """Yield the elements of a dataset made of this one, each as what a step takes of this one.

        ::

            for batch in data.measure(strategy.distribute_datasets_from_function(lambda _: data)):
                strategy.run(train_step, args=(batch,))

        Counts what was taken and measures step time and data wait, as a loop over the dataset itself does. One at a
        time; where an epoch may be left early, call `set_epoch` before each one. The job may end between two steps.

        Args:
            batches: What is iterated over: a dataset, a distributed dataset, an iterator.
            batches_per_step: What an element takes of this dataset: as many as this process has replicas, n for
                ``data.batch(n)``.

        Raises:
            ConfigError: ``batches_per_step`` is no integer of at least 1.
            DatasetError: In a job, if the user's code raises.
            DataPlaneError: In a job, if no endpoint answers.
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        from hetero.tf.callback import check_batches_per_step

        feed = self._feed
        feed.batches_per_step = check_batches_per_step(batches_per_step)
        feed.promise_to_take()
        iterator = iter(batches)
        if isinstance(iterator, _CountingIterator):  # which counts by itself
            return iterator
        return _MeasuringIterator(iterator, feed, batches_per_step)

    def mark_taken(self, num_batches: int = 1) -> None:
        """Say that the training has the next ``num_batches``, in loops that `measure` cannot go through.

        Such as those inside of a ``tf.function``. Call it after each step, with one iterator at a time; where an epoch
        may be left early, call `set_epoch` before each one. The job may end in it. It measures no steps: nobody says
        when the loop waits.

        Raises:
            ConfigError: ``num_batches`` is no integer of at least 0.
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        if type(num_batches) is not int or num_batches < 0:
            raise ConfigError(f"num_batches is {num_batches!r}, expected an integer of at least 0")
        self._feed.mark_taken(num_batches)

    @property
    def step_timer(self) -> StepTimer:
        """Measures step time and data wait."""
        return self._feed.timer

    def _inputs(self) -> list[Any]:
        return [self._elements]


class _MeasuringIterator:
    """Elements of a dataset made of a `FedDataset`, each a step. No generator: one that ends in the collector waits."""

    def __init__(self, iterator: Iterator[Any], feed: Feed, batches_per_step: int) -> None:
        self._iterator = iterator
        self._feed = feed
        self._batches_per_step = batches_per_step

    def __iter__(self) -> _MeasuringIterator:
        return self

    def __next__(self) -> Any:
        try:
            return self._feed.deliver(self._iterator.__next__, self._batches_per_step)
        except tf.errors.OpError:
            session = control.current()
            if session is None or session.hidden_error is None:
                raise
            _raise(session.hidden_error)


def _raise(failure: Exception) -> NoReturn:
    """Raise what failed in TensorFlow's thread, in the place of the error that has its text only; or end the job."""
    session = control.current()
    if session is not None:
        session.hidden_error = None
        if isinstance(failure, StopError):
            session.end()
    if isinstance(failure, DatasetError):
        failure = with_user_type(failure)
    try:
        raise failure from None
    finally:
        del failure


class _CountingIterator(ScriptIterator):
    """An iterator over a `FedDataset`; what it does not see, the callback counts."""

    def __init__(self, dataset: FedDataset, feed: Feed) -> None:
        super().__init__(dataset)
        self._feed = feed
        self._claim = Claim()

    def _take(self, following: Callable[[], Any]) -> Any:
        """Return the next batch and note that it was taken.

        Raises:
            DatasetError: If the user's code raises.
            DataPlaneError: If no endpoint answers.
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        feed, claim = self._feed, self._claim
        feed.begin_step(is_counted=True)
        is_first = claim.found is None
        if is_first:
            feed.passes.expect(claim)
        try:
            batch = following()
        except StopIteration:
            feed.pause()
            raise
        except tf.errors.OpError:
            feed.pause()
            failure = None if claim.found is None else claim.found.take_failure()
            if failure is None:
                raise
            try:
                _raise(failure)
            finally:
                del failure  # it holds this frame by its traceback, and so the iterator
        finally:
            if is_first:
                feed.passes.expect(None)  # a pass that get_next() or a graph began is none of this one's claim
        if claim.found is None:
            feed.pause()  # not counted, as what was taken of that pass before
        else:
            feed.take(found=claim.found)
        return batch
