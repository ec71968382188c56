"""All endpoints as one reader process sees them. Follows, prepares, compares and chooses them.

One lock guards everything here and in the readers. It is never held during a call, a wait of the user's thread, or the
user's code. One thread follows the directory and the back-offs. A short-lived thread prepares each endpoint, so one
slow build does not hold up the others.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Container
from typing import Protocol

from hetero.batches.fetch import Description
from hetero.control.directory import Directory
from hetero.control.security import Token
from hetero.dataplane.reader import routing
from hetero.dataplane.reader.connection import ConnectionState, EndpointConnection
from hetero.dataplane.reader.connection_table import Roster
from hetero.dataplane.reader.consistency import Agreement
from hetero.dataplane.reader.failures import CallFailedError, Fault
from hetero.dataplane.reader.hedging import Hedging
from hetero.dataplane.statistics import FleetStatistics
from hetero.errors import DatasetError, EndpointUnavailableError, HeteroError
from hetero.spec import DatasetSpec
from hetero.system.memory import keep_freed_memory
from hetero.wire.limits import Limits
from hetero.wire.tls import Tls

__all__ = ["Fleet"]

_SETTLE_S = 5.0
_LOG_INTERVAL_S = 10.0
_IDLE_S = 5.0

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """A reader, as the fleet sees it."""

    def on_fleet_change(self) -> None:
        """React to an endpoint that came, left, or is free. Called with the lock held."""

    def close(self) -> None:
        """Close the reader. Called without the lock, when the fleet closes."""


class Fleet:
    """All endpoints of the job, for the readers of one process. Thread-safe context manager.

    Args:
        directory: The endpoints that exist.
        token: The job's token, None if the job runs without one.
        job_id: The job's id.
        rank: Rank of this process, in ``[0, world_size)``.
        world_size: Processes that read.
        prepare_timeout_s: Bound for building a data set, and for the first endpoint to appear.
        data_timeout_s: Bound of the time without any endpoint later on.
        limits: Bounds of the memory that answers may make this process allocate.
        tls: This host's TLS, None for a job in plaintext.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        directory: Directory,
        token: Token | None,
        *,
        job_id: str,
        rank: int = 0,
        world_size: int = 1,
        prepare_timeout_s: float = 900.0,
        data_timeout_s: float = 300.0,
        limits: Limits | None = None,
        tls: Tls | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.prepare_timeout_s = prepare_timeout_s
        self.data_timeout_s = data_timeout_s
        self.limits = Limits() if limits is None else limits
        self.clock = clock
        self.stats = FleetStatistics()
        self.hedging = Hedging()
        self.lock = threading.Lock()
        self.failure: HeteroError | None = None
        """The reason that nothing can be read any longer, a wrong token for example."""
        self.uncompressed_hosts: set[str] = set()
        """Hosts that lack the package for compression and for which a warning was logged."""
        self._directory = directory
        self._pid = os.getpid()
        self._changed = threading.Condition(self.lock)
        self._news = True
        self._is_closed = False
        keep_freed_memory()  # hetero.launch.ranks.rank has done this already, but ranks of other launchers have not
        connect = functools.partial(EndpointConnection, token=token, job_id=job_id, limits=self.limits, tls=tls)
        self._roster = Roster(connect)
        self._used: list[EndpointConnection] = []  # this rank's endpoints, in order of preference
        self._agreements: dict[DatasetSpec, Agreement] = {}
        self._listeners: weakref.WeakSet[Listener] = weakref.WeakSet()
        self.abandoned: deque[Listener] = deque()
        """Readers that could not be closed when the script dropped them. The watcher closes them."""
        self._num_choices = 0
        self._watcher: threading.Thread | None = None
        self._unsubscribe = directory.subscribe(self._wake)
        _fleets.add(self)
        atexit.register(self.close)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close readers and connections. Idempotent. Blocks until calls have ended."""
        if self._pid != os.getpid():
            return  # a forked copy: the threads and channels are the parent's
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            listeners = list(self._listeners)
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._unsubscribe()
        for listener in listeners:
            listener.close()
        for connection in self._roster.all():
            connection.disconnect()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(_IDLE_S)

    def describe(self, spec: DatasetSpec) -> Description:
        """Return length, fingerprint and environment of a data set. Blocks. The result is cached.

        This waits for the first endpoint that can answer. It then waits a moment for the other endpoints, to find data
        sets that differ before the first batch.

        Raises:
            DatasetError: The factory raised.
            DatasetMismatchError: Two hosts hold different data.
            ProtocolMismatchError: An endpoint has another version.
            EndpointUnavailableError: No endpoint answered within ``prepare_timeout_s``.
            AuthenticationError: An endpoint refuses the token.
        """
        self.check_process()
        begin_s = self.clock()
        next_log_s = begin_s + _LOG_INTERVAL_S
        settle_at_s: float | None = None
        with self.lock:
            agreement = self.want(spec)
            while True:
                self.raise_failure(agreement)
                now_s = self.clock()
                if agreement.reference is not None:
                    settle_at_s = now_s + _SETTLE_S if settle_at_s is None else settle_at_s
                    if agreement.has_settled or now_s >= settle_at_s or agreement.is_settled(self._used):
                        agreement.has_settled = True
                        return agreement.reference
                elif now_s - begin_s > self.prepare_timeout_s:
                    raise self.unavailable(f"data set {spec.name!r}", now_s - begin_s)
                elif now_s >= next_log_s:
                    next_log_s += _LOG_INTERVAL_S
                    logger.warning("waiting for data set %s: %s", spec, self.describe_endpoints())
                self._changed.wait(0.5)

    def check_process(self) -> None:
        """Raise in a forked child, where the lock may be held for ever by a thread that exists only in the parent.

        Raises:
            HeteroError: This is not the process that made the fleet.
        """
        if self._pid != os.getpid():
            raise HeteroError("this process was forked after its parent had opened connections; make a new loader here")

    # For readers, with the lock held

    def want(self, spec: DatasetSpec) -> Agreement:
        """Start to prepare ``spec`` on the endpoints, if that has not begun. Needs the lock."""
        if self._is_closed:
            raise HeteroError("the connection to the data hosts is closed")
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="hetero-fleet", daemon=True)
            self._watcher.start()
        agreement = self._agreements.get(spec)
        if agreement is None:
            agreement = self._agreements[spec] = Agreement(spec)
            self._notify()
        return agreement

    def listen(self, listener: Listener) -> None:
        """Report changes to ``listener`` until it is garbage-collected. Needs the lock."""
        self._listeners.add(listener)

    def raise_failure(self, agreement: Agreement) -> None:
        """Raise the failure that makes waiting pointless, if there is one. Needs the lock."""
        failure = self.failure or agreement.failure
        if failure is not None:
            raise failure
        if self._is_closed:
            raise HeteroError("the connection to the data hosts is closed")

    def choose(self, spec: DatasetSpec, *, alone_for: object | None = None) -> EndpointConnection | None:
        """Take the endpoint that should compute the next request, None if no endpoint can take it. Needs the lock.

        Args:
            spec: The request's data set.
            alone_for: The request, if the endpoint must not work on other requests of this process meanwhile. Then the
                chosen endpoint gets no new requests until it is idle. Until then this returns None, and the caller asks
                again.
        """
        now_s = self.clock()
        avoided = self.hedging.stragglers.avoided(now_s)
        chosen = routing.least_loaded(self._used, spec, now_s=now_s, alone_for=alone_for, avoided=avoided)
        if chosen is not None and alone_for is not None:
            if any(other.reserved_by is alone_for for other in self._roster if other is not chosen):
                self.unreserve((alone_for,))  # the endpoint that was reserved for it was not chosen
            chosen.reserved_by = alone_for
            if chosen.num_outstanding:
                return None
        return self._taken(chosen)

    def choose_other(self, spec: DatasetSpec, overdue_on: EndpointConnection) -> EndpointConnection | None:
        """Take the endpoint for a request's second attempt, None if no endpoint would help. Needs the lock."""
        now_s = self.clock()
        avoided = self.hedging.stragglers.avoided(now_s)
        return self._taken(routing.less_loaded(self._used, spec, overdue_on, now_s=now_s, avoided=avoided))

    def _taken(self, chosen: EndpointConnection | None) -> EndpointConnection | None:
        if chosen is not None:
            self._num_choices += 1
            chosen.chosen_at = self._num_choices
            chosen.num_outstanding += 1
        return chosen

    def release(self, connection: EndpointConnection, *, alone_for: object | None = None) -> None:
        """Give back an endpoint that `choose` or `choose_other` returned. Needs the lock."""
        connection.num_outstanding -= 1
        is_awaited = connection.reserved_by is not None
        if alone_for is not None and connection.reserved_by is alone_for:
            connection.reserved_by = None
        if connection.is_retired and not connection.num_outstanding:
            self._notify()  # the watcher closes it
        elif alone_for is not None or (is_awaited and not connection.num_outstanding):
            self._tell_listeners()

    def unreserve(self, owners: Container[object]) -> None:
        """Release the endpoints that are reserved for these requests. Needs the lock."""
        for connection in self._roster:
            if connection.reserved_by is not None and connection.reserved_by in owners:
                connection.reserved_by = None
        self._tell_listeners()

    def call_failed(self, connection: EndpointConnection, error: CallFailedError, generation: int) -> None:
        """Update the endpoint's state after a failed call. Needs the lock."""
        now_s = self.clock()
        if error.fault.is_loss:
            self._mark_down(connection, error, generation)
        elif error.fault is Fault.BUSY:
            connection.last_word = str(error)
            connection.busy_until_s = now_s + 0.2
        elif error.fault in (Fault.LATE, Fault.BROKEN):
            # The fault may be the endpoint's own. It stays the least loaded endpoint while it fails.
            self.hedging.stragglers.avoid(connection, kept_s=1.0, now_s=now_s)
        elif error.fault is Fault.UNPREPARED:
            connection.last_word = str(error)
            connection.prepared.clear()
            connection.descriptions.clear()
        elif error.fault is Fault.FOREIGN:
            connection.mark_foreign(str(error))
            self._roster.count_slots()
            logger.warning("endpoint %s is not used: %s", connection.name, error)
        self._notify()

    def fail(self, error: HeteroError) -> None:
        """End all reading in this process. Needs the lock."""
        if self.failure is None:
            self.failure = error
        self._notify()

    def num_slots(self) -> int:
        """Return how many batches all endpoints together compute at the same time. Needs the lock."""
        return self._roster.num_slots

    def next_free_s(self) -> float:
        """Return the seconds until a busy endpoint may be asked again, infinite if none are busy. Needs the lock."""
        return routing.next_free_s(self._used, now_s=self.clock())

    def has_ready(self, spec: DatasetSpec) -> bool:
        """Return whether any endpoint of this rank serves ``spec``. Needs the lock."""
        return any(connection.serves(spec) for connection in self._used)

    def is_preparing(self, spec: DatasetSpec) -> bool:
        """Return whether an endpoint that can be reached is building ``spec``. Needs the lock."""
        return any(spec in connection.preparing for connection in self._used)

    def describe_endpoints(self) -> str:
        """Return all endpoints and their last words, on one line. Needs the lock."""
        return self._roster.describe()

    def unavailable(self, what: str, waited_s: float, *, note: str = "") -> EndpointUnavailableError:
        """Return the error that names every endpoint. Needs the lock.

        Args:
            what: The data set or batch that no endpoint served.
            waited_s: Seconds that the reader waited for it.
            note: Further facts, one line.
        """
        lines = [f"no endpoint served {what} for {waited_s:.0f} s.", note, *self.describe_endpoints().split("; ")]
        return EndpointUnavailableError("\n    ".join(filter(None, lines)))

    # The watcher

    def _wake(self) -> None:
        with self.lock:
            self._notify()

    def _notify(self) -> None:
        self._news = True
        self._changed.notify_all()
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener.on_fleet_change()

    def _watch(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            logger.error("internal error", exc_info=error)
            with self.lock:
                self.fail(HeteroError(f"internal error while following the data hosts: {error!r}"))

    def _follow(self) -> None:
        while True:
            while self.abandoned:
                self.abandoned.popleft().close()
            with self.lock:
                if self._is_closed:
                    return
                self._news = False
                # Take over what the directory says, and find what has to be prepared.
                self._roster.follow(*self._directory.contents())
                ended = self._roster.take_ended()
                self._used = routing.subset(self._roster, self.rank, self.world_size)
                now_s = self.clock()
                due, next_due_s = routing.unprepared(
                    self._used, self._agreements, first=next(iter(self._roster), None), now_s=now_s
                )
                for connection, spec in due:
                    connection.preparing.add(spec)
                remaining = list(self._roster)
            # Without the lock: close what left, and start the preparations.
            for connection in ended:
                connection.disconnect()
            for connection in remaining:
                connection.close_stale()
            for connection, spec in due:
                threading.Thread(
                    target=self._prepare,
                    args=(connection, spec),
                    name=f"prepare-{connection.record.endpoint_id}",
                    daemon=True,
                ).start()
            with self.lock:
                if not self._news and not self._is_closed:
                    self._changed.wait(max(0.01, min(next_due_s, now_s + _IDLE_S) - self.clock()))

    def _prepare(self, connection: EndpointConnection, spec: DatasetSpec) -> None:
        """Make one endpoint serve one data set. Runs in a thread per call."""
        with self.lock:
            generation = connection.generation
            agreement = self._agreements[spec]
            if connection.state is ConnectionState.DOWN:
                connection.state = ConnectionState.CONNECTING
        outcome: Description | Exception
        begin_s = self.clock()
        try:
            connection.prepare(spec, timeout_s=self.prepare_timeout_s)
            agreement.build_s = max(agreement.build_s, self.clock() - begin_s)
            outcome = connection.describe(spec)
        except Exception as error:  # noqa: BLE001 - `_conclude` handles it
            outcome = error
        with self.lock:
            connection.preparing.discard(spec)
            if not self._is_closed:
                if not connection.is_retired:
                    self._conclude(connection, agreement, outcome, generation)
                agreement.update(list(self._roster))  # others may have waited for this one to give the reference
            self._notify()

    def _conclude(
        self, connection: EndpointConnection, agreement: Agreement, outcome: Description | Exception, generation: int
    ) -> None:
        """Record the outcome of a preparation. If its link was replaced, record only what holds for every link."""
        if isinstance(outcome, Description):
            if connection.generation == generation and connection.state is not ConnectionState.FOREIGN:
                connection.mark_ready()
                connection.descriptions[agreement.spec] = outcome
        elif isinstance(outcome, DatasetError):
            agreement.build_failed(connection, outcome)
        elif isinstance(outcome, CallFailedError) and outcome.fault is Fault.MALFORMED:
            agreement.rejected(connection, outcome.details)
        elif isinstance(outcome, CallFailedError):
            self._prepare_failed(connection, outcome, generation)
        elif isinstance(outcome, HeteroError):
            self.fail(outcome)
        else:
            logger.error("cannot prepare %s", connection.name, exc_info=outcome)
            self.fail(HeteroError(f"cannot prepare {connection.name}: {outcome!r}"))

    def _prepare_failed(self, connection: EndpointConnection, error: CallFailedError, generation: int) -> None:
        if error.fault is Fault.FOREIGN:
            self.call_failed(connection, error, generation)
        elif error.fault is Fault.BUSY and connection.generation == generation:
            connection.last_word = str(error)
            connection.retry_at_s = self.clock() + 0.5
        else:
            self._mark_down(connection, error, generation)

    def _mark_down(self, connection: EndpointConnection, error: CallFailedError, generation: int) -> None:
        if connection.mark_down(str(error), self.clock(), generation):
            self.stats.endpoint_losses += 1
            logger.info("endpoint %s is down: %s", connection.name, error)


_fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _after_fork() -> None:
    # A thread that does not exist in the child may hold a lock. Nothing in these fleets is usable here.
    for fleet in list(_fleets):
        atexit.unregister(fleet.close)
        fleet._roster = Roster(fleet._roster._connect)
    _fleets.clear()


os.register_at_fork(after_in_child=_after_fork)
