"""The batches between delivery and the furthest request, and the threads that fetch them.

A request (`Item`) is missing, in flight, or has an outcome. Lanes take the
lowest missing one, choose its endpoint, fetch, and put the outcome in place; a
failed attempt makes it missing again. The consumer takes outcomes in order.
Everything is guarded by the fleet's lock.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hetero.batches.failures import dataset_error
from hetero.batches.request import BatchRequest
from hetero.dataplane.agreement import Agreement
from hetero.dataplane.connection import CallFailedError, EndpointConnection, Fault, Fetched
from hetero.dataplane.fleet import Fleet
from hetero.datasets import DatasetSpec
from hetero.errors import (
    AuthenticationError,
    BatchTimeoutError,
    DataPlaneError,
    DatasetError,
    HeteroError,
    ProtocolError,
)
from hetero.wire.framing import ChecksumError

__all__ = ["Arrived", "Item", "Window"]

_MAX_ATTEMPTS = 3
"""Deaths, damaged arrivals, or late answers of one request before it fails by name."""
_POLL_S = 0.5
_JOIN_S = 5.0
_MAX_NAMED_INDICES = 64

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Item:
    """One request on its way."""

    sequence: int
    request: BatchRequest
    agreement: Agreement
    lost_with: list[tuple[str, str]] = field(default_factory=list)
    """Incarnations of endpoints that could not be reached any more while they had it."""
    is_suspect: bool = False
    """It may be what killed its endpoint: it runs alone."""
    num_damaged: int = 0
    num_late: int = 0
    num_broken: int = 0
    connection: EndpointConnection | None = None
    generation: int = 0
    call: Any = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch that waits for its turn."""

    batch: Any
    nbytes: int


class Window:
    """What the lanes of one reader share; methods need the fleet's lock unless they say otherwise.

    Args:
        fleet: The endpoints.
        prefetch_factor, window_bytes, data_timeout_s, allocate: See `hetero.dataplane.reader.Reader`.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        prefetch_factor: float,
        window_bytes: int,
        data_timeout_s: float,
        allocate: Callable[[int], memoryview] | None,
    ) -> None:
        self.fleet = fleet
        self.is_closed = False
        self.arrived = threading.Condition(fleet.lock)
        self.work = threading.Condition(fleet.lock)
        self.next_sequence = 0  # to be delivered
        self.outcomes: dict[int, Arrived | BaseException] = {}
        self.data_timeout_s = data_timeout_s
        self._prefetch_factor = prefetch_factor
        self._window_bytes = window_bytes
        self._allocate = allocate
        self._missing: list[Item] = []  # to be asked for, by sequence
        self._in_flight: set[Item] = set()
        self._held_bytes = 0
        self._lanes: list[threading.Thread] = []
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        """Batches between delivery and the furthest request: this rank's share of all slots, times the factor."""
        slots = self.fleet.num_slots() / self.fleet.world_size
        return max(2, math.ceil(self._prefetch_factor * slots))

    def add(self, item: Item) -> None:
        """Put a request into the window, and see that a lane is there for it."""
        self._insert(item)
        wanted = len(self._missing) + len(self._in_flight)
        if len(self._lanes) < min(wanted, self.size):
            lane = threading.Thread(target=self._run_lane, name=f"hetero-lane-{len(self._lanes)}", daemon=True)
            self._lanes.append(lane)
            lane.start()
        self.work.notify()

    def put(self, sequence: int, outcome: Arrived | BaseException) -> None:
        """Set what is delivered, or raised, when its turn comes."""
        if isinstance(outcome, Arrived):
            self._held_bytes += outcome.nbytes
        self.outcomes[sequence] = outcome
        if sequence == self.next_sequence:
            self.arrived.notify_all()

    def pop(self) -> Arrived | BaseException | None:
        """Return the next outcome in order; None if it is not there yet."""
        outcome = self.outcomes.pop(self.next_sequence, None)
        if outcome is not None:
            self.next_sequence += 1
            if isinstance(outcome, Arrived):
                self._held_bytes -= outcome.nbytes
            self._wake_lanes()  # room in bytes, and whoever is next may exceed the bound
        return outcome

    def _wake_lanes(self) -> None:
        """Have lanes look for work again: only if there is any, since nearly always each request has its lane."""
        if self._missing:
            self.work.notify_all()

    def on_fleet_change(self) -> None:
        """See `hetero.dataplane.fleet.Listener`."""
        self.work.notify_all()
        self.arrived.notify_all()

    def abandon(self) -> None:
        """Close, now if the lock is free, else soon: this thread may hold it. For finalizers."""
        if self.fleet.lock.acquire(blocking=False):
            self.fleet.lock.release()
            self.close()
        else:
            self.fleet.abandoned.append(self)

    def close(self) -> None:
        """End the lanes; idempotent, blocks until they have ended. Called without the lock."""
        if self._pid != os.getpid():
            return  # a forked copy: the lanes are the parent's, and its lock may be held for ever
        with self.fleet.lock:
            self.is_closed = True
            calls = [item.call for item in self._in_flight if item.call is not None]
            self.fleet.unreserve({*self._in_flight, *self._missing})
            self._missing.clear()
            self.outcomes.clear()
            self._held_bytes = 0
            self.on_fleet_change()
        for call in calls:
            call.cancel()
        deadline_s = time.monotonic() + _JOIN_S
        for lane in self._lanes:
            if lane is not threading.current_thread():
                lane.join(max(0.0, deadline_s - time.monotonic()))

    # Lanes

    def _run_lane(self) -> None:
        while True:
            taken = self._take()
            if taken is None:
                return
            self._settle(taken, self._attempt(taken))

    def _take(self) -> Item | None:
        """Return the lowest request that can be asked for now, with its endpoint chosen; None to leave."""
        with self.fleet.lock:
            while not self.is_closed:
                unserved: set[DatasetSpec] = set()
                for item in tuple(self._missing):
                    if item.request.spec in unserved or not self._is_askable(item):
                        continue
                    if self._choose(item):
                        self._missing.remove(item)
                        self._in_flight.add(item)
                        return item
                    if not item.is_suspect:
                        unserved.add(item.request.spec)  # the same answer for all the others
                self.work.wait(_POLL_S)
        return None

    def _is_askable(self, item: Item) -> bool:
        if item.sequence == self.next_sequence:
            return not self._awaits_verdict(item)
        size = item.agreement.batch_bytes
        expected = self._held_bytes + (len(self._in_flight) + 1) * size
        return expected <= self._window_bytes and not self._awaits_verdict(item)

    def _awaits_verdict(self, item: Item) -> bool:
        """Tell whether one more loss could be one death too many, and it is not yet known which losses were deaths."""
        item.lost_with = [
            identity for identity in item.lost_with if not self.fleet.is_back(identity, item.request.spec)
        ]
        deaths = sum(self.fleet.is_gone(identity) for identity in item.lost_with)
        if deaths >= _MAX_ATTEMPTS and item in self._missing:
            self._missing.remove(item)
            self.put(item.sequence, _killed_too_often(item))
            return True
        return len(item.lost_with) >= _MAX_ATTEMPTS

    def _choose(self, item: Item) -> bool:
        connection = self.fleet.choose(item.request.spec, alone_for=item if item.is_suspect else None)
        if connection is None:
            return False
        item.connection, item.generation, item.call = connection, connection.generation, None
        return True

    def _attempt(self, item: Item) -> Fetched | Exception:
        """Ask an endpoint once."""
        assert item.connection is not None
        try:
            return item.connection.fetch(
                item.request,
                timeout_s=self.data_timeout_s,
                allocate=self._allocate,
                on_call=functools.partial(self._started, item),
            )
        except Exception as error:  # noqa: BLE001 - settled by the caller
            return error

    def _started(self, item: Item, call: Any) -> None:
        # Without the lock: `close` sets the flag, then looks for calls, this the other way round; one sees the other.
        item.call = call
        if self.is_closed:
            call.cancel()

    def _settle(self, item: Item, outcome: Fetched | Exception) -> None:
        """Put the outcome of an attempt where it belongs: delivery, or another attempt."""
        fleet, connection = self.fleet, item.connection
        assert connection is not None
        with fleet.lock:
            self._in_flight.discard(item)
            fleet.release(connection, alone_for=item if item.is_suspect else None)
            item.call = None
            if self.is_closed:
                return
            if isinstance(outcome, Fetched):
                self._succeeded(item, connection, outcome)
                return
            error = self._failed(item, connection, outcome)
            if error is None:
                fleet.stats.retries += 1
                self._insert(item)
                self.work.notify_all()
            else:
                self.put(item.sequence, error)

    def _succeeded(self, item: Item, connection: EndpointConnection, fetched: Fetched) -> None:
        connection.load, connection.load_at_s = fetched.num_queued, time.monotonic()
        stats = self.fleet.stats
        stats.batches += 1
        stats.received_bytes += fetched.nbytes
        agreement = item.agreement
        if not agreement.has_size:
            agreement.has_size, agreement.batch_bytes = True, fetched.nbytes
        agreement.batch_bytes = max(agreement.batch_bytes, fetched.nbytes)
        self.put(item.sequence, Arrived(fetched.batch, fetched.nbytes))
        self._wake_lanes()  # it may be smaller than was expected of it

    def _failed(self, item: Item, connection: EndpointConnection, error: Exception) -> BaseException | None:
        """Decide what a failed attempt means for the request; None: ask again."""
        fleet = self.fleet
        if isinstance(error, CallFailedError):
            was_first = self._is_lowest_on(item, connection)
            fleet.call_failed(connection, error, item.generation)
            return self._call_failed(item, connection, error, was_first)
        if isinstance(error, AuthenticationError):
            fleet.fail(error)
            return error
        if isinstance(error, ProtocolError):
            fleet.stats.checksum_errors += isinstance(error, ChecksumError)
            item.num_damaged += 1
            logger.warning("batch %d from %s is damaged: %s", item.request.position, connection.name, error)
            if item.num_damaged < _MAX_ATTEMPTS:
                return None
            damaged = ProtocolError(
                f"a batch arrived damaged {_MAX_ATTEMPTS} times, last from {connection.name}: {error}"
            )
            damaged.__cause__ = error
            return damaged
        if not isinstance(error, HeteroError):
            logger.error("internal error while fetching from %s", connection.name, exc_info=error)
        return error

    def _call_failed(
        self, item: Item, connection: EndpointConnection, error: CallFailedError, was_first: bool
    ) -> BaseException | None:
        if error.fault in (Fault.UNREACHABLE, Fault.CANCELLED):
            self.fleet.stats.failovers += 1
            item.lost_with.append(connection.identity)
            # The one that the endpoint was probably computing runs alone at once; any other
            # after its second loss. Thus a poisonous one dies alone the third time, and the
            # loss of a host does not send everything that was queued there through a needle's eye.
            item.is_suspect = was_first or len(item.lost_with) > 1
            return None
        if error.fault is Fault.LATE:
            item.num_late += 1
            message = f"{_MAX_ATTEMPTS} times no batch within {self.data_timeout_s:g} s, last from {connection.name}"
            return BatchTimeoutError(message) if item.num_late >= _MAX_ATTEMPTS else None
        if error.fault is Fault.BROKEN:
            item.num_broken += 1
            message = f"{connection.name} failed: {error.details}"
            return DataPlaneError(message) if item.num_broken >= _MAX_ATTEMPTS else None
        if error.fault is Fault.REJECTED:
            return ProtocolError(f"{connection.name} rejects the request: {error.details}")
        return None

    def _is_lowest_on(self, item: Item, connection: EndpointConnection) -> bool:
        """Tell whether the endpoint had this request before our others: lower steps are computed first."""
        earlier = [other for other in (*self._in_flight, *self._missing) if other.sequence < item.sequence]
        return not any(other.connection is connection or connection.identity in other.lost_with for other in earlier)

    def _insert(self, item: Item) -> None:
        bisect.insort(self._missing, item, key=lambda other: other.sequence)


def _killed_too_often(item: Item) -> DatasetError:
    request = item.request
    indices = ", ".join(str(index) for index in list(request.indices)[:64]) + (
        ", ..." if len(request.indices) > 64 else ""
    )
    endpoints = ", ".join(name for name, _ in item.lost_with)
    return dataset_error(
        f"the endpoint died {len(item.lost_with)} times ({endpoints}) while it computed the batch of the indices "
        f"{indices}: out of memory, or a crash in native code; the data hosts' logs say which",
        dataset=request.spec.name,
        host=item.lost_with[-1][0],
        stage="sample",
    )
