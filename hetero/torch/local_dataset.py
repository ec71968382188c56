"""A data set that answers the requests of its loader in this process or in torch's workers."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch.utils.data

from hetero.batches.build import BuiltDataset
from hetero.batches.fetch import fetch
from hetero.batches.purity.globals import GlobalsReader, GlobalValue, check_globals
from hetero.batches.purity.values import plain_digest
from hetero.batches.request import BatchRequest
from hetero.batches.seeds import preserved_generators, single_threaded
from hetero.batches.skips import Skips
from hetero.batches.structure.conversion import type_name
from hetero.datasets import build, get_factory, note_length
from hetero.errors import DatasetError, DatasetMismatchError, HeteroError, ResourcesError
from hetero.metrics.reading import take_shard_waits_s
from hetero.spec import DatasetSpec
from hetero.system.open_files import has_path, open_files, opened_since, reopen_files
from hetero.system.stop_signals import survive_first_sigterm
from hetero.torch.leaf_copies import copy_leaves
from hetero.torch.shared_memory import why_full, why_too_small
from hetero.wire.framing import why_unsendable

__all__ = ["Answer", "Failure", "LocalDataset"]

logger = logging.getLogger(__name__)


class LocalDataset:
    """A data set that answers requests on this host. torch's workers get a copy of this object.

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
        self._start_failure: Failure | None = None
        self.globals: dict[str, GlobalValue] = {}
        """Values of the globals that the data set's code reads, from the process that starts the workers. Set only for
        workers that import the script anew."""
        self.connections: set[str] = set()
        """Names of connections and pipes that the data set's code opened in this process."""
        self._files: dict[int, str] = {}
        """Files that the data set's code opened in this process, by descriptor."""
        self._inherited: BuiltDataset | None = None
        """The data set of the process that forked this one. Set if this process has built its own data set. The object
        is kept, because freeing it may close connections of the parent process."""
        self.num_prefetched = 0
        """Batches that torch's workers keep ready. 0 if a worker need not check whether they fit into shared memory."""

    @property
    def name(self) -> str:
        """Registered name, or the class of an object."""
        return self.subject.name if isinstance(self.subject, DatasetSpec) else type_name(type(self.subject))

    @property
    def is_constant(self) -> bool:
        """Whether workers for the next epoch would compute the same batches as present workers, if no global changes.

        False if the script may change the data set, ``collate_fn`` or ``worker_init_fn`` between two epochs. It may
        change a data set object (a spec is constant), a callable object, and the variables of a function's enclosing
        function.
        """
        functions = [each for each in (self._collate_fn, self._worker_init_fn) if each is not None]
        is_plain = all(isinstance(each, FunctionType) and not each.__closure__ for each in functions)
        return isinstance(self.subject, DatasetSpec) and is_plain

    def __len__(self) -> int:
        """Return the length of the data set built here, or else the length that its spec gives.

        Raises:
            TypeError: If the data set does not have a length.
        """
        # `built` is a cached property, which is in the dictionary after its first use. Do not build here,
        # because the spec may ask another process for the length.
        is_built = isinstance(self.subject, DatasetSpec) and "built" in self.__dict__
        return len(self.built if is_built else self.subject)

    @functools.cached_property
    def built(self) -> BuiltDataset:
        """The data set, built on first use in this process."""
        if not isinstance(self.subject, DatasetSpec):
            return BuiltDataset.from_object(self.subject, collate_fn=self._collate_fn)
        with self.noting_files():
            built = build(self.subject)
            with suppress(Exception):  # the user's __len__ raises again where the length is needed
                note_length(self.subject, len(built))
        info = torch.utils.data.get_worker_info()
        # In workers, log the warnings only in the first one.
        if info is None or not info.id:
            built.log_warnings()
        if self._collate_fn is not None:
            built.collate_fn = self._collate_fn
        return built

    @contextmanager
    def noting_files(self) -> Iterator[None]:
        """Return a context for the data set's code. Record the files and connections that this code opens."""
        before = open_files()
        try:
            yield
        finally:
            # A new descriptor without a path is a connection or a pipe. The code may have dropped it in a circle of
            # references, so let the garbage collector close it before it is recorded.
            if not all(map(has_path, opened_since(before).values())):
                gc.collect()
            opened = opened_since(before)
            # Leave out the pipe of each child process, which is never read.
            for process in multiprocessing.active_children():
                opened.pop(process.sentinel, None)
            self._files |= {descriptor: name for descriptor, name in opened.items() if has_path(name)}
            self.connections |= {name for name in opened.values() if not has_path(name)}

    @property
    def may_be_shared(self) -> bool:
        """Whether this process may build the data set before it forks workers."""
        return not isinstance(self.subject, DatasetSpec) or get_factory(self.subject.name).fork_built

    def start_worker(self, worker_index: int) -> None:
        """Provide worker info to the data set in this worker process of torch, and call ``worker_init_fn``.

        A forked worker uses the data set of the process that forked it, unless the data set must not be shared.

        Raises:
            DatasetError: If the factory or ``worker_init_fn`` raises.
        """
        # Ignore the first SIGTERM, because torchrun sends it to the whole process group of a rank. Without this
        # call, the workers ended, and the job lost its last checkpoint.
        survive_first_sigterm()
        info = torch.utils.data.get_worker_info()
        assert info is not None
        # This process has not built anything yet. So a built data set comes from the process that forked this one.
        is_inherited = isinstance(self.subject, DatasetSpec) and "built" in self.__dict__
        if is_inherited and not self.may_be_shared:
            # fork_built=False promises that each process builds its own data set.
            self._inherited = self.__dict__.pop("built")
        self.built.become_worker(worker_index, info.num_workers, worker_init_fn=self._worker_init_fn)

    def start_own_worker(self, worker_index: int) -> None:
        """Compare the globals, and call `start_worker`. If this fails, answer every later request with the failure."""
        # Open the files again, because forked processes share the position in a file. In a test, 2,099 of 40,000
        # samples were wrong.
        reopen_files(self._files)
        take_shard_waits_s()  # of the process that forked this one
        try:
            # Compare the globals before the data set's code runs, because that code may fill caches.
            if self.globals:
                reader, there = self.globals_reader(), f"loader worker {worker_index}"
                check_globals(reader, self.globals, reader.digests(), dataset=self.name, there=there)
            self.start_worker(worker_index)
        except DatasetError as exc:
            self._start_failure = Failure(DatasetError, exc.record)
        except DatasetMismatchError as exc:
            self._start_failure = Failure(DatasetMismatchError, exc.record)

    def globals_reader(self) -> GlobalsReader:
        """Return a reader of the globals that the data set's code uses in this process."""
        root = get_factory(self.subject.name) if isinstance(self.subject, DatasetSpec) else self.subject
        return GlobalsReader(root, self._collate_fn, self._worker_init_fn)

    def digests(self) -> dict[str, str]:
        """Return digests of what the script may change while workers run: globals, and attributes of a data set object.

        Attributes that the object's own code sets, for example in ``set_epoch``, count too. The object makes no samples
        in this process, so only the script can have caused such a change.
        """
        attributes = {} if isinstance(self.subject, DatasetSpec) else getattr(self.subject, "__dict__", {})
        # If an attribute is large or not plain, such as a transform, only its identity counts.
        held = {f".{name}": plain_digest(value) or str(id(value)) for name, value in attributes.items()}
        # For an object with 50,000 samples this takes 0.2 s, once in an epoch.
        return self.globals_reader().digests() | held

    def fetch(self, request: BatchRequest, *, on_skips: Callable[[Skips], object] | None = None) -> Any:
        """Compute a batch, and leave the generators and the thread count of this process as they were.

        The batch does not share memory with the data set, as if it had come from another process. Writing to the batch
        does not change the data set. The batch does not change when the data set reuses its buffers.

        Raises:
            DatasetError: If the user's code raises.
        """
        with preserved_generators(), single_threaded():
            return self._fetch_own(request, on_skips)

    def __getitem__(self, request: BatchRequest) -> Answer:
        """Answer a request of torch's loader.

        A worker returns a failure instead of raising it, because torch would reduce a raised exception to a string.
        """
        skips: list[Skips] = []
        info = torch.utils.data.get_worker_info()
        if info is None:
            content = self.fetch(request, on_skips=skips.append)
        else:
            content = self._answer_in_worker(request, info.num_workers, skips.append)
        return Answer(content, skips[0] if skips else None, take_shard_waits_s())

    def _answer_in_worker(self, request: BatchRequest, num_workers: int, on_skips: Callable[[Skips], object]) -> Any:
        """Return the batch, or the failure that prevents it: the worker's start, a sample or shared memory."""
        if self._start_failure is not None:
            return self._start_failure
        try:
            # A worker needs the copy that `_fetch_own` makes. torch sends the batch from another thread, and moves the
            # memory of its tensors into shared memory.
            batch = self._fetch_own(request, on_skips)
        except DatasetError as exc:
            # torch's collation makes tensors in shared memory. If that was full, the user's code is not to blame.
            reason = why_full(str(exc))
            return Failure(DatasetError, exc.record) if reason is None else Failure(ResourcesError, reason)
        reason = why_too_small(batch, self.num_prefetched, num_workers)
        self.num_prefetched = 0  # checking one batch is enough
        return batch if reason is None else Failure(ResourcesError, reason)

    def _fetch_own(self, request: BatchRequest, on_skips: Callable[[Skips], object] | None) -> Any:
        """Compute a batch that shares no memory with the data set."""
        batch = fetch(self.built, request, on_skips=on_skips)
        # The first batch may have added warnings. In workers, log them only in the first one. The index is 0 there, and
        # also without workers.
        if self.built.warnings and not self.built.worker_index:
            self.built.log_warnings()
        # torch's own collation makes new tensors, so only other batches are copied.
        return batch if self.built.makes_new_memory(collate=request.collate) else copy_leaves(batch)

    def warn_if_only_local(self, batch: Any) -> None:
        """Log a warning if a data host could not send a batch of this registered data set."""
        if isinstance(self.subject, DatasetSpec) and (reason := why_unsendable(batch)) is not None:
            logger.warning("data set %s: its batches cannot come from data hosts: %s", self.subject, reason)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # A new process builds the data set itself. Descriptors of this process have no meaning in another process.
        state.pop("built", None)
        state["connections"], state["_files"] = set(), {}
        return state


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way from a worker. torch would reduce the exception itself to one string."""

    kind: type[HeteroError]
    record: Any


class Answer(NamedTuple):
    """The answer to a request. It is a tuple because torch looks for tensors to pin inside tuples."""

    content: Any
    """The batch, or the failure that prevents it."""
    skips: Skips | None
    """The samples of the batch that were replaced by others."""
    shard_waits_s: dict[str, float]
    """Seconds that this process has waited for shards since its last answer, by path or URL."""
