"""What lies behind one dataset: its order, its place, and the passes over it that TensorFlow makes. No TensorFlow.

Passes are begun and produced in TensorFlow's threads, as early as it likes; taken by the thread that trains. One lock
guards what both touch; nobody waits for an endpoint, or for the user's code, while holding it.
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
        options: What was asked for.
        num_workers: Endpoints of this process's own, where the job has none.
        prefetch_factor: Batches in flight per endpoint; None: the reader's default.
    """

    def __init__(
        self, spec: DatasetSpec, options: LoaderOptions, *, num_workers: int, prefetch_factor: int | None
    ) -> None:
        if not is_remote():  # between processes of one host it costs time and saves none
            options = dataclasses.replace(options, compression=None)
        super().__init__(spec, options)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.convert: Callable[[Any], Any] = _as_it_is
        """Makes an element of a batch; raises what the script is to see."""
        self.size_of: Callable[[Any], int] | None = None
        """Counts the samples of an element; None: as many as the batch has indices."""
        self.passes = PassLog(self.progress)
        self.batches_per_step = 1
        """What a step takes, of those whose beginning is told."""
        self._is_waiting = False
        """Whether such a step has begun and no batch was there for it yet."""
        self._begun_s: float | None = None
        """When it began; None: none has, or its end was told."""
        self._waited_s = 0.0
        """How long it waited for its first batch, once that has come."""

    # What the script asks for

    def num_samples(self) -> int:
        """Return the length of the data set, as endpoints describe it; blocks at first.

        Raises:
            ConfigError: It has none.
            DatasetError: The factory raises.
        """
        count = self._fleet().describe(self.subject).num_samples
        if count is None:
            raise ConfigError(f"data set {self.subject.name!r} has no len()\n  Give it a method __len__.")
        return count

    def fingerprint(self) -> str:
        """Return what tells the data set's content."""
        return self._fleet().describe(self.subject).fingerprint

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass; passes after it go on from there.

        Raises:
            ConfigError: If ``epoch`` is no integer of at least 0.
        """
        resumed = self.progress.resumed
        with self.passes.hold():
            self.progress.set_epoch(epoch)
            self.passes.forget()
        self.warn_of_rest(resumed)

    def state(self) -> LoaderState:
        """Return the place behind the last batch that was taken.

        Raises:
            ConfigError: Batches went out, and nobody says which of them were taken.
        """
        facts = self.facts()
        with self.passes.hold():
            self.passes.check_is_told()
            position = self.progress.position()
        return dataclasses.replace(facts, epoch=position.epoch, batches=position.batches)

    def load_state(self, value: object) -> None:
        """Continue from a state with the next pass.

        Raises:
            ConfigError: If it is no state, or of another loader.
        """
        state = LoaderState.from_dict(value)
        state.check_fits(self.facts())
        with self.passes.hold():
            self.progress.resume(state)
            self.passes.forget()

    def probe(self) -> list[tuple[int, Any]]:
        """Return two batches of different sizes, each after its number of indices; neither is one of an epoch's.

        They are the same on every rank: from the data set's beginning a whole one, from its end half of one, or two
        samples. Of a data set that makes its own batches the first and the last, which may be of one size.

        Raises:
            ConfigError: The data set has no samples.
            DatasetError: It raises.
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
        """Yield the elements of one pass, as TensorFlow's generator; what it raises is kept in the pass too."""
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
            # Also when TensorFlow drops this generator, because the collector dropped an iterator: in a thread that may
            # have any lock, and waits. Nothing here may wait for one; the reader goes with this frame, and knows how.
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
        # Not its batches: TensorFlow asks for them in a thread of its own, beside whatever draws here.
        session = control.current()
        is_wanted = session is None or session.options.purity_checks > 0
        return CheckedReader(fleet, requests, open_reader, compares_globals=is_wanted, compares_batches=False)

    def _fleet(self) -> Fleet:
        session = control.current()
        if session is not None and session.remote:
            return remote.fleet_for(session)
        return local_endpoints(self.num_workers).fleet

    # Taking: on the thread that trains

    def begin_step(self, *, is_counted: bool = False) -> None:
        """Begin to wait for the next batch; the job may end here.

        Args:
            is_counted: Whether the caller waits for a pass of its own, and says `take` with it.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        with self.passes.hold():
            self._end_step()  # if the one before this had no end
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
        """Return what ``following`` returns, for which a step takes the next batches; the job may end here.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
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
        """Note that the training has the next batches.

        Args:
            num_batches: More than were produced are none: Keras says so of the last ones of an epoch.
            found: Of which pass, whose wait ends here; None: of the oldest from which some are left, for the steps that
                `begin_step` told of, if it did.
            is_awaited: Whether the wait for them ends here, and not when the first of them was produced.
        """
        entries: list[BatchEntry] = []
        sizes: list[int] = []
        with self.passes.hold():
            if found is None:
                self.passes.is_told = self.passes.is_training = True
            for _ in range(num_batches):
                taken = self.passes.told() if found is None else found
                if taken is None:
                    break
                sizes.append(taken.next_size)
                entry = self.passes.take(taken)
                if entry is not None:
                    entries.append(entry)
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
        """Note that of passes that begin from now on, what is taken will be told."""
        with self.passes.hold():
            self.passes.is_promised = True

    def mark_taken(self, num_batches: int) -> None:
        """Note a step of which nobody told the beginning; the job may end here.

        Raises:
            SystemExit: If the job was asked to stop; the stop callbacks ran.
        """
        self.take(num_batches)
        control.check_stop(self.timer)

    def begin_training(self) -> None:
        """Note that somebody will say `take` without a pass, and does not mean what was begun before."""
        with self.passes.hold():
            self.passes.leave_behind()
            self.passes.is_told = self.passes.is_promised = self.passes.is_training = True

    def end_training(self) -> None:
        """Note that nobody will say `take` of what was begun and is left."""
        self.pause()
        with self.passes.hold():
            self.passes.leave_behind()
            self.passes.is_training = False

    def pause(self) -> None:
        """Stop the clock: what follows is no step. Idempotent."""
        with self.passes.hold():
            self._stop_clock()

    def _stop_clock(self) -> None:
        self._end_step()
        self.end_timing(self)

    def _end_step(self) -> None:
        self._is_waiting = False
        self._begun_s = None


def _check_wait(is_starved: bool) -> None:
    """End this process if the job is to stop and no batch comes; on the script's thread.

    Raises:
        SystemExit: It is; the stop callbacks ran.
    """
    session = control.current()
    if session is not None:
        session.check_wait(is_starved)


def _check_wait_of_framework(is_starved: bool) -> None:
    """Have TensorFlow's wait fail instead: stop callbacks run on the script's thread.

    Raises:
        StopError: The job is to stop, and no batch comes.
    """
    session = control.current()
    if session is not None and session.must_end_wait(is_starved):
        raise StopError("the job was asked to stop, and the next batch does not come")


def _as_it_is(batch: Any) -> Any:
    return batch
