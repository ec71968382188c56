"""Local fetching: the same pure function in this process or in torch's own worker processes."""

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
    """A data set that answers requests here; it travels to torch's workers.

    Args:
        subject: A spec, built where it is needed, or the user's own data set object.
        collate_fn: Instead of the factory's, if not None.
        worker_init_fn: Instead of the factory's, if not None.
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
        """Those that the data set's code reads, in the process that starts workers which import the script anew."""
        self.num_ahead = 0
        """Batches that torch's workers have ready at once; 0 where a worker need not look whether they fit."""

    def __len__(self) -> int:
        """Return the length of the data set: of the one built here, or else what its spec says.

        Raises:
            TypeError: If it has none.
        """
        is_built = isinstance(self.subject, DatasetSpec) and "built" in self.__dict__
        return len(self.built if is_built else self.subject)

    @functools.cached_property
    def built(self) -> BuiltDataset:
        """The data set, built at the first use in this process."""
        if not isinstance(self.subject, DatasetSpec):
            return BuiltDataset.from_object(self.subject, collate_fn=self._collate_fn)
        built = build(self.subject)
        built.log_warnings()
        with suppress(Exception):  # of the user's, and raised again where the length is needed
            note_length(self.subject, len(built))
        if self._collate_fn is not None:
            built.collate_fn = self._collate_fn
        return built

    def start_worker(self, worker_index: int) -> None:
        """Make this process, one of torch's workers, a worker of the data set too.

        Raises:
            DatasetError: If the factory or ``worker_init_fn`` raises.
        """
        info = torch.utils.data.get_worker_info()
        assert info is not None
        self.built.become_worker(worker_index, info.num_workers, worker_init_fn=self._worker_init_fn)

    def start_own_worker(self, worker_index: int) -> None:
        """Do the same for `LocalFetcher`; a failure is kept, to be returned for every batch."""
        try:
            if self.globals:  # before any code of the data set runs, which may fill caches
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
        """Return what reads the globals that the data set's code reads in this process."""
        root = get_factory(self.subject.name) if isinstance(self.subject, DatasetSpec) else self.subject
        return GlobalsReader(root, self._collate_fn, self._worker_init_fn)

    def fetch(self, request: BatchRequest, *, on_skips: Callable[[Skips], object] | None = None) -> Any:
        """Compute a batch; leave the generators and the thread count of this process as they were.

        Its tensors and arrays are its own, as if it had come from another process: one written to is not the
        data set's, and one that the data set fills again does not change.

        Raises:
            DatasetError: If the user's code raises.
        """
        with preserved_generators(), single_threaded():
            return self._fetch_own(request, on_skips)

    def __getitem__(self, request: BatchRequest) -> Any:
        """Compute a batch for torch's loader; in a worker a failure is returned, to be raised whole."""
        told: list[Skips] = []
        info = torch.utils.data.get_worker_info()
        if info is None:
            batch = self.fetch(request, on_skips=told.append)
            return _WithSkips(batch, told[0]) if told else batch
        if self._start_failure is not None:
            return self._start_failure
        try:
            # In a worker too: torch sends from another thread, and tensors by sharing their memory.
            batch = self._fetch_own(request, told.append)
        except DatasetError as exc:
            want = used_up(str(exc))
            return _Failure(exc.record) if want is None else _NoRoom(want)
        want = want_of_room(batch, self.num_ahead, info.num_workers)
        self.num_ahead = 0  # one batch tells
        if want is not None:
            return _NoRoom(want)
        return _WithSkips(batch, told[0]) if told else batch

    def _fetch_own(self, request: BatchRequest, on_skips: Callable[[Skips], object] | None) -> Any:
        batch = fetch(self.built, request, on_skips=on_skips)
        if self.built.warnings and not self.built.worker_index:
            self.built.log_warnings()  # of what the first batch has shown
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
    """What torch's own loader is asked for; its meanings."""

    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    timeout: float = 0.0
    """Seconds, 0: none."""
    multiprocessing_context: BaseContext | str | None = None


class LocalFetcher:
    """Fetches through ``torch.utils.data.DataLoader``: its processes, pinning and timeout.

    Args:
        dataset: Answers the requests.
        options: For torch's loader.
        on_skips: Given the samples of a batch that others stand in for, just before that batch is delivered.
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
        """Return the batches of ``requests`` in order; closing the iterator ends or frees the workers.

        Nothing is started, or taken, before the first batch is asked for.
        """
        return LocalBatches(self, requests)

    def begin(self, requests: Iterator[BatchRequest]) -> tuple[_Slot, Iterator[Any]]:
        """Start on ``requests``: return what is to be freed at the end, and torch's iterator."""
        if self._options.persistent_workers and not self._slot.taken:
            slot = self._slot
            if self._persistent is None:
                self._persistent = self._loader(slot, persistent=True)
            loader = self._persistent
        else:  # workers of its own for a second iterator beside a living one
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
        """Return the batch in what a worker sent.

        Raises:
            DatasetError: More samples were skipped than are allowed.
            ResourcesError: Shared memory is too small.
            DatasetMismatchError: A global has another value in the worker than here.
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
        """Note how many batches will wait for the trainer at once; return the same requests."""
        options = self._options
        if not options.num_workers:
            return requests
        # As many as torch is about to take anyway.
        ahead = list(itertools.islice(requests, options.num_workers * (options.prefetch_factor or 2)))
        # Where memory is pinned, a thread takes each batch out of shared memory as soon as it comes.
        self._dataset.num_ahead = min(len(ahead), 1) if options.pin_memory else len(ahead)
        return itertools.chain(ahead, requests)

    def _loader(self, slot: _Slot, *, persistent: bool) -> torch.utils.data.DataLoader[Any]:
        options = self._options
        if options.num_workers and _forks(options):
            _ = self._dataset.built  # once, and shared with the workers
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
            # Its own: torch would draw a base seed from the trainer's.
            generator=torch.Generator(),
            prefetch_factor=options.prefetch_factor if options.num_workers else None,
            persistent_workers=persistent,
        )


class LocalBatches(Iterator[Any]):
    """The batches of one pass, in order. After one that raised comes the next one.

    Args:
        fetcher: Starts and ends the workers.
        requests: What to fetch.
    """

    def __init__(self, fetcher: LocalFetcher, requests: Iterator[BatchRequest]) -> None:
        self._fetcher = fetcher
        self._plan = _Plan(requests)
        self._slot: _Slot | None = None
        self._answers: Iterator[Any] | None = None
        self.is_open = True
        """Whether another batch may come."""

    def __next__(self) -> Any:
        """Return the next batch; blocks.

        Raises:
            StopIteration: At the end, and after `close`.
            DatasetError: The user's code raised for this batch.
            ResourcesError: Shared memory is too small for the batches that workers have ready.
        """
        if not self.is_open:
            raise StopIteration
        failure: Exception
        is_planned = True  # the batch that failed, if one did
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
        stage = getattr(getattr(failure, "record", None), "stage", "")
        if not is_planned or stage in ("build", "describe"):
            self.close()  # it is not one batch's
        try:
            raise failure from failure.__cause__
        finally:
            del failure  # its traceback holds this frame, and the script's

    def close(self) -> None:
        """End the workers, or free them for the next pass; idempotent."""
        self.is_open = False
        self._answers = None
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.taken = False

    def __del__(self) -> None:
        self.close()


class _Plan:
    """The requests of a pass. What planning them raises is kept until its turn comes, because torch asks ahead.

    Apart from `LocalBatches`: torch's iterator holds it, and must not hold the pass.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self.failure: Exception | None = None

    def __iter__(self) -> Iterator[BatchRequest]:
        try:
            yield from self._requests
        except Exception as error:  # noqa: BLE001 - the sampler's
            self.failure = error


class _Slot:
    """What torch's loader takes for its sampler: the requests of the current pass."""

    def __init__(self) -> None:
        self.requests: Iterator[BatchRequest] = iter(())
        self.taken = False

    def __iter__(self) -> Iterator[BatchRequest]:
        return self.requests


@dataclass(frozen=True, slots=True)
class _Failure:
    """A `DatasetError` on its way from a worker: torch would make one string of it."""

    record: object


@dataclass(frozen=True, slots=True)
class _Mismatch:
    """That the data set is another in a worker, on its way from there."""

    text: str


@dataclass(frozen=True, slots=True)
class _NoRoom:
    """That batches do not fit into shared memory, on its way from a worker."""

    text: str


class _WithSkips(NamedTuple):
    """A batch in which samples stand in for others; a tuple, so that torch finds what to pin in it."""

    batch: Any
    skips: Skips


def accelerator_is_available() -> bool:
    """Whether there is a device to pin memory for."""
    accelerator = getattr(torch, "accelerator", None)  # torch >= 2.6
    return bool(torch.cuda.is_available() if accelerator is None else accelerator.is_available())


def builds_here(options: WorkerOptions) -> bool:
    """Return whether this process builds the data set that it fetches from, or that its workers are forked with."""
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
    """Whether two functions are the same, or one line of a script that was imported under two names."""
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
