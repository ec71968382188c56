"""Local fetching: this process or torch's workers compute batches, with the same function as endpoints."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch
import torch.utils.data

from hetero.batches.request import BatchRequest
from hetero.batches.structure.conversion import type_name
from hetero.control.rank import session as control
from hetero.documents.text import listing
from hetero.errors import DatasetError
from hetero.loaders.prefetching import EpochRequests
from hetero.metrics.skips import SkipLog
from hetero.metrics.steps import Extent
from hetero.spec import DatasetSpec
from hetero.system.open_files import names_for_message
from hetero.system.stop_signals import SHIELD_VARIABLE, sigterm_blocked_in_children
from hetero.torch.local_dataset import Answer, Failure, LocalDataset
from hetero.torch.shared_memory import is_roomy, shared_bytes

__all__ = ["LocalBatches", "LocalFetcher", "WorkerOptions", "accelerator_is_available", "builds_here"]

logger = logging.getLogger(__name__)

_SLOW_S = 60.0
"""Seconds of waiting for the first batch until a warning. For example, polars hangs for ever after a fork
(litData#823)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of ``torch.utils.data.DataLoader``, with the same names and meanings."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout: float = 0.0
    """Seconds to wait for a worker. 0 waits without a limit."""
    multiprocessing_context: BaseContext | str | None = None


class LocalFetcher:
    """Fetches batches through a ``torch.utils.data.DataLoader``, with its processes, pinning and timeout.

    Args:
        dataset: Answers the requests.
        options: Options of torch's loader.
        skips: Gets the skipped samples of a batch just before that batch is delivered.
        extent: Gets the waits for shards at the same time.
    """

    def __init__(
        self,
        dataset: LocalDataset,
        options: WorkerOptions,
        *,
        skips: SkipLog,
        extent: Extent,
    ) -> None:
        self._dataset = dataset
        self._skips = skips
        self._extent = extent
        self._options = options
        self._persistent: torch.utils.data.DataLoader[Any] | None = None
        """torch's loader with persistent workers. None before the first pass, and without such workers."""
        self._sampler = _RequestSampler()
        """Sampler of the persistent loader. Each pass sets its requests there."""
        self._is_checked = False
        """Whether a batch was checked for values that a data host could not send."""
        self._has_warned = False
        """Whether the warning about shared connections was logged."""
        self._has_warned_of_wait = False
        """Whether the warning that no batch has come was logged."""
        self._digests: dict[str, str] | None = None
        """`LocalDataset.digests` from the time when the workers were started. None if they are not compared."""

    def begin(self, requests: Iterator[BatchRequest]) -> tuple[_RequestSampler, Iterator[Any]]:
        """Start to fetch ``requests``. Return their sampler and torch's iterator over the answers.

        The sampler is in use until `LocalBatches.close`.
        """
        if self._options.persistent_workers and not self._sampler.is_used:
            sampler = self._sampler
            if self._persistent is None or not self._is_unchanged():
                self._persistent = self._loader(sampler, persistent=True)
            loader = self._persistent
        else:  # new workers, because none are persistent or another iterator uses the persistent ones
            sampler = _RequestSampler()
            loader = self._loader(sampler, persistent=False)
        sampler.is_used = True
        try:
            sampler.requests = self._note_prefetched(requests)
            with _workers_survive_sigterm():
                return sampler, iter(loader)
        except BaseException:
            sampler.is_used = False
            raise

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Return a context for the wait for the first batch of workers. Log once if the wait is long."""
        timer = threading.Timer(_SLOW_S, self._warn_of_wait)
        # The timer must not keep the process alive.
        timer.daemon = True
        # Without workers, this process itself makes the batch and does not wait.
        if self._options.num_workers and not self._has_warned_of_wait:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _warn_of_wait(self) -> None:
        """Log a warning that no batch has come. Runs on the timer's thread."""
        self._has_warned_of_wait = True
        logger.warning(
            "data set %s: its loader workers have sent no batch for %.0f s. %s",
            self._dataset.name,
            _SLOW_S,
            "Libraries with threads of their own, such as polars, hang in a forked process if they were used before. "
            'Then pass multiprocessing_context="forkserver", or use such a library in samples only.'
            if _forks(self._options)
            else "Samples are slow, or a worker hangs.",
        )

    def may_keep_workers(self, batch_bytes: int) -> bool:
        """Return whether workers may go on making batches between two passes, see `LocalBatches.may_be_kept`.

        Args:
            batch_bytes: Bytes of a batch in shared memory.
        """
        # Another loader may need as much shared memory in the meantime.
        return is_roomy(self._dataset.num_prefetched * batch_bytes) and self._is_unchanged()

    def _is_unchanged(self) -> bool:
        """Return whether workers that were started now would read the same values as the present workers."""
        return self._digests is None or self._dataset.digests() == self._digests

    def unwrap(self, answer: Answer) -> Any:
        """Return the batch in a worker's answer.

        Raises:
            DatasetError: If more samples were skipped than are allowed.
        """
        batch = answer.content
        if answer.skips is not None:
            self._skips.note(answer.skips)
        self._extent.add_shard_waits(answer.shard_waits_s)
        if not self._is_checked:
            self._is_checked = True
            # Workers can send values that data hosts cannot. Warn of them now, because the script would otherwise fail
            # in its first job with data hosts. This check copies nothing.
            self._dataset.warn_if_only_local(batch)
        return batch

    def _warn_of_connections(self) -> None:
        """Log once if forked workers are about to share connections of the data set, such as sockets and databases.

        Open files are not among them, because each worker opens them again.
        """
        # Unless the data set may be shared, each worker builds it anew and makes new connections.
        if self._has_warned or not self._dataset.connections or not self._dataset.may_be_shared:
            return
        self._has_warned = True
        subject = self._dataset.subject
        is_spec = isinstance(subject, DatasetSpec)
        logger.warning(
            "samples of data set %s may be wrong: %s was opened while its code ran here, and torch's workers share "
            "what is open when they are forked. %s",
            subject if is_spec else type_name(type(subject)),
            listing(sorted(names_for_message(self._dataset.connections))),
            "If it does not connect again in each process, give @hetero.dataset the argument fork_built=False"
            if is_spec
            else "If it does not connect again in each process, return it from a function with "
            "@hetero.dataset(fork_built=False)",
        )

    def _note_prefetched(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Record how many batches will wait for the trainer at once. Return the same requests.

        A worker compares this number of batches with the size of shared memory.
        """
        options = self._options
        if not options.num_workers:
            return requests
        # Take the requests that torch is about to take anyway. torch's default of the prefetch factor is 2.
        first = list(itertools.islice(requests, options.num_workers * (options.prefetch_factor or 2)))
        # With pinned memory, a thread takes each batch out of shared memory as soon as it arrives.
        self._dataset.num_prefetched = min(len(first), 1) if options.pin_memory else len(first)
        return itertools.chain(first, requests)

    def _loader(self, sampler: _RequestSampler, *, persistent: bool) -> torch.utils.data.DataLoader[Any]:
        """Return torch's loader for the requests. Check what its workers will read, if there are workers."""
        options = self._options
        if options.num_workers and _forks(options):
            # Build the data set once, to share it with the forked workers. Warn only after this, because the warning
            # names the connections that the build opened.
            if self._dataset.may_be_shared:
                _ = self._dataset.built
            self._warn_of_connections()
        elif options.num_workers and _compares_globals():
            # Workers import the script anew. Each compares the globals that it finds with those of this process.
            self._dataset.globals = self._dataset.globals_reader().read()
        # Persistent workers outlive a pass. So may the workers of a registered data set, whose next epoch they begin
        # early (`LocalBatches.may_be_kept`).
        workers_outlive_pass = persistent or isinstance(self._dataset.subject, DatasetSpec)
        if options.num_workers and _compares_globals() and workers_outlive_pass:
            # Workers that began before a change of these values are not used again. Without this, persistent workers
            # used the global values, the collate_fn and the epoch of the first pass for ever. Compute the digests after
            # the build, because it may change globals too, and the workers have the changed ones.
            digests = self._dataset.digests()
            if digests != self._digests:
                self._persistent = None
            self._digests = digests
        return torch.utils.data.DataLoader(
            self._dataset,  # type: ignore[arg-type]
            # With None, torch passes each request to the data set unchanged, and does not make batches itself.
            batch_size=None,
            sampler=sampler,
            num_workers=options.num_workers,
            # torch's default would convert NumPy arrays in the batch to tensors.
            collate_fn=_as_it_is,
            pin_memory=options.pin_memory,
            # torch asserts that the timeout is 0 without workers.
            timeout=options.timeout if options.num_workers else 0,
            worker_init_fn=self._dataset.start_own_worker if options.num_workers else None,
            multiprocessing_context=options.multiprocessing_context,
            # Without this generator, torch would draw a base seed from the script's generator.
            generator=torch.Generator(),
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            persistent_workers=persistent,
        )


class LocalBatches(Iterator[Any]):
    """The batches of one pass, in order. After a batch that raised, `next` returns the following batch.

    Workers are started and requests are consumed only when the first batch is requested.

    Args:
        fetcher: Starts and ends the workers.
        requests: The batches to fetch. The caller reports each batch to this object before it asks for the next one.
    """

    def __init__(self, fetcher: LocalFetcher, requests: EpochRequests) -> None:
        self._fetcher = fetcher
        self._requests = requests
        self._plan = _Plan(requests)
        self._sampler: _RequestSampler | None = None
        self._answers: Iterator[Any] | None = None
        self.is_open = True
        """Whether another batch may come."""
        self._shared_bytes: int | None = None
        """Bytes of the first batch in shared memory. None until that batch has arrived."""
        self.request: BatchRequest | None = None
        """Request of the batch that `next` returned or raised an exception for."""

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived.

        Raises:
            StopIteration: At the end, and after `close`.
            DatasetError: If the user's code raised for this batch.
            ResourcesError: If shared memory is too small for the batches that workers have ready.
            DatasetMismatchError: If a global has another value in the worker than here.
        """
        if not self.is_open:
            raise StopIteration
        failure: Exception
        is_of_sampler = False  # whether the sampler raised instead of yielding a batch
        # Get the worker's answer. The failure of one batch is stored in `failure`. Other exceptions close the pass.
        try:
            if self._answers is None:
                self._sampler, self._answers = self._fetcher.begin(iter(self._plan))
            try:
                # Until the first batch has come, log a warning if the wait is long, because forked workers may hang.
                with self._fetcher.watched() if self._shared_bytes is None else nullcontext():
                    answer = next(self._answers)
            except DatasetError as error:
                # Only a loader without workers raises this error here. It has only one request in flight.
                self.request = self._requests.in_flight[0]
                failure = error
            except StopIteration:
                if self._plan.failure is None:
                    raise
                # Do not keep the exception, because its traceback holds the script's frames.
                failure, self._plan.failure = self._plan.failure, None
                self.request = None
                is_of_sampler = True
            else:
                # torch takes further requests before it delivers, and delivers in order.
                self.request = self._requests.in_flight[0]
                if not isinstance(answer.content, Failure):
                    if self._shared_bytes is None:
                        self._shared_bytes, _ = shared_bytes(answer.content)
                    return self._fetcher.unwrap(answer)
                failure = _error_of_batch(answer.content)
        except BaseException as error:
            self.close()
            # torch raises a RuntimeError if it lost a worker. The worker may have ended because the job must stop.
            if isinstance(error, RuntimeError):
                control.end_if_stopping()
            raise
        # If the sampler or the data set's factory has raised, no batch of this pass can come. Close the pass then.
        # Otherwise, the factory would run again for every batch, and the epoch would end as if it were complete.
        stage = getattr(getattr(failure, "record", None), "stage", "")
        if is_of_sampler or stage in ("build", "describe"):
            self.close()
        try:
            raise failure from failure.__cause__
        finally:
            del failure  # its traceback holds this frame and the script's frames

    @property
    def may_be_kept(self) -> bool:
        """Whether the workers may go on making batches between two passes.

        False if the ready batches would fill the free shared memory, because other loaders need it in the meantime.
        False also if a global that the data set's code reads has changed, because workers that are started anew would
        see the change.
        """
        return self._fetcher.may_keep_workers(self._shared_bytes or 0)

    def close(self) -> None:
        """End the workers, or keep persistent ones for the next pass. Idempotent."""
        self.is_open = False
        # torch ends its workers when its iterator is dropped, unless the workers are persistent.
        self._answers = None
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            sampler.is_used = False

    def __del__(self) -> None:
        self.close()


class _Plan:
    """The requests of a pass. torch's loader consumes them before their batches are delivered.

    An exception of the user's sampler is kept until all earlier batches are delivered. This class is separate from
    `LocalBatches` because torch's iterator holds it and must not hold the pass.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[BatchRequest]:
        try:
            yield from self._requests
        except Exception as error:  # noqa: BLE001 - the user's sampler may raise anything
            self.failure = error


class _RequestSampler:
    """Sampler of torch's loader that yields the requests of the current pass."""

    def __init__(self) -> None:
        self.requests: Iterator[BatchRequest] = iter(())
        self.is_used = False
        """Whether a pass takes requests from this sampler. Another pass then needs another sampler."""

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.requests


def _error_of_batch(failure: Failure) -> DatasetError:
    """Return the error of one batch.

    Raises:
        HeteroError: If the failure does not concern one batch, for example if shared memory is full.
    """
    error = failure.kind(failure.record)
    if not isinstance(error, DatasetError):
        raise error
    return error


@contextmanager
def _workers_survive_sigterm() -> Iterator[None]:
    """Let workers that are started in the context survive one SIGTERM, and kill them at exit.

    A platform such as Slurm may send SIGTERM to every process of a job that has to stop. The ranks still train to the
    end of a step and need their workers for it. All this is done only if the environment has HETERO_SHIELD, which
    launchers set. The kill is needed because multiprocessing sends one SIGTERM to each worker at exit, and then waits
    for the worker's end without a limit.
    """
    before = multiprocessing.active_children()
    try:
        with sigterm_blocked_in_children():
            yield
    finally:  # also if torch could not start all workers
        # Without HETERO_SHIELD, workers end at the first SIGTERM, so they need not be killed.
        for process in multiprocessing.active_children() if SHIELD_VARIABLE in os.environ else ():
            # torch's workers are daemons, and multiprocessing sends SIGTERM to daemons only.
            if process.daemon and process not in before:
                # A finalizer and not `atexit`, because a process that multiprocessing has started runs only finalizers.
                # With a priority of at least 0, the finalizer runs before multiprocessing waits for the workers.
                Finalize(process, _kill_at_exit, (weakref.ref(process),), exitpriority=0)


def _kill_at_exit(worker: weakref.ref[BaseProcess]) -> None:
    """Kill a worker that still runs when this process ends."""
    process = worker()
    # None if the worker has ended, and its object is freed.
    if process is not None:
        # Remove torch's handler, which raises if a worker was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # SIGKILL, because a worker ignores the first SIGTERM, and a second one is lost while it runs native code.
        process.kill()


def accelerator_is_available() -> bool:
    """Return whether there is a device to pin memory for."""
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    return bool(torch.cuda.is_available() if accelerator is None else accelerator.is_available())


def builds_here(dataset: LocalDataset, options: WorkerOptions) -> bool:
    """Return whether this process builds the data set, to fetch from it or to fork workers with it."""
    return not options.num_workers or (_forks(options) and dataset.may_be_shared)


def _compares_globals() -> bool:
    """Return whether to compare globals between this process and workers. ``--purity-checks 0`` turns this off."""
    session = control.current()
    return session is None or session.options.purity_checks > 0


def _forks(options: WorkerOptions) -> bool:
    """Return whether workers are forks of this process."""
    context = options.multiprocessing_context
    if context is None or isinstance(context, str):
        context = torch.multiprocessing.get_context(context)
    return bool(context.get_start_method() == "fork")


def _as_it_is(batch: Any) -> Any:
    return batch
