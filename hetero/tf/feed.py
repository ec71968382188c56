"""The feed of one dataset: its order, the position in it, and TensorFlow's passes over it. Does not use TensorFlow.

TensorFlow's threads begin passes and produce batches ahead. The thread that trains consumes batches. One lock guards
the data that both use. No thread waits for an endpoint or for the user's code while it holds the lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hetero.batches.fetch import Description
from hetero.batches.indexed import IndexedWork
from hetero.batches.request import BatchRequest
from hetero.control.rank import session as control
from hetero.control.rank.session import RankSession
from hetero.control.rank.stopping import StopError
from hetero.datasets import build
from hetero.errors import ConfigError, HeteroError
from hetero.loaders import auditing, remote
from hetero.loaders.crosscheck import CheckedReader
from hetero.loaders.kept_batches import KeptBatches
from hetero.loaders.local_endpoints import local_endpoints
from hetero.loaders.measuring.profiling import LoaderProfiler, ProfiledBatches, measure_here
from hetero.loaders.pipeline import LoaderOptions, LoaderPipeline, is_remote
from hetero.loaders.prefetching import Batches, EpochRequests
from hetero.loaders.sampling import BuiltInOrder, PlannedBatch, Shard
from hetero.loaders.state import LoaderState, Start
from hetero.reader.fleet import Fleet
from hetero.spec import DatasetSpec
from hetero.tf.passes import PassLog, ProducedBatch, Step, TensorFlowPass

__all__ = ["Feed"]


class Feed(LoaderPipeline):
    """Order, position and batches of one dataset.

    Args:
        spec: The data set.
        options: Options of the loader.
        num_workers: Number of endpoints that this process starts in a job without endpoints.
        prefetch_factor: Batches in flight per endpoint. None for the reader's default.
    """

    can_be_profiled = True
    advances_chosen_epoch = True

    def __init__(
        self, spec: DatasetSpec, options: LoaderOptions, *, num_workers: int, prefetch_factor: int | None
    ) -> None:
        # In a job without data hosts, batches move between processes of one host. There compression only costs time.
        if not is_remote():
            options = dataclasses.replace(options, compression=None)
        super().__init__(spec, options)
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self.convert: Callable[[Any], Any] = lambda batch: batch
        """Converts a batch to an element. Its exceptions reach the script."""
        self.size_of: Callable[[Any], int] | None = None
        """Returns the number of samples of an element. If None, a batch has one sample per index."""
        self.passes = PassLog(self.progress)
        self.batches_per_step = 1
        """Batches that a step consumes."""
        self._step: Step | None = None
        """Step that `begin_step` began. None if no such step is in progress."""
        self._profiler: LoaderProfiler | None = None
        self._had_fetched = True
        """In a profile run, whether the latest step consumed fetched batches. Later steps consume repeated ones."""

    def profile(self, session: RankSession, kept: KeptBatches) -> None:
        """Follow the phases of a profile run. Loaders of the same kind share one profiler.

        Args:
            session: The session of this rank.
            kept: The batches to repeat. Empty at first.
        """
        self._profiler = LoaderProfiler(
            self,
            session,
            kept,
            num_processes=0 if session.remote else self.num_workers,  # 0 if endpoints fetch the batches
            measure=lambda requests: measure_here(lambda: build(self.subject), requests),
        ).shared(session)

    # Requests of the script

    def dataset_samples(self) -> int:
        """Return the length of the data set, which an endpoint reports. The first call blocks.

        Raises:
            ConfigError: If the data set does not have a length.
            DatasetError: If the factory raises.
        """
        found = self._fleet().describe(self.subject)
        remote.check_has_index(self.subject, found)
        count = found.num_samples
        if count is None:
            raise ConfigError(f"data set {self.subject.name!r} has no len()\n  Define its method __len__.")
        return count

    def remote_description(self) -> Description:
        """Return what endpoints say of the data set. There are endpoints on this host if there are no data hosts."""
        return self._fleet().describe(self.subject)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The passes after it are the following epochs.

        Raises:
            ConfigError: If ``epoch`` is not an integer of at least 0.
        """
        resumed = self.progress.resumed
        with self.passes.hold():
            # Make both calls under one lock. A pass that TensorFlow begins between them would have the old epoch.
            self.progress.set_epoch(epoch)
            self.passes.forget()
        self.warn_of_rest(resumed)

    def state(self) -> LoaderState:
        """Return the position after the last consumed batch.

        Raises:
            ConfigError: If batches were produced, and the script does not report which of them it consumed.
        """
        # Get the facts before taking the lock, because the length of the data set may come from an endpoint.
        facts = self.facts()
        with self.passes.hold():
            self.passes.check_is_reported()
            position = self.progress.position()
        return dataclasses.replace(facts, epoch=position.epoch, batches=position.batches, completed=position.completed)

    def load_state(self, value: object) -> None:
        """Start the next pass at the position of a saved state.

        Raises:
            ConfigError: If the value is not a state, or is the state of another loader.
        """
        state = LoaderState.from_dict(value)
        state.check_fits(self.facts())
        with self.passes.hold():
            self.progress.resume(state)
            self.passes.forget()
        self.prefetched.discard()

    def _begin_later(self, batches: int) -> Start:
        """Change the position for `skip`. See `state` and `Progress.skip` for the errors."""
        with self.passes.hold():
            self.passes.check_is_reported()
            start = self.progress.skip(batches, self.num_global_batches)
            self.passes.forget()
        return start

    def probe(self) -> list[tuple[int, Any]]:
        """Return two batches of different sizes, each with its number of indices. The batches belong to no epoch.

        The batches are the same on every rank. The first is a whole batch from the beginning of the data set. The
        second comes from the end and has half as many samples, or two samples if the first batch has one. If the data
        set makes its own batches, these are its first and last batch, which may have equal sizes.

        Raises:
            ConfigError: If the data set is empty.
            DatasetError: If the data set raises.
        """
        num_samples = self.num_samples()
        if not num_samples:
            raise ConfigError(
                f"data set {self.subject} has no samples, so no element specification can be derived from a batch\n"
                "  Pass element_spec=."
            )
        options = self.options
        # Without a batch size, an item of the data set is a batch, so one index is requested.
        num_first = min(options.batch_size or 1, num_samples)
        num_other = num_first // 2 if num_first > 1 else 2
        num_second = 1 if options.batch_size is None else num_other
        # The second batch comes from the end. If the data set has only one sample, this sample comes twice.
        indices = [np.arange(num_first), (num_samples - 1 - np.arange(num_second)) % num_samples]
        requests = [
            BatchRequest(
                spec=self.subject,
                work=IndexedWork(each.astype(np.int64)),
                seed=options.seed,
                epoch=0,
                position=0,
                collate=self.collate,
                # Without collation, endpoints would convert arrays to tensors, as torch does.
                as_is=True,
                on_sample_error=options.on_sample_error,
                compression=options.compression,
            )
            for each in indices
        ]
        with contextlib.closing(self._open(iter(requests), on_skips=None, on_wait=_check_wait)) as reader:
            return [(len(each), batch) for each, batch in zip(indices, reader, strict=True)]

    # Producing: in TensorFlow's threads

    def produce(self) -> Iterator[Any]:
        """Yield the elements of one pass. TensorFlow runs this generator in its own thread.

        Record each batch as produced before it is yielded. An exception is also stored in the pass, because TensorFlow
        shows the script only the exception's text.
        """
        order, shard = self.order(), self.shard()
        tf_pass = self.passes.begin(order, shard)
        reader: Batches | None = None
        try:
            reader, requests = self._begin_reading(tf_pass, order, shard)
            while not requests.is_pass_over():
                try:
                    batch = next(reader)
                except StopIteration:
                    self._note_end(tf_pass)
                    return
                request = reader.request
                assert request is not None
                planned = requests.passed()
                is_last = requests.is_pass_over()
                record = auditing.record_of(self, request, batch)
                element = self.convert(batch)
                size = request.work.num_samples if self.size_of is None else self.size_of(element)
                is_repeated = isinstance(reader, ProfiledBatches) and reader.is_repeated
                produced = ProducedBatch(size, record, planned.position + 1, not tf_pass.num_produced, is_repeated)
                self._note_produced(tf_pass, produced)
                # Keep the reader for the next pass now, because TensorFlow may never ask for another batch, as with
                # take(). The local name is cleared, because `except` must not close a reader that is kept.
                if is_last:
                    self.prefetched.keep(reader, requests)
                    reader = None
                    yield element
                    return
                yield element
            # The pass has no batches, because nothing was left of its epoch.
            self.prefetched.keep(reader, requests)
        except Exception as error:
            self._note_failed(tf_pass, error)
            if reader is not None:
                reader.close()
            raise
        finally:
            # This code also runs when the garbage collector drops an iterator, because TensorFlow then drops this
            # generator. The thread that dropped the iterator waits for this code, and may hold any lock. So nothing
            # here may wait for a lock. The reader is dropped with this frame, and does not wait for a lock either.
            self.passes.end(tf_pass)

    def _note_end(self, tf_pass: TensorFlowPass) -> None:
        """Record the end of a pass. A subclass may know it only now."""

    def _begin_reading(
        self, tf_pass: TensorFlowPass, order: BuiltInOrder, shard: Shard
    ) -> tuple[Batches, EpochRequests]:
        """Return the batches of a pass, and their requests.

        If batches of this pass were requested in the pass before, continue with their reader. In a profile run, kept
        batches replace some batches.
        """
        start = dataclasses.replace(tf_pass.start, num_samples=order.num_samples)
        kept = self.prefetched.take(start, shard)
        if kept is not None:
            return kept
        planned = order.batches(start.epoch, shard, start=start.batches)
        # A profile run measures each pass by itself, so no batch of the next epoch is requested in this one.
        adds_next_epochs = self._profiler is None and self.may_add_next_epochs
        requests = EpochRequests(self, start, planned, adds_next_epochs=adds_next_epochs)
        open_source = functools.partial(self._open, on_skips=self.skips.note, on_wait=_check_wait_of_framework)
        if self._profiler is None:
            return open_source(requests), requests
        batches = ProfiledBatches(
            self._profiler, requests, open_source, num_unconsumed=lambda: tf_pass.num_produced - tf_pass.num_consumed
        )
        return batches, requests

    def plan_selection(self, start: Start, selection: tuple[int, ...]) -> Iterator[PlannedBatch]:
        """Yield this rank's batches from ``start`` on."""
        return self.order().batches(start.epoch, self.shard(), start=start.batches)

    def request(self, planned: PlannedBatch, epoch: int, *, is_prefetch: bool = False) -> BatchRequest:
        """Return the request for a planned batch, which is to be delivered as the data set has made it."""
        return dataclasses.replace(super().request(planned, epoch, is_prefetch=is_prefetch), as_is=True)

    def _note_produced(self, tf_pass: TensorFlowPass, batch: ProducedBatch) -> None:
        """Record a batch as produced. End the wait of a step of fit."""
        with self.passes.hold():
            tf_pass.produce(batch)
            step = self._waiting_step(tf_pass)
            if step is not None:
                # A step of fit waits inside TensorFlow, so only TensorFlow's thread knows when the wait ends.
                step.waited_s = time.perf_counter() - step.begun_s

    def _note_failed(self, tf_pass: TensorFlowPass, error: Exception) -> None:
        """Keep an exception of TensorFlow's thread for the script and the rank. Stop the clock of a waiting step."""
        session = control.current()
        if session is not None and isinstance(error, HeteroError):
            # Keras raises an OpError that contains only the text of this error. Keep this error, because the rank
            # reports it with its exit code.
            session.hidden_error = error
        with self.passes.hold():
            tf_pass.failure = error
            if self._waiting_step(tf_pass) is not None:
                self._stop_clock()

    def _waiting_step(self, tf_pass: TensorFlowPass) -> Step | None:
        """Return the step that waits for its first batch. None if no step waits, or an iterator counts this pass."""
        step = self._step
        return step if step is not None and step.waited_s is None and not tf_pass.is_counted else None

    def _open(
        self,
        requests: Iterator[BatchRequest],
        *,
        on_skips: Callable[[Any], object] | None,
        on_wait: Callable[[bool], None],
    ) -> CheckedReader:
        """Return a reader over the endpoints of the job, or of this process."""
        return remote.open_reader(
            self._fleet(),
            requests,
            prefetch_factor=self.prefetch_factor,
            # This process must not compute batches, because other threads draw random numbers at the same time.
            compares_batches=False,
            # ``on_wait`` raises when the job is asked to stop, and without data hosts also if an endpoint process of
            # this rank has failed. Without this, a rank whose endpoint process hung waited inside Keras for ever.
            on_wait=on_wait if is_remote() else self._and_check_processes(on_wait),
            on_received=self.traffic.add,
            on_skips=on_skips,
        )

    def _and_check_processes(self, on_wait: Callable[[bool], None]) -> Callable[[bool], None]:
        """Return a function for ``on_wait`` that also fails if the endpoints that this process started have failed."""
        endpoints = local_endpoints(self.num_workers)

        def check(is_starved: bool) -> None:
            endpoints.check()
            on_wait(is_starved)

        return check

    def _fleet(self) -> Fleet:
        """Return the endpoints of the job, or else the endpoints of this process, which are started on first use."""
        session = control.current()
        if session is not None and session.remote:
            return remote.fleet_for(session)
        return local_endpoints(self.num_workers).fleet

    # Consuming: on the thread that trains

    def await_batch(self) -> float:
        """Begin to wait for the next batch, and return the current time. The job may end here.

        When the batch has arrived, the caller reports it with `consume_from`.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        with self.passes.hold():
            self._step = None  # the script may not have reported the previous step as ended
        if self._profiler is not None:
            self._profiler.measure_if_done()
        begun_s = time.perf_counter()
        self.await_step(owner=self)
        return begun_s

    def begin_step(self) -> None:
        """Begin a step. Its data wait ends when its first batch is produced. `consume` then reports its batches.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        begun_s = self.await_batch()
        with self.passes.hold():
            # If a produced batch is not consumed yet, it is the step's first batch, and the step need not wait for it.
            self._step = Step(begun_s, waited_s=0.0 if self.passes.has_unreported() else None)

    def deliver(self, following: Callable[[], Any], num_batches: int) -> Any:
        """Return the element that ``following`` returns, and record its batches as consumed. The job may end here.

        Raises:
            SystemExit: If the job was asked to stop. The stop callbacks have run.
        """
        self.await_batch()
        try:
            element = following()
        except BaseException:
            self.pause()
            raise
        self.consume(num_batches, is_awaited=True)
        return element

    def consume(self, num_batches: int, *, is_awaited: bool = False) -> None:
        """Record the next batches as consumed. Ignores passes whose batches an iterator counts.

        If `begin_step` began a step, these are the batches of this step. Without a step, and if ``is_awaited`` is
        False, no step is measured.

        Args:
            num_batches: Number of batches. At the end of an epoch Keras may report more batches than were produced.
                The excess is ignored.
            is_awaited: Whether the wait for the batches, which `await_batch` began, ends now.
        """
        with self.passes.hold():
            batches = self.passes.report(num_batches)
            step, self._step = self._step, None
            if batches and (is_awaited or step is not None):
                # None means that the wait ends now. But the wait of a step of fit ended when its first batch was
                # produced. If no batch was produced since the step began, the step had its batches without a wait.
                waited_s = None
                if step is not None and not is_awaited:
                    waited_s = step.waited_s or 0.0
                # Rounded up, because the last step of an epoch may have fewer batches.
                num_steps = -(-len(batches) // self.batches_per_step)
                self._note_delivery(batches, knows_wait=is_awaited or len(batches) == 1)
                self.timer.end_wait(sum(batch.size for batch in batches), waited_s=waited_s, num_steps=num_steps)
        for batch in batches:
            auditing.add(self, batch.record)

    def consume_from(self, tf_pass: TensorFlowPass) -> None:
        """Record the next batch of a pass as consumed. The wait that `await_batch` began ends here."""
        with self.passes.hold():
            batch = self.passes.consume(tf_pass)
            self._note_delivery([batch], knows_wait=True)
            self.timer.end_wait(batch.size)
            self._step = None
        # Record the batch outside the lock, because this writes to a file.
        auditing.add(self, batch.record)

    def _note_delivery(self, batches: list[ProducedBatch], *, knows_wait: bool) -> None:
        """Report to the profiler the steps that end with the delivery of these batches.

        Such a step consists of the computation on earlier batches, and the wait for these batches.

        Args:
            batches: The batches, at least one.
            knows_wait: Whether the wait for each of the batches is measured. In fit, only the first wait is.
        """
        if self._profiler is None:
            return
        self._profiler.batches_per_step = self.batches_per_step
        has_fetched = not all(batch.is_repeated for batch in batches)
        # The computation of these steps was on the batches of the last delivery, so `_had_fetched` counts too.
        self._profiler.begin_delivery(
            is_first=batches[0].is_first, has_fetched=has_fetched or self._had_fetched, knows_wait=knows_wait
        )
        self._had_fetched = has_fetched

    def announce_reports(self) -> None:
        """Record that the script will report consumed batches, for the passes that begin from now on."""
        with self.passes.hold():
            self.passes.announce_reports()

    def begin_training(self, num_pipelines: int = 1) -> None:
        """Prepare for calls of `consume`. These calls will ignore the passes that have begun before now.

        ``num_pipelines`` has no effect, because a strategy does not cut the batches of this dataset.
        """
        with self.passes.hold():
            self.passes.begin_training()

    def end_training(self) -> None:
        """Stop the clock, and close the passes that have begun, because the rest of their batches will not be used."""
        self.pause()
        with self.passes.hold():
            self.passes.end_training()

    def pause(self) -> None:
        """Stop the clock, because the next step does not follow directly. Idempotent."""
        with self.passes.hold():
            self._stop_clock()

    def _stop_clock(self) -> None:
        self._step = None
        self.end_timing(self)


def _check_wait(is_starved: bool) -> None:
    """End this process if the job must stop and no batch arrives. Call it on the script's thread.

    Raises:
        SystemExit: If the process ends. The stop callbacks have run.
    """
    session = control.current()
    if session is not None:
        session.check_wait(is_starved)


def _check_wait_of_framework(is_starved: bool) -> None:
    """Make TensorFlow's wait fail if the job must stop and no batch arrives.

    This runs on TensorFlow's thread. It does not end the process, because stop callbacks run on the script's thread.

    Raises:
        StopError: If the wait must fail.
    """
    session = control.current()
    if session is not None and session.must_end_wait(is_starved):
        raise StopError("the job was asked to stop, and the next batch has not arrived")
