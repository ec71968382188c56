"""The feed of one dataset: its order, its place in the order, and TensorFlow's passes over it. Does not use TensorFlow.

TensorFlow's threads begin passes and produce batches as early as they like. The thread that trains consumes batches.
One lock guards the data that both use. No thread waits for an endpoint or for the user's code while it holds the lock.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetero.audit.ledger import BatchEntry
from hetero.batches.request import BatchRequest
from hetero.control.rank import session as control
from hetero.control.rank.stopping import StopError
from hetero.dataplane.reader.fleet import Fleet
from hetero.dataplane.reader.reader import Reader
from hetero.errors import ConfigError, HeteroError
from hetero.loaders import auditing, remote
from hetero.loaders.crosscheck import CheckedReader
from hetero.loaders.local_endpoints import local_endpoints
from hetero.loaders.pipeline import LoaderOptions, LoaderPipeline, is_remote
from hetero.loaders.sampling import BuiltInOrder, PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Start
from hetero.spec import DatasetSpec
from hetero.tf.passes import PassLog, TensorFlowPass

__all__ = ["Feed"]


class Feed(LoaderPipeline):
    """Order, place and batches of one dataset.

    Args:
        spec: The data set.
        options: Options of the loader.
        num_workers: Number of endpoints that this process starts if the job has no endpoints.
        prefetch_factor: Batches in flight per endpoint. None for the reader's default.
    """

    def __init__(
        self, spec: DatasetSpec, options: LoaderOptions, *, num_workers: int, prefetch_factor: int | None
    ) -> None:
        if not is_remote():  # compression only costs time between processes of one host
            options = dataclasses.replace(options, compression=None)
        super().__init__(spec, options)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.convert: Callable[[Any], Any] = _as_it_is
        """Converts a batch to an element. The script gets the exceptions that it raises."""
        self.size_of: Callable[[Any], int] | None = None
        """Returns the number of samples of an element. If None, it is the number of indices of the batch."""
        self.passes = PassLog(self.progress)
        self.batches_per_step = 1
        """Batches that a step consumes."""
        self._is_waiting = False
        """Whether a step has begun by `begin_step` and still waits for its first batch to be produced."""
        self._begun_s: float | None = None
        """Time at which this step began. None outside of such a step."""
        self._waited_s = 0.0
        """Seconds that this step waited for its first batch. Set when the batch is produced."""

    # Requests of the script

    def num_samples(self) -> int:
        """Return the length of the data set, as endpoints describe it. The first call blocks.

        Raises:
            ConfigError: If the data set does not have a length.
            DatasetError: If the factory raises.
        """
        count = self._fleet().describe(self.subject).num_samples
        if count is None:
            raise ConfigError(f"data set {self.subject.name!r} has no len()\n  Give it a method __len__.")
        return count

    def fingerprint(self) -> str:
        """Return the fingerprint of the data set's content."""
        return self._fleet().describe(self.subject).fingerprint

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. Later passes are the epochs after it.

        Raises:
            ConfigError: If ``epoch`` is not an integer of at least 0.
        """
        resumed = self.progress.resumed
        with self.passes.hold():
            self.progress.set_epoch(epoch)
            self.passes.forget()
        self.warn_of_rest(resumed)

    def state(self) -> LoaderState:
        """Return the place behind the last consumed batch.

        Raises:
            ConfigError: If batches were produced and the script does not report which of them it consumed.
        """
        facts = self.facts()
        with self.passes.hold():
            self.passes.check_is_told()
            position = self.progress.position()
        return dataclasses.replace(facts, epoch=position.epoch, batches=position.batches)

    def load_state(self, value: object) -> None:
        """Continue from a state with the next pass.

        Raises:
            ConfigError: If the value is not a state, or is the state of another loader.
        """
        state = LoaderState.from_dict(value)
        state.check_fits(self.facts())
        with self.passes.hold():
            self.progress.resume(state)
            self.passes.forget()

    def probe(self) -> list[tuple[int, Any]]:
        """Return two batches of different sizes, each with its number of indices. They do not belong to an epoch.

        The batches are the same on every rank. The first one is a whole batch from the beginning of the data set. The
        second one comes from the end and has half as many samples, or two if the first one has one. If the data set
        makes its own batches, these are its first and last batch, which may have equal sizes.

        Raises:
            ConfigError: If the data set is empty.
            DatasetError: If the data set raises.
        """
        num_samples = self.num_samples()
        if not num_samples:
            raise ConfigError(f"data set {self.subject} has no samples to look at\n  Pass element_spec=.")
        options = self.options
        num_first = min(options.batch_size or 1, num_samples)
        num_second = 1 if options.batch_size is None else num_first // 2 or 2
        indices = [np.arange(num_first), (num_samples - 1 - np.arange(num_second)) % num_samples]
        requests = [
            BatchRequest(
                spec=self.subject,
                indices=each.astype(np.int64),
                seed=options.seed,
                epoch=0,
                position=0,
                collate=self.collate,
                as_is=True,
                on_sample_error=options.on_sample_error,
                compression=options.compression,
            )
            for each in indices
        ]
        with self._open(iter(requests), on_skips=None, on_wait=_check_wait) as reader:
            return [(len(each), batch) for each, batch in zip(indices, reader, strict=True)]

    # Producing: in TensorFlow's threads

    def produce(self) -> Iterator[Any]:
        """Yield the elements of one pass. TensorFlow runs this generator. The pass also keeps an exception."""
        order, shard = self.order(), self.shard()
        found = self.passes.begin(order, shard)
        planned: deque[PlannedBatch] = deque()
        reader: CheckedReader | None = None
        try:
            requests = self._requests(found, order, shard, planned)
            reader = self._open(requests, on_skips=self.skips.note, on_wait=_check_wait_of_framework)
            for batch in reader:
                of_batch = planned.popleft()
                entry = auditing.entry_of(self, of_batch, found.start.epoch, batch)
                element = self.convert(batch)
                size = len(of_batch.indices) if self.size_of is None else self.size_of(element)
                self._note_produced(found, size, entry)
                yield element
        except Exception as error:
            self._note_failed(found, error)
            if reader is not None:
                reader.close()
            raise
        finally:
            # This also runs when the garbage collector drops an iterator and TensorFlow therefore drops this generator.
            # The thread that dropped the iterator may hold any lock, and waits for this. So nothing here may wait for a
            # lock. The reader ends with this frame, also without a lock.
            self.passes.end(found)

    def _requests(
        self, found: TensorFlowPass, order: BuiltInOrder, shard: Shard, planned: deque[PlannedBatch]
    ) -> Iterator[BatchRequest]:
        start: Start = found.start
        for batch in order.batches(start.epoch, shard, start=start.batches):
            planned.append(batch)
            yield dataclasses.replace(self.request(batch, start.epoch), as_is=True)

    def _note_produced(self, found: TensorFlowPass, size: int, entry: BatchEntry | None) -> None:
        with self.passes.hold():
            found.produced(size, entry)
            if self._is_waiting and not found.is_counted and self._begun_s is not None:
                self._is_waiting = False
                self._waited_s = time.perf_counter() - self._begun_s

    def _note_failed(self, found: TensorFlowPass, error: Exception) -> None:
        session = control.current()
        if session is not None and isinstance(error, HeteroError):
            session.hidden_error = error
        with self.passes.hold():
            found.failure = error
            if self._is_waiting and not found.is_counted:
                self._stop_clock()

    def _open(
        self,
        requests: Iterator[BatchRequest],
        *,
        on_skips: Callable[[Any], object] | None,
        on_wait: Callable[[bool], None],
    ) -> CheckedReader:
        fleet = self._fleet()
        open_reader = functools.partial(
            Reader,
            fleet,
            prefetch_factor=self.prefetch_factor,
            on_skips=on_skips,
            on_received=self.traffic.add,
            on_wait=on_wait if is_remote() else local_endpoints(self.num_workers).check,
        )
        # Do not compare batches: TensorFlow asks for them in its own thread, while other threads draw random numbers.
        session = control.current()
        is_wanted = session is None or session.options.purity_checks > 0
        return CheckedReader(fleet, requests, open_reader, compares_globals=is_wanted, compares_batches=False)

    def _fleet(self) -> Fleet:
        session = control.current()
        if session is not None and session.remote:
            return remote.fleet_for(session)
        return local_endpoints(self.num_workers).fleet

    # Consuming: on the thread that trains

    def begin_step(self, *, is_counted: bool = False) -> None:
        """Begin to wait for the next batch. The job may end here.

        Args:
            is_counted: Whether the caller itself waits for the batch, and then calls `take` with ``found`` or
                ``is_awaited``.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        with self.passes.hold():
            self._end_step()  # in case the end of the previous step was not reported
        timer = self.begin_wait(self)
        begun_s = time.perf_counter()
        try:
            control.check_stop(timer)
        except BaseException:
            self.pause()
            raise
        if is_counted:
            return
        with self.passes.hold():
            self.passes.is_told = True
            self._begun_s, self._waited_s = begun_s, 0.0
            self._is_waiting = self.passes.oldest_untaken() is None  # until it is produced

    def deliver(self, following: Callable[[], Any], num_batches: int) -> Any:
        """Return the result of ``following``, an element that consumes ``num_batches``. The job may end here.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        self.begin_step(is_counted=True)
        try:
            element = following()
        except BaseException:
            self.pause()
            raise
        self.take(num_batches, is_awaited=True)
        return element

    def take(self, num_batches: int = 1, *, found: TensorFlowPass | None = None, is_awaited: bool = False) -> None:
        """Record the next batches as consumed.

        Args:
            num_batches: Number of batches. Batches that were not produced are ignored, because Keras reports too many
                at the end of an epoch.
            found: Pass of the batches. The wait for them ends here. None for the oldest pass that has batches left.
                Then the batches belong to the steps that began with `begin_step`, if it was called.
            is_awaited: Whether the wait for the batches ends here, and not when the first of them was produced.
        """
        entries: list[BatchEntry] = []
        sizes: list[int] = []
        with self.passes.hold():
            if found is None:
                self.passes.is_told = self.passes.is_training = True
            # Collect the ledger entries and sizes of the batches.
            for _ in range(num_batches):
                taken = self.passes.told() if found is None else found
                if taken is None:
                    break
                sizes.append(taken.next_size)
                entry = self.passes.take(taken)
                if entry is not None:
                    entries.append(entry)
            # End the data wait: now, or when the first batch was produced. `mark_taken` does not begin one.
            if found is not None:
                self.timer.end_wait(sum(sizes))
            elif sizes and (is_awaited or self._begun_s is not None):
                num_steps = -(-len(sizes) // self.batches_per_step)
                waited_s = None if is_awaited else self._waited_s
                self.timer.end_wait(sum(sizes), waited_s=waited_s, num_steps=num_steps)
            self._end_step()
        for entry in entries:
            auditing.add(self, entry)

    def promise_to_take(self) -> None:
        """Record the script's promise to report the consumed batches of passes that begin from now on."""
        with self.passes.hold():
            self.passes.is_promised = True

    def mark_taken(self, num_batches: int) -> None:
        """Record the batches of a step whose beginning was not reported. The job may end here.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        self.take(num_batches)
        control.check_stop(self.timer)

    def begin_training(self) -> None:
        """Prepare for calls of `take` without a pass. They do not refer to passes that began earlier."""
        with self.passes.hold():
            self.passes.leave_behind()
            self.passes.is_told = self.passes.is_promised = self.passes.is_training = True

    def end_training(self) -> None:
        """Stop the clock, and discard the rest of passes that have begun, because it will not be consumed."""
        self.pause()
        with self.passes.hold():
            self.passes.leave_behind()
            self.passes.is_training = False

    def pause(self) -> None:
        """Stop the clock, because no step follows directly. Idempotent."""
        with self.passes.hold():
            self._stop_clock()

    def _stop_clock(self) -> None:
        self._end_step()
        self.end_timing(self)

    def _end_step(self) -> None:
        self._is_waiting = False
        self._begun_s = None


def _check_wait(is_starved: bool) -> None:
    """End this process if the job must stop and no batch comes. Call it on the script's thread.

    Raises:
        SystemExit: If the process ends. The stop callbacks have run.
    """
    session = control.current()
    if session is not None:
        session.check_wait(is_starved)


def _check_wait_of_framework(is_starved: bool) -> None:
    """Make TensorFlow's wait fail if the job must stop and no batch comes.

    This thread does not end the process itself, because stop callbacks run on the script's thread.

    Raises:
        StopError: If the wait must fail.
    """
    session = control.current()
    if session is not None and session.must_end_wait(is_starved):
        raise StopError("the job was asked to stop, and the next batch does not come")


def _as_it_is(batch: Any) -> Any:
    return batch
