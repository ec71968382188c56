"""`FedDataset`: a `tf.data.Dataset` that knows how many of its batches the training has consumed."""

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
    """Batches of a registered data set, as made by `hetero.tf.from_dataset`.

    It is a `tf.data.Dataset` by ``isinstance``. Transformations of it return ordinary datasets. ``len`` and
    ``cardinality`` give the batches of a whole epoch on this rank, even if a loaded state makes the next pass shorter.
    TensorFlow does not know the length of datasets made of this one.

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
            feed.order()  # raises errors of the data set here and not later in TensorFlow's thread

        def convert(batch: Any) -> Any:
            element = to_element(batch)
            check_element(element, spec)
            return element

        feed.convert = convert
        if feed.options.batch_size is None:
            feed.size_of = num_samples_of
        self._feed = feed
        unsharded = tf.data.Options()
        # Do not shard, because every rank already has its own part of the data.
        unsharded.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        self._elements = tf.data.Dataset.from_generator(feed.produce, output_signature=spec).with_options(unsharded)
        super().__init__(self._elements._variant_tensor)

    @property
    def element_spec(self) -> Any:
        """Specification of a batch: nested `tf.TensorSpec`."""
        return self._elements.element_spec

    def cardinality(self) -> Any:
        """Return the number of batches of a whole epoch on this rank, as an int64 scalar."""
        return tf.constant(self._feed.num_batches(), tf.int64)

    def __iter__(self) -> Any:
        """Return an iterator over the next epoch. Batches that a loop of the script gets from it count as consumed."""
        if not tf.executing_eagerly():
            return super().__iter__()
        return _CountingIterator(self, self._feed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. Later passes are the epochs after it.

        Passes that have already begun go on unchanged and no longer count. ``repeat`` and ``prefetch`` begin passes
        early.

        Raises:
            ConfigError: If ``epoch`` is not an integer of at least 0.
        """
        self._feed.set_epoch(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return the place behind the last consumed batch.

        The state consists of plain values, takes less than 1 KiB and is the same on every rank. It is valid at any
        time, and for any world size with the same ``batch_size`` x world size. ``hetero.torch.DataLoader`` loads it
        too.

        Raises:
            ConfigError: If the script does not report which batches it consumes, see `mark_taken`.
        """
        return self._feed.state().to_dict()

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue behind the last batch that was consumed when the state was saved.

        A state of the end of an epoch continues with the next epoch. Existing iterators do not change. If the next pass
        is shorter than others, ``fit`` without ``steps_per_epoch`` warns at the end of this pass and goes on.

        Raises:
            ConfigError: If the value is not a state, or if its seed, data set length, order or global batch differ.
        """
        self._feed.load_state(state_dict)

    def callback(self, batches_per_step: int = 1) -> Any:
        """Return a Keras callback that reports which batches the training consumes. Put it first in ``callbacks=``.

        Call this method just before `fit`. Then the callback can recognize the batches that Keras looks at to build a
        model, because Keras asks for them after this call.

        The callback lets the job stop between steps, and measures step time and data wait. With ``steps_per_execution``
        every step counts, but only the wait for the first batch of an execution is known.

        Args:
            batches_per_step: Batches of this dataset that a step consumes. Behind
                ``strategy.distribute_datasets_from_function`` it is the number of replicas of this process. If `fit` is
                given ``data.batch(n)``, it is n.

        Raises:
            ConfigError: If ``batches_per_step`` is not an integer of at least 1.
        """
        from hetero.tf.callback import TakenCallback, check_batches_per_step

        self._feed.batches_per_step = check_batches_per_step(batches_per_step)
        self._feed.promise_to_take()
        return TakenCallback(self._feed, batches_per_step)

    def measure(self, batches: Iterable[Any], batches_per_step: int = 1) -> Iterator[Any]:
        """Yield the elements of a dataset made of this one. Each element is one step.

        ::

            for batch in data.measure(strategy.distribute_datasets_from_function(lambda _: data)):
                strategy.run(train_step, args=(batch,))

        The loop counts consumed batches and measures step time and data wait, as a loop over the dataset itself does.
        Use one such loop at a time. If a loop may leave an epoch early, call `set_epoch` before each epoch. The job may
        end between two steps.

        Args:
            batches: A dataset, a distributed dataset or an iterator to iterate over.
            batches_per_step: Batches of this dataset that an element consumes: the number of replicas of this process,
                or n for ``data.batch(n)``.

        Raises:
            ConfigError: If ``batches_per_step`` is not an integer of at least 1.
            DatasetError: In a job, if the user's code raises.
            DataPlaneError: In a job, if no endpoint answers.
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        from hetero.tf.callback import check_batches_per_step

        feed = self._feed
        feed.batches_per_step = check_batches_per_step(batches_per_step)
        feed.promise_to_take()
        iterator = iter(batches)
        if isinstance(iterator, _CountingIterator):  # it counts its batches itself
            return iterator
        return _MeasuringIterator(iterator, feed, batches_per_step)

    def mark_taken(self, num_batches: int = 1) -> None:
        """Report the next ``num_batches`` as consumed, in loops that cannot use `measure`.

        A loop inside a ``tf.function`` is such a loop. Call this method after each step, and use one iterator at a
        time. If the loop may leave an epoch early, call `set_epoch` before each epoch. The job may end in this call. It
        does not measure steps, because it does not know when the loop waits.

        Raises:
            ConfigError: If ``num_batches`` is not an integer of at least 0.
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        if type(num_batches) is not int or num_batches < 0:
            raise ConfigError(f"num_batches is {num_batches!r}, expected an integer of at least 0")
        self._feed.mark_taken(num_batches)

    @property
    def step_timer(self) -> StepTimer:
        """Timer that measures step time and data wait."""
        return self._feed.timer

    def _inputs(self) -> list[Any]:
        return [self._elements]


class _MeasuringIterator:
    """Iterator over a dataset made of a `FedDataset`. Each element is one step.

    It is not a generator, because the garbage collector may end a generator, whose cleanup would wait for a lock.
    """

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
    """Raise the exception of TensorFlow's thread instead of TensorFlow's error, which has only its text.

    If the exception is a `StopError`, end the job.
    """
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
    """An iterator over a `FedDataset` that counts the batches of a script's loop. A callback counts those of Keras."""

    def __init__(self, dataset: FedDataset, feed: Feed) -> None:
        super().__init__(dataset)
        self._feed = feed
        self._claim = Claim()

    def _take(self, following: Callable[[], Any]) -> Any:
        """Return the next batch and record it as consumed.

        Raises:
            DatasetError: If the user's code raises.
            DataPlaneError: If no endpoint answers.
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        feed, claim = self._feed, self._claim
        feed.begin_step(is_counted=True)
        # The first batch begins a pass in TensorFlow's thread. Claim this pass.
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
                del failure  # its traceback refers to this frame, and so to the iterator
        finally:
            if is_first:
                feed.passes.expect(None)  # this iterator must not claim a pass that get_next() or a graph begins
        if claim.found is None:
            feed.pause()  # this iterator's pass began without a claim, so its batches are not counted here
        else:
            feed.take(found=claim.found)
        return batch
