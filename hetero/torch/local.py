"""Local fetching. The same pure function computes batches in this process or in torch's own worker processes."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple

import torch
import torch.utils.data

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.batches.globals import GlobalsReader, GlobalValue, check_globals
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators, single_threaded
from hetero.batches.skips import Skips
from hetero.batches.structure import type_name
from hetero.control.rank import session as control
from hetero.datasets import build, get_factory, note_length
from hetero.errors import DatasetError, DatasetMismatchError, ResourcesError
from hetero.spec import DatasetSpec
from hetero.torch.copies import copy_leaves
from hetero.torch.shared_memory import used_up, want_of_room
from hetero.wire.framing import why_unsendable

__all__ = ["LocalDataset", "LocalFetcher", "WorkerOptions", "accelerator_is_available", "builds_here", "has_same_code"]

logger = logging.getLogger(__name__)


class LocalDataset:
    """A data set that answers requests on this host. It is sent to torch's workers.

    Args:
        subject: A spec, which is built in each process that needs it, or the user's own data set object.
        collate_fn: Replaces the factory's function if not None.
        worker_init_fn: Replaces the factory's function if not None.
    """

    def __init__(
        self,
        subject: Any,
        *,
        collate_fn: Callable[[Any], Any] | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
    ) -> None:
        self.subject = subject
        self._collate_fn = collate_fn
        self._worker_init_fn = worker_init_fn
        self._start_failure: _Failure | _Mismatch | None = None
        self.globals: dict[str, GlobalValue] = {}
        """Globals that the data set's code reads, as the process that starts the workers has them. Set only for workers
        that import the script anew."""
        self.num_ahead = 0
        """Batches that torch's workers have ready at once. 0 if a worker need not check whether they fit."""

    def __len__(self) -> int:
        """Return the length of the data set built here, or else the length that its spec gives.

        Raises:
            TypeError: If the data set does not have a length.
        """
        is_built = isinstance(self.subject, DatasetSpec) and "built" in self.__dict__
        return len(self.built if is_built else self.subject)

    @functools.cached_property
    def built(self) -> BuiltDataset:
        """The data set, built on first use in this process."""
        if not isinstance(self.subject, DatasetSpec):
            return BuiltDataset.from_object(self.subject, collate_fn=self._collate_fn)
        built = build(self.subject)
        built.log_warnings()
        with suppress(Exception):  # the user's __len__ raises again where the length is needed
            note_length(self.subject, len(built))
        if self._collate_fn is not None:
            built.collate_fn = self._collate_fn
        return built

    def start_worker(self, worker_index: int) -> None:
        """Make this torch worker process a worker of the data set, too.

        Raises:
            DatasetError: If the factory or ``worker_init_fn`` raises.
        """
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.built.become_worker(worker_index, info.num_workers, worker_init_fn=self._worker_init_fn)

    def start_own_worker(self, worker_index: int) -> None:
        """Do the same as `start_worker` for `LocalFetcher`. A failure is kept and returned for every batch."""
        try:
            if self.globals:  # compared before the data set's code runs, because that may fill caches
                reader, name, there = (
                    self.globals_reader(),
                    type_name(type(self.subject)),
                    f"loader worker {worker_index}",
                )
                name = self.subject.name if isinstance(self.subject, DatasetSpec) else name
                check_globals(reader, self.globals, reader.digests(), dataset=name, there=there)
            self.start_worker(worker_index)
        except DatasetError as exc:
            self._start_failure = _Failure(exc.record)
        except DatasetMismatchError as exc:
            self._start_failure = _Mismatch(str(exc))

    def globals_reader(self) -> GlobalsReader:
        """Return a reader of the globals that the data set's code uses in this process."""
        root = get_factory(self.subject.name) if isinstance(self.subject, DatasetSpec) else self.subject
        return GlobalsReader(root, self._collate_fn, self._worker_init_fn)

    def fetch(self, request: BatchRequest, *, on_skips: Callable[[Skips], object] | None = None) -> Any:
        """Compute a batch, and leave the generators and the thread count of this process as they were.

        The batch does not share memory with the data set, as if it had come from another process. Writing to the batch
        does not change the data set. The batch does not change when the data set reuses its buffers.

        Raises:
            DatasetError: If the user's code raises.
        """
        with preserved_generators(), single_threaded():
            return self._fetch_own(request, on_skips)

    def __getitem__(self, request: BatchRequest) -> Any:
        """Compute a batch for torch's loader.

        A worker returns a failure instead of raising it, because torch would reduce a raised exception to a string.
        """
        told: list[Skips] = []
        info = torch.utils.data.get_worker_info()
        if info is None:
            batch = self.fetch(request, on_skips=told.append)
            return _WithSkips(batch, told[0]) if told else batch
        if self._start_failure is not None:
            return self._start_failure
        try:
            # A worker copies, too: torch sends from another thread, and sends tensors by sharing their memory.
            batch = self._fetch_own(request, told.append)
        except DatasetError as exc:
            want = used_up(str(exc))
            return _Failure(exc.record) if want is None else _NoRoom(want)
        want = want_of_room(batch, self.num_ahead, info.num_workers)
        self.num_ahead = 0  # checking one batch is enough
        if want is not None:
            return _NoRoom(want)
        return _WithSkips(batch, told[0]) if told else batch

    def _fetch_own(self, request: BatchRequest, on_skips: Callable[[Skips], object] | None) -> Any:
        batch = fetch(self.built, request, on_skips=on_skips)
        if self.built.warnings and not self.built.worker_index:
            self.built.log_warnings()  # the first batch may have added some
        return batch if self.built.makes_new_memory(collate=request.collate) else copy_leaves(batch)

    def warn_if_only_local(self, batch: Any) -> None:
        """Log a warning if a data host could not send a batch of this registered data set."""
        if isinstance(self.subject, DatasetSpec) and (reason := why_unsendable(batch)) is not None:
            logger.warning("data set %s: its batches cannot come from data hosts: %s", self.subject, reason)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("built", None)
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of torch's own loader, with the same meanings."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout: float = 0.0
    """Seconds to wait for a worker. 0 waits without a limit."""
    multiprocessing_context: BaseContext | str | None = None


class LocalFetcher:
    """Fetcher that uses the processes, pinning and timeout of ``torch.utils.data.DataLoader``.

    Args:
        dataset: Answers the requests.
        options: Options of torch's loader.
        on_skips: Called with the skipped samples of a batch just before that batch is delivered.
    """

    def __init__(
        self,
        dataset: LocalDataset,
        options: WorkerOptions,
        *,
        on_skips: Callable[[Skips], object],
    ) -> None:
        self._dataset = dataset
        self._on_skips = on_skips
        self._options = options
        self._persistent: torch.utils.data.DataLoader[Any] | None = None
        self._slot = _Slot()
        self._is_checked = False

    def open(self, requests: Iterator[BatchRequest]) -> LocalBatches:
        """Return the batches of ``requests`` in order. Closing the iterator ends or frees the workers.

        Workers are started, and requests consumed, only when the first batch is requested.
        """
        return LocalBatches(self, requests)

    def begin(self, requests: Iterator[BatchRequest]) -> tuple[_Slot, Iterator[Any]]:
        """Start to fetch ``requests``. Return the slot to free at the end, and torch's iterator."""
        if self._options.persistent_workers and not self._slot.taken:
            slot = self._slot
            if self._persistent is None:
                self._persistent = self._loader(slot, persistent=True)
            loader = self._persistent
        else:  # new workers: they are not persistent, or a living iterator uses the persistent ones
            slot = _Slot()
            loader = self._loader(slot, persistent=False)
        slot.taken = True
        try:
            slot.requests = self._look_ahead(requests)
            return slot, iter(loader)
        except BaseException:
            slot.taken = False
            raise

    def unwrap(self, answer: Any) -> Any:
        """Return the batch in a worker's answer.

        Raises:
            DatasetError: If more samples were skipped than are allowed.
            ResourcesError: If shared memory is too small.
            DatasetMismatchError: If a global has another value in the worker than here.
        """
        if isinstance(answer, _Mismatch):
            raise DatasetMismatchError(answer.text)
        if isinstance(answer, _NoRoom):
            raise ResourcesError(answer.text)
        batch = answer
        if type(answer) is _WithSkips:
            self._on_skips(answer.skips)
            batch = answer.batch
        if not self._is_checked:
            self._is_checked = True
            self._dataset.warn_if_only_local(batch)
        return batch

    def _look_ahead(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Record how many batches will wait for the trainer at once. Return the same requests."""
        options = self._options
        if not options.num_workers:
            return requests
        # torch is about to take this number of requests anyway.
        ahead = list(itertools.islice(requests, options.num_workers * (options.prefetch_factor or 2)))
        # With pinned memory, a thread takes each batch out of shared memory as soon as it arrives.
        self._dataset.num_ahead = min(len(ahead), 1) if options.pin_memory else len(ahead)
        return itertools.chain(ahead, requests)

    def _loader(self, slot: _Slot, *, persistent: bool) -> torch.utils.data.DataLoader[Any]:
        options = self._options
        if options.num_workers and _forks(options):
            _ = self._dataset.built  # built once, and shared with the forked workers
        elif options.num_workers and _compares_globals():
            self._dataset.globals = self._dataset.globals_reader().read()
        return torch.utils.data.DataLoader(
            self._dataset,  # type: ignore[arg-type]
            batch_size=None,
            sampler=slot,
            num_workers=options.num_workers,
            collate_fn=_as_it_is,
            pin_memory=options.pin_memory,
            timeout=options.timeout if options.num_workers else 0,
            worker_init_fn=self._dataset.start_own_worker if options.num_workers else None,
            multiprocessing_context=options.multiprocessing_context,
            # Without this generator torch would draw a base seed from the trainer's.
            generator=torch.Generator(),
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            persistent_workers=persistent,
        )


class LocalBatches(Iterator[Any]):
    """The batches of one pass, in order. A batch that raised is followed by the next batch.

    Args:
        fetcher: Starts and ends the workers.
        requests: The batches to fetch.
    """

    def __init__(self, fetcher: LocalFetcher, requests: Iterator[BatchRequest]) -> None:
        self._fetcher = fetcher
        self._plan = _Plan(requests)
        self._slot: _Slot | None = None
        self._answers: Iterator[Any] | None = None
        self.is_open = True
        """Whether another batch may come."""

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived.

        Raises:
            StopIteration: At the end, and after `close`.
            DatasetError: If the user's code raised for this batch.
            ResourcesError: If shared memory is too small for the batches that workers have ready.
        """
        if not self.is_open:
            raise StopIteration
        failure: Exception
        is_planned = True  # False if the sampler raised before it gave a batch
        # Get the worker's answer. A failure of one batch ends up in `failure`, any other exception closes the pass.
        try:
            if self._answers is None:
                self._slot, self._answers = self._fetcher.begin(iter(self._plan))
            try:
                answer = next(self._answers)
            except DatasetError as error:  # without workers
                failure = error
            except StopIteration:
                if self._plan.failure is None:
                    raise
                failure, self._plan.failure = self._plan.failure, None
                is_planned = False
            else:
                if not isinstance(answer, _Failure):
                    return self._fetcher.unwrap(answer)
                failure = DatasetError(answer.record)
        except BaseException:
            self.close()
            raise
        # Raise the failure. It ends the pass if it concerns the sampler or the whole data set.
        stage = getattr(getattr(failure, "record", None), "stage", "")
        if not is_planned or stage in ("build", "describe"):
            self.close()
        try:
            raise failure from failure.__cause__
        finally:
            del failure  # its traceback holds this frame, and the script's

    def close(self) -> None:
        """End the workers, or free them for the next pass. Idempotent."""
        self.is_open = False
        self._answers = None
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.taken = False

    def __del__(self) -> None:
        self.close()


class _Plan:
    """The requests of a pass. An exception in planning is kept until its turn comes, because torch requests ahead.

    This class is separate from `LocalBatches` because torch's iterator holds it and must not hold the pass.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[BatchRequest]:
        try:
            yield from self._requests
        except Exception as error:  # noqa: BLE001 - the user's sampler may raise anything
            self.failure = error


class _Slot:
    """The requests of the current pass, passed to torch's loader as its sampler."""

    def __init__(self) -> None:
        self.requests: Iterator[BatchRequest] = iter(())
        self.taken = False

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.requests


@dataclass(frozen=True, slots=True)
class _Failure:
    """A `DatasetError` on its way from a worker. torch would reduce the exception itself to one string."""

    record: object


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """A worker's report that its data set differs from the one here."""

    text: str


@dataclass(frozen=True, slots=True)
class _NoRoom:
    """A worker's report that batches do not fit into shared memory."""

    text: str


class _WithSkips(NamedTuple):
    """A batch with substituted samples. It is a tuple because torch looks for tensors to pin inside tuples."""

    batch: Any
    skips: Skips


def accelerator_is_available() -> bool:
    """Return whether there is a device to pin memory for."""
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    return bool(torch.cuda.is_available() if accelerator is None else accelerator.is_available())


def builds_here(options: WorkerOptions) -> bool:
    """Return whether this process builds the data set, to fetch from it or to fork workers with it."""
    return not options.num_workers or _forks(options)


def _compares_globals() -> bool:
    session = control.current()
    return session is None or session.options.purity_checks > 0


def _forks(options: WorkerOptions) -> bool:
    context = options.multiprocessing_context
    if context is None or isinstance(context, str):
        context = torch.multiprocessing.get_context(context)
    return bool(context.get_start_method() == "fork")


def _as_it_is(batch: Any) -> Any:
    return batch


def has_same_code(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Return whether two functions are the same, or are the same line of a script imported under two names."""
    if one is other:
        return True
    if not (inspect.isfunction(one) and inspect.isfunction(other)):
        return False
    first, second = one.__code__, other.__code__
    return (first.co_filename, first.co_firstlineno, one.__qualname__) == (
        second.co_filename,
        second.co_firstlineno,
        other.__qualname__,
    )
