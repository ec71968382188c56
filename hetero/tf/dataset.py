"""`FedDataset`: a `tf.data.Dataset` that counts the batches that the training has consumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import tensorflow as tf

from hetero.batches.failures import with_user_type
from hetero.control.rank import session as control
from hetero.control.rank.stopping import StopError
from hetero.errors import ConfigError, DatasetError
from hetero.loaders import auditing
from hetero.loaders.kept_batches import KeptBatches
from hetero.metrics.steps import StepTimer
from hetero.tf.elements import (
    check_element,
    check_spec,
    copied_element,
    derive_spec,
    element_nbytes,
    num_samples_of,
    to_element,
)
from hetero.tf.feed import Feed
from hetero.tf.iterators import ScriptIterator
from hetero.tf.passes import Claim

__all__ = ["FedDataset"]


class FedDataset(tf.data.Dataset):  # type: ignore[misc]
    """Batches of a registered data set, as made by `hetero.tf.from_dataset`.

    It is a subclass of `tf.data.Dataset`, and its transformations return ordinary datasets. ``len`` and ``cardinality``
    return the number of batches of a whole epoch on this rank, even if a loaded state makes the next pass shorter.
    TensorFlow does not know the length of a dataset made from this one.

    Use it from one thread.

    Args:
        feed: Source of the elements.
        element_spec: Nested `tf.TensorSpec`. None to derive it from two batches.

    Raises:
        ConfigError: If the specification is invalid, or if batches cannot be elements.
    """

    def __init__(self, feed: Feed, element_spec: Any = None) -> None:
        if element_spec is None:
            probes = [(num_samples, to_element(batch)) for num_samples, batch in feed.probe()]
            spec = derive_spec(probes, batch_size=feed.options.batch_size, drop_last=feed.options.drop_last)
        else:
            spec = check_spec(element_spec)
            # If the data set has an error, raise it here, and not later in TensorFlow's thread.
            feed.order()

        def convert(batch: Any) -> Any:
            element = to_element(batch)
            check_element(element, spec)
            return element

        feed.convert = convert
        if feed.options.batch_size is None:
            # The items of such a data set are batches of any size, so their samples are counted one by one.
            feed.size_of = num_samples_of
        session = control.current()
        if session is not None and session.options.profile:
            feed.profile(session, KeptBatches(copy=copied_element, nbytes=element_nbytes))
        self._feed = feed
        unsharded = tf.data.Options()
        # Do not shard, because every rank already has its own part of the data.
        unsharded.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self._elements = tf.data.Dataset.from_generator(feed.produce, output_signature=spec).with_options(unsharded)
        # This tensor stands for TensorFlow's dataset object, so this dataset has the elements of `_elements`.
        super().__init__(self._elements._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """Specification of a batch: nested `tf.TensorSpec`."""
        return self._elements.element_spec

    def cardinality(self) -> Any:
        """Return the number of batches of a whole epoch on this rank, as an int64 scalar."""
        return tf.constant(self._feed.num_batches(), tf.int64)

    def __iter__(self) -> Any:
        """Return an iterator over the next epoch. Each batch that it returns to the script counts as consumed."""
        # In a graph, use TensorFlow's own iterator. A graph would trace the iterator below only once, and train on one
        # batch without end.
        if not tf.executing_eagerly():
            return super().__iter__()
        return _CountingIterator(self, self._feed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The passes after it are the following epochs.

        A pass that has already begun continues, but its batches no longer change the state. ``repeat`` and ``prefetch``
        begin passes early.

        Raises:
            ConfigError: If ``epoch`` is not an integer of at least 0.
        """
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last consumed batch, for `load_state_dict`. May be called at any time.

        The state consists of plain values, takes less than 1 KiB and is the same on every rank. The world size may
        change if ``batch_size`` x world size stays the same. ``hetero.torch.DataLoader`` can load the state too.

        Raises:
            ConfigError: If the script does not report which batches it consumes, see `mark_taken`.
        """
        return self._feed.state().to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue after the last batch that was consumed when the state was saved.

        A state saved at the end of an epoch continues with the next epoch. Existing iterators do not change. If the
        next pass is shorter than a whole epoch, ``fit`` without ``steps_per_epoch`` warns when it ends, and continues.

        Raises:
            ConfigError: If the value is not a state, or if its seed, data set length, order or global batch differ.
        """
        self._feed.load_state(state_dict)

    def skip_batches(self, batches: int) -> None:
        """Pass over the next batches, for example those after a checkpoint that led to a spike of the loss.

        Call it on every rank before the loop or `fit`, for example after `load_state_dict`. Only the next pass begins
        later. The ledger and the log name the batches. `tf.data.Dataset.skip` would pass over batches in every pass.

        Args:
            batches: Batches of each rank, at least 1.

        Raises:
            ConfigError: If a pass is in progress, or its consumed batches are not reported, see `mark_taken`. Or if
                ``batches`` is not at least 1, or the epoch has fewer batches.
        """
        start = self._feed.skip(batches)
        auditing.note_skipped(self._feed, start.number, start.batches, batches)

    def callback(self, batches_per_step: int = 1) -> Any:
        """Return a Keras callback that reports which batches the training consumes. Put it first in ``callbacks=``.

        Call this method just before `fit`. Otherwise the callback may not recognize the batches that Keras asks for
        only to build a model.

        The callback lets the job stop between steps, and measures step time and data wait. With ``steps_per_execution``
        every step counts, but only the wait for the first batch of an execution is measured.

        Args:
            batches_per_step: Batches of this dataset that a step consumes. With
                ``strategy.distribute_datasets_from_function`` it is the number of replicas of this process. If `fit` is
                given ``data.batch(n)``, it is n.

        Raises:
            ConfigError: If ``batches_per_step`` is not an integer of at least 1.
        """
        from hetero.tf.callback import ConsumptionCallback, check_batches_per_step

        self._feed.batches_per_step = check_batches_per_step(batches_per_step)
        self._feed.announce_reports()
        return ConsumptionCallback(self._feed, batches_per_step)

    def measure(self, batches: Iterable[Any], batches_per_step: int = 1) -> Iterator[Any]:
        """Yield the elements of a dataset made from this one. Each element is one step.

        ::

            for batch in data.measure(strategy.distribute_datasets_from_function(lambda _: data)):
                strategy.run(train_step, args=(batch,))

        This counts consumed batches and measures step time and data wait, as a loop over the dataset itself does. Use
        one such loop at a time. If a loop may leave an epoch early, call `set_epoch` before each epoch. The job may end
        between two steps.

        Args:
            batches: A dataset, a distributed dataset or an iterator to iterate over.
            batches_per_step: Batches of this dataset in one element: the number of replicas of this process, or n for
                ``data.batch(n)``.

        Raises:
            ConfigError: If ``batches_per_step`` is not an integer of at least 1.
            DatasetError: In a job, if the user's code raises.
            DataPlaneError: In a job, if no endpoint answers.
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        from hetero.tf.callback import check_batches_per_step

        feed = self._feed
        feed.batches_per_step = check_batches_per_step(batches_per_step)
        feed.announce_reports()
        iterator = iter(batches)
        # The iterator of this dataset already counts and measures its batches.
        if isinstance(iterator, _CountingIterator):
            return iterator
        return _MeasuringIterator(iterator, feed, batches_per_step)

    def mark_taken(self, num_batches: int = 1) -> None:
        """Report the next ``num_batches`` batches as consumed, for a script that cannot use `measure`.

        This is for a loop inside a ``tf.function``. Call this method after each step, and use one iterator at a time.
        If the loop may leave an epoch early, call `set_epoch` before each epoch. The job may end in this call. Steps
        are not measured, because this method does not know when the loop waits.

        Raises:
            ConfigError: If ``num_batches`` is not an integer of at least 0.
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        if type(num_batches) is not int or num_batches < 0:
            raise ConfigError(f"num_batches is {num_batches!r}, expected an integer of at least 0")
        self._feed.consume(num_batches)
        control.check_stop(self._feed.timer)

    @property
    def step_timer(self) -> StepTimer:
        """Timer that measures step time and data wait."""
        return self._feed.timer

    def _inputs(self) -> list[Any]:
        # tf.data.Dataset requires this method. The checks of `distribute` follow it too.
        return [self._elements]


class _MeasuringIterator:
    """Iterator over a dataset made from a `FedDataset`. Each element is one step.

    It is not a generator, because the garbage collector may close a generator, and the cleanup would wait for a lock.
    """

    def __init__(self, iterator: Iterator[Any], feed: Feed, batches_per_step: int) -> None:
        self._iterator = iterator
        self._feed = feed
        self._batches_per_step = batches_per_step

    def __iter__(self) -> _MeasuringIterator:
        return self

    def __next__(self) -> Any:
        """Return the next element, count its batches as consumed and measure the step. See `FedDataset.measure`."""
        try:
            return self._feed.deliver(self._iterator.__next__, self._batches_per_step)
        except tf.errors.OpError:
            # If hetero or the data set caused the error, raise the original exception, which `Feed` has stored in the
            # session of the job. Without a job, raise TensorFlow's error.
            session = control.current()
            if session is None or session.hidden_error is None:
                raise
            _raise(session.hidden_error)


def _raise(failure: Exception) -> NoReturn:
    """Raise the exception of TensorFlow's thread, because TensorFlow's own error contains only the exception's text.

    If the exception is a `StopError`, end this process instead, because the job was asked to stop. An exception of the
    data set gets the type that the data set raised.
    """
    session = control.current()
    if session is not None:
        # The script gets the exception now. Forget it, because the script may continue, and a later failure must not be
        # reported as this one.
        session.hidden_error = None
        if isinstance(failure, StopError):
            session.end()
    if isinstance(failure, DatasetError):
        failure = with_user_type(failure)
    try:
        raise failure from None
    finally:
        # The exception's traceback refers to this frame. If the frame kept the exception, both would stay in memory.
        del failure


class _CountingIterator(ScriptIterator):
    """An iterator over a `FedDataset` that counts the batches of a script's loop. A callback counts Keras' batches."""

    def __init__(self, dataset: FedDataset, feed: Feed) -> None:
        super().__init__(dataset)
        self._feed = feed
        self._claim = Claim()

    def _next_of_script(self, following: Callable[[], Any]) -> Any:
        """Return the next batch and record it as consumed.

        Raises:
            DatasetError: If the user's code raises.
            DataPlaneError: If no endpoint answers.
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        feed, claim = self._feed, self._claim
        feed.await_batch()
        # TensorFlow's thread begins a pass when it is asked for the first batch, and does not know for which iterator.
        # The claim tells `PassLog.begin` that the pass belongs to this iterator, which then counts its batches.
        is_first = claim.tf_pass is None
        if is_first:
            feed.passes.expect(claim)
        try:
            batch = following()
        except StopIteration:
            feed.pause()
            raise
        except tf.errors.OpError:
            feed.pause()
            failure = None if claim.tf_pass is None else claim.tf_pass.pop_failure()
            if failure is None:
                raise
            try:
                _raise(failure)
            finally:
                del failure  # its traceback refers to this frame, and so to the iterator
        finally:
            if is_first:
                # This iterator must not claim a pass that get_next() or a graph begins.
                feed.passes.expect(None)
        if claim.tf_pass is None:
            # The pass began before this iterator could claim it, for example because get_next() was called first. So
            # its batches are not counted here.
            feed.pause()
        else:
            feed.consume_from(claim.tf_pass)
        return batch
