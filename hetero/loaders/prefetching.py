"""Requests that go on with the next epoch. Ranks then do not wait for the first batches of an epoch.

The next epoch is a pure function of the loader's options. Its first batches are therefore requested while the last
batches of this epoch are delivered. They arrive during a validation pass, for example. If the script then asks for
something else, they are discarded.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hetero.batches.request import BatchRequest
from hetero.loaders.sampling import PlannedBatch, Shard
from hetero.loaders.state import Start
from hetero.metrics.steps import Extent

__all__ = ["Batches", "EpochRequests", "Prefetched", "RequestedEpoch", "RequestingPipeline"]


class Batches(Protocol):
    """Batches in the order of their requests, fetched from endpoints or made on this host."""

    @property
    def request(self) -> BatchRequest | None:
        """Request of the batch that `next` returned or raised an exception for."""

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""

    @property
    def may_be_kept(self) -> bool:
        """Whether this object may stay open between two passes."""

    def __next__(self) -> Any:
        """Return the next batch. Block until it has arrived."""

    def close(self) -> None:
        """Discard the batches in flight. Idempotent."""


class RequestingPipeline(Protocol):
    """What `EpochRequests` needs of a `hetero.loaders.pipeline.LoaderPipeline`."""

    extent: Extent

    def shard(self) -> Shard:
        """Return this process's rank and world size."""

    def num_samples(self) -> int:
        """Return the samples of an epoch over all ranks."""

    def plan_selection(self, start: Start, selection: tuple[int, ...]) -> Iterator[PlannedBatch]:
        """Yield the batches of a selection, see `RequestedEpoch`, from a start on."""

    def request(self, planned: PlannedBatch, epoch: int, *, is_prefetch: bool = False) -> BatchRequest:
        """Return the request for a planned batch. ``is_prefetch``: whether the script has not asked for its epoch."""


@dataclass(slots=True)
class RequestedEpoch:
    """An epoch, or the rest of one, whose batches are being requested."""

    start: Start
    shard: Shard
    selection: tuple[int, ...] = ()
    """Numbers that say which batches of the epoch are requested, for a tool that takes every n-th batch. Their meaning
    is known to ``plan_selection`` only. Empty: all batches."""
    num_requested: int = 0
    num_passed: int = 0
    """Batches that were delivered or have raised."""
    is_complete: bool = False
    """Whether all batches of the epoch have been requested."""


class EpochRequests(Iterator[BatchRequest]):
    """The requests of a pass, and then the requests of the following epochs, without end.

    This object has only a weak reference to the pipeline, because the pipeline keeps the reader of these requests
    between two passes. Therefore a loader that the script drops is freed at once. Then the requests end.

    Args:
        pipeline: Plans the epochs.
        start: Start of the pass.
        planned: Batches of the pass.
        adds_next_epochs: Whether the requests of the next epochs follow. If not, each batch is planned only when it
            is requested, because a user's sampler may draw from the script's generators.
        selection: See `RequestedEpoch`. The pipeline's ``plan_selection`` gets it.
    """

    def __init__(
        self,
        pipeline: RequestingPipeline,
        start: Start,
        planned: Iterator[PlannedBatch],
        *,
        adds_next_epochs: bool,
        selection: tuple[int, ...] = (),
    ) -> None:
        # A weak reference, because a loader that the script drops must be freed at once.
        self._pipeline = weakref.ref(pipeline)
        self._extent = pipeline.extent
        self._adds_next_epochs = adds_next_epochs
        self._selection = selection
        """Which batches of each epoch are requested, see `RequestedEpoch`."""
        self.in_flight: deque[BatchRequest] = deque()
        """Requests whose batches were not delivered and have not raised, the oldest first."""
        self._planned_in_flight: deque[PlannedBatch] = deque()
        self.epochs: deque[RequestedEpoch] = deque()
        """The epoch that is being delivered, and later ones that have been requested in part."""
        self._planned: Iterator[PlannedBatch] = iter(())
        self._next: PlannedBatch | None = None
        """The batch to request next, if batches are planned one ahead. None at the end of an epoch."""
        self._has_ended = False
        self._begin(pipeline, start, planned)

    def __next__(self) -> BatchRequest:
        """Return the next request of the present epoch. With ``adds_next_epochs``, the requests of later epochs follow.

        Batches are then planned one ahead, to know whether the epoch has another batch.
        """
        pipeline = self._pipeline()
        # The script has dropped the loader, or the data set has become empty.
        if pipeline is None or self._has_ended:
            raise StopIteration
        if not self._adds_next_epochs:
            # At the end of the epoch, this raises StopIteration, which ends the requests.
            planned: PlannedBatch | None = next(self._planned)
        else:
            # All batches of the epoch were requested, so begin the next epoch. If it is empty, later ones are too.
            if self._next is None and not self._begin_next(pipeline):
                self._has_ended = True
                raise StopIteration
            planned = self._next
        assert planned is not None
        epoch = self.epochs[-1]
        # The first of `epochs` is being delivered. The script has not asked for a later one yet.
        request = pipeline.request(planned, epoch.start.number, is_prefetch=len(self.epochs) > 1)
        epoch.num_requested += 1
        self.in_flight.append(request)
        self._planned_in_flight.append(planned)
        self._extent.num_requested += 1
        # `hetero canary` refuses runs whose passes are too short for the number of batches in flight. With passes of 2
        # to 6 batches, and 8 in flight, a canary forecast 81 s for a job of 240 s.
        self._extent.max_in_flight = max(self._extent.max_in_flight, len(self.in_flight))
        if self._adds_next_epochs:
            self._plan_next()
        return request

    def passed(self) -> PlannedBatch:
        """Record that the oldest batch in flight was delivered, or has raised. Return its plan."""
        self.epochs[0].num_passed += 1
        self.in_flight.popleft()
        self._extent.num_passed += 1
        return self._planned_in_flight.popleft()

    def is_pass_over(self) -> bool:
        """Return whether all batches of the pass were delivered or have raised. False also if this is not known yet."""
        epoch = self.epochs[0]
        return epoch.is_complete and epoch.num_passed == epoch.num_requested

    def _begin_next(self, pipeline: RequestingPipeline) -> bool:
        """Begin to request the epoch after the last one. Return whether it has batches."""
        last = self.epochs[-1].start
        # ``earlier_passes`` is 0 in the first pass of an epoch that the script chose, and None in an epoch that it did
        # not choose. A script that chose this epoch will probably choose the next epoch too.
        has_chosen = last.earlier_passes == 0
        following = Start(last.epoch + 1, earlier_passes=0) if has_chosen else last.following()
        start = replace(following, num_samples=pipeline.num_samples())
        self._begin(pipeline, start, pipeline.plan_selection(start, self._selection))
        return self._next is not None

    def _begin(self, pipeline: RequestingPipeline, start: Start, planned: Iterator[PlannedBatch]) -> None:
        """Begin to request an epoch whose batches are ``planned``."""
        self.epochs.append(RequestedEpoch(start, pipeline.shard(), self._selection))
        self._planned = planned
        if self._adds_next_epochs:
            self._plan_next()

    def _plan_next(self) -> None:
        """Plan the next batch now, to know whether the epoch has another batch."""
        self._next = next(self._planned, None)
        self.epochs[-1].is_complete = self._next is None


class Prefetched:
    """The batches of the next epoch that one loader keeps between two passes. Thread-safe.

    At the end of the process, kept batches are discarded before the modules that own their processes and threads end.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._kept: tuple[Batches, EpochRequests] | None = None

    def keep(self, batches: Batches, requests: EpochRequests) -> None:
        """Keep the source of a pass's batches for the next pass, or close the source.

        Keep the source if it has delivered all batches of the pass, and the batches of the next epoch follow.

        Args:
            batches: The source.
            requests: Its requests. Their first epoch, which is the epoch of the pass, is removed.
        """
        is_pass_over = requests.is_pass_over()
        requests.epochs.popleft()
        # In a forked process, `_kept` and `_lock` are still those of the parent.
        self._check_process()
        if is_pass_over and requests.epochs and batches.is_open and batches.may_be_kept:
            with self._lock:
                # Two iterators of one loader may end their passes. Keep only the source of the first one.
                if self._kept is None:
                    self._kept = batches, requests
                    _discard_at_exit(self)
                    return
        batches.close()

    def take(self, start: Start, shard: Shard, selection: tuple[int, ...] = ()) -> tuple[Batches, EpochRequests] | None:
        """Return the kept batches if a pass with this start on this rank can use them. Discard them if not."""
        kept = self._pop()
        if kept is None:
            return None
        batches, requests = kept
        first = requests.epochs[0]
        # The script may have chosen another epoch, or the process group may have changed.
        is_same = (first.start, first.shard, first.selection) == (start, shard, selection)
        if is_same and batches.is_open and batches.may_be_kept:
            return kept
        batches.close()
        return None

    def discard(self) -> None:
        """Close the kept batches."""
        kept = self._pop()
        if kept is not None:
            kept[0].close()

    def _pop(self) -> tuple[Batches, EpochRequests] | None:
        """Return the kept batches, and keep none. In a forked process, batches of the parent do not count."""
        self._check_process()
        with self._lock:
            kept, self._kept = self._kept, None
            return kept

    def _check_process(self) -> None:
        """In a forked process, begin anew, and do not touch the batches that the parent process has kept."""
        if self._pid == os.getpid():
            return
        if self._kept is not None:
            _inherited.append(self._kept)  # freeing it would end the parent's workers
        # Another thread may have held the lock when the process forked. The child's copy of the lock would stay locked.
        self._pid, self._lock, self._kept = os.getpid(), threading.Lock(), None


_inherited: list[tuple[Batches, EpochRequests]] = []
_at_exit: weakref.WeakSet[Prefetched] = weakref.WeakSet()


def _discard_at_exit(prefetched: Prefetched) -> None:
    """Discard the kept batches at the end of the process.

    Exit handlers run in the reverse order of their registration. This handler must run before torch's, because
    otherwise workers would be left behind. So it is registered after torch's.
    """
    # No batches are kept now. An earlier registration may be from before torch's, so replace it.
    if not _at_exit:
        atexit.unregister(_discard_all)
        atexit.register(_discard_all)
    _at_exit.add(prefetched)


def _discard_all() -> None:
    for prefetched in tuple(_at_exit):
        prefetched.discard()
