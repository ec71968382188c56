"""All endpoints as one reader process sees them. Follows, prepares and compares them.

One lock guards everything here and in the readers. No thread holds this lock during a call, while the user's thread
waits, or while the user's code runs. One thread, the watcher, follows the directory. It also prepares endpoints again
when their back-offs have ended. Each preparation runs in a separate short-lived thread, so one slow build does not
delay the others.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hetero.batches.fetch import Description
from hetero.control.members.directory import Directory
from hetero.control.security import Token
from hetero.errors import DatasetError, EndpointUnavailableError, HeteroError
from hetero.reader.connection import ConnectionState, EndpointConnection
from hetero.reader.consistency import ServedDataset
from hetero.reader.hedging import Hedging
from hetero.reader.inline_fetches import ABSENT_S
from hetero.reader.routing import ConnectionTable, Router, unprepared
from hetero.reader.window import Window
from hetero.spec import DatasetSpec
from hetero.system.memory import keep_freed_memory
from hetero.system.waits import END_TIMEOUT_S, FIRST_BACKOFF_S, LOG_INTERVAL_S
from hetero.wire.compression import package_of
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.limits import MAX_EXPECTED, MAX_EXPECTED_BYTES, Limits
from hetero.wire.tls import Tls

__all__ = ["Fleet", "FleetStatistics"]

_SETTLE_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class FleetStatistics:
    """Counters of one fleet since its creation."""

    batches: int = 0
    received_bytes: int = 0
    """Bytes of batches on the network: after compression, with headers."""
    saved_bytes: int = 0
    """Bytes that compression kept off the network."""
    uncompressed: int = 0
    """Batches that arrived uncompressed despite the request, because the endpoint lacks the package for compression."""
    retries: int = 0
    """Requests sent again, for any reason."""
    failovers: int = 0
    """Requests sent again because their endpoint was lost or could not be reached. The endpoint may be the same one."""
    checksum_errors: int = 0
    """Batches that arrived damaged."""
    endpoint_losses: int = 0
    """Times that the reader lost an endpoint that it was using."""
    hedges: int = 0
    """Second attempts, made because the first one was overdue but still in progress."""
    gathered: int = 0
    """Batches with samples that other hosts keep and have computed."""
    hedges_won: int = 0
    """Batches that came from the second attempt."""


class FleetListener(Protocol):
    """The part of a reader that the fleet calls."""

    window: Window
    """The reader's batches. Read with the lock held."""

    def on_fleet_change(self) -> None:
        """React to an endpoint that came, left, or is free. Called with the lock held."""

    def receive_for_absent(self) -> None:
        """Receive batches that the consumer itself requested, if the consumer has received nothing for a second.

        Called without the lock, about every second. Without this, answered requests would count as the load of their
        endpoint while the script does something else.
        """

    def close(self) -> None:
        """Close the reader. Called without the lock, when the fleet closes."""


class Fleet:
    """All endpoints of the job, for the readers of one process. Thread-safe context manager.

    Args:
        directory: The endpoints that exist.
        token: The job's token, None if the job runs without one.
        job_id: The job's id.
        rank: Rank of this process, in ``[0, world_size)``.
        world_size: Number of processes that read.
        prepare_timeout_s: Seconds for an endpoint to build a data set, and for the first endpoint to appear.
        data_timeout_s: Seconds that one call for a batch may take. After an endpoint has served for the first time,
            also the seconds that a reader waits while no endpoint serves.
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
        self.prepare_timeout_s = prepare_timeout_s
        self.data_timeout_s = data_timeout_s
        self.limits = Limits() if limits is None else limits
        self.clock = clock
        self.stats = FleetStatistics()
        self.hedging = Hedging()
        self.lock = threading.Lock()
        self._failure: HeteroError | None = None  # an error that ends all reading, for example a wrong token
        self._directory = directory
        self._pid = os.getpid()
        self._changed = threading.Condition(self.lock)
        self._has_news = True
        """Whether the directory or an endpoint has changed since the watcher looked last."""
        self._is_closed = False
        # Without this call, page faults take half of the CPU time of a transfer. `RankSession` and `EndpointPool` make
        # the call too, but a process may make a fleet without them.
        keep_freed_memory()
        connect = functools.partial(EndpointConnection, token=token, job_id=job_id, limits=self.limits, tls=tls)
        self._table = ConnectionTable(connect)
        self.router = Router(self._table, rank=rank, world_size=world_size, clock=clock, on_free=self._notify)
        self._datasets: dict[DatasetSpec, ServedDataset] = {}
        self._expected: dict[DatasetSpec, None] = {}
        """Data sets that will perhaps be wanted, in order. See `expect`."""
        self._listeners: weakref.WeakSet[FleetListener] = weakref.WeakSet()
        self._abandoned: deque[FleetListener] = deque()  # see `close_later`
        self._uncompressed_hosts: set[str] = set()  # hosts that a warning was logged about
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
            # In a forked process there is nothing to close, because the threads and channels belong to the parent.
            return
        with self.lock:
            if self._is_closed:
                return
            self._is_closed = True
            listeners = list(self._listeners)
            self._changed.notify_all()
        atexit.unregister(self.close)
        self._unsubscribe()
        # Close the readers first, because a reader cancels its calls. `disconnect` waits until the calls of its link
        # have ended.
        for listener in listeners:
            listener.close()
        for connection in self._table.all():
            connection.disconnect()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(END_TIMEOUT_S)

    def describe(self, spec: DatasetSpec) -> Description:
        """Return length, fingerprint and environment of a data set. Blocks. The result is cached.

        This waits for the first endpoint that can answer, and then up to 5 s for the other endpoints, to detect before
        the first batch that their data sets differ.

        Raises:
            DatasetError: The factory raised.
            DatasetMismatchError: Two hosts hold different data.
            ProtocolMismatchError: An endpoint has another version.
            EndpointUnavailableError: No endpoint answered within ``prepare_timeout_s``.
            AuthenticationError: An endpoint refuses the token.
        """
        self.check_process()
        begin_s = self.clock()
        next_log_s = begin_s + LOG_INTERVAL_S
        settle_at_s: float | None = None  # when to stop waiting for the other endpoints
        with self.lock:
            dataset = self.prepare(spec)
            while True:
                self.raise_failure(dataset)
                now_s = self.clock()
                # An endpoint has described the data set. Wait for the others, unless a caller has done so before.
                if dataset.reference is not None:
                    settle_at_s = now_s + _SETTLE_S if settle_at_s is None else settle_at_s
                    if dataset.has_settled or now_s >= settle_at_s or dataset.is_settled(self.router.endpoints):
                        dataset.has_settled = True
                        return dataset.reference
                elif now_s - begin_s > self.prepare_timeout_s:
                    raise self.unavailable(f"data set {spec.name!r}", now_s - begin_s)
                elif now_s >= next_log_s:
                    next_log_s += LOG_INTERVAL_S
                    logger.warning("waiting for data set %s: %s", spec, self.describe_endpoints())
                self._changed.wait(0.5)

    def expect(self, spec: DatasetSpec) -> None:
        """Record that a data set will perhaps be wanted. Hosts may then build it before they fork their endpoints."""
        with self.lock:
            if len(self._expected) < MAX_EXPECTED and len(spec.arguments_json) <= MAX_EXPECTED_BYTES:
                self._expected[spec] = None

    def check_process(self) -> None:
        """Raise in a forked child, where the lock may be held for ever by a thread that exists only in the parent.

        Raises:
            HeteroError: This is not the process that made the fleet.
        """
        if self._pid != os.getpid():
            raise HeteroError("this process was forked from one with connections to endpoints: make a new loader here")

    def close_later(self, listener: FleetListener) -> None:
        """Make the fleet's thread close a reader within about a second. Needs no lock."""
        self._abandoned.append(listener)

    # For readers, with the lock held

    def prepare(self, spec: DatasetSpec) -> ServedDataset:
        """Start to prepare ``spec`` on the endpoints, unless the preparation has begun. Return its `ServedDataset`.

        The caller must hold the lock.
        """
        if self._is_closed:
            raise HeteroError("the connection to the data hosts is closed")
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="hetero-fleet", daemon=True)
            self._watcher.start()
        dataset = self._datasets.get(spec)
        if dataset is None:
            dataset = self._datasets[spec] = ServedDataset(spec)
            self._notify()
        return dataset

    def add_listener(self, listener: FleetListener) -> None:
        """Report changes to ``listener`` until it is garbage-collected. The caller must hold the lock."""
        self._listeners.add(listener)

    def used_bytes(self) -> int:
        """Return the bytes of the batches of all readers that have arrived or are in progress. Needs the lock."""
        return sum(listener.window.used_bytes for listener in self._listeners)

    def count_outstanding(self) -> None:
        """Count the requests in progress anew, when a reader has closed. The caller must hold the lock.

        `Router.choose` counts a request before its attempt begins. An exception, such as Ctrl-C, may have ended the
        consumer of the closed reader before that attempt began. Then the count is too high.
        """
        for connection in self._table.all():
            connection.num_outstanding = 0
        for listener in self._listeners:
            for attempt in listener.window.attempts:
                attempt.connection.num_outstanding += 1

    def raise_failure(self, dataset: ServedDataset) -> None:
        """Raise an error if no batch of a data set can come any more. The caller must hold the lock."""
        failure = self._failure or dataset.failure
        if failure is not None:
            raise failure
        if self._is_closed:
            raise HeteroError("the connection to the data hosts is closed")

    def call_failed(self, connection: EndpointConnection, error: CallFailedError, generation: int) -> None:
        """Update the endpoint's state after a failed call. The caller must hold the lock."""
        if error.fault.is_loss:
            self._mark_down(connection, error, generation)
        elif error.fault is Fault.BUSY:
            connection.mark_busy(str(error), self.clock())
        elif error.fault in (Fault.LATE, Fault.BROKEN):
            # The endpoint may be faulty. While it fails, it has the least load, so it would be chosen again and again.
            connection.avoid(kept_s=1.0, now_s=self.clock())
        elif error.fault is Fault.UNPREPARED:
            connection.mark_unprepared(str(error))
        elif error.fault is Fault.FOREIGN:
            # Another process has the endpoint's address, so the endpoint no longer counts in the size of the window.
            connection.mark_foreign(str(error))
            self._table.count_slots()
            logger.warning("endpoint %s is not used: %s", connection.name, error)
        self._notify()

    def note_uncompressed(self, connection: EndpointConnection, compression: str | None) -> None:
        """Count a batch whose endpoint cannot compress. Log a warning once per host. The caller must hold the lock.

        The warning advises to install the package on every host, because hosts are often set up alike.
        """
        # This is no error, because without compression the job is slower, but its batches are the same.
        self.stats.uncompressed += 1
        host = connection.record.host
        # The request named a compression, so the first condition is only for the type checker.
        if compression is not None and host not in self._uncompressed_hosts:
            self._uncompressed_hosts.add(host)
            logger.warning(
                "batches from %s are not compressed, because the package %s is not installed there: "
                "pip install it on every host",
                host,
                package_of(compression),
            )

    def fail(self, error: HeteroError) -> None:
        """End all reading in this process. The caller must hold the lock."""
        if self._failure is None:
            self._failure = error
        self._notify()

    def has_ready(self, spec: DatasetSpec) -> bool:
        """Return whether any endpoint of this rank serves ``spec``. The caller must hold the lock."""
        return any(connection.serves(spec) for connection in self.router.endpoints)

    def is_preparing(self, spec: DatasetSpec) -> bool:
        """Return whether an endpoint that can be reached is building ``spec``. The caller must hold the lock."""
        return any(spec in connection.preparing for connection in self.router.endpoints)

    def describe_endpoints(self) -> str:
        """Return one line that names all endpoints and the last message about each. The caller must hold the lock."""
        return self._table.describe()

    def unavailable(self, what: str, waited_s: float, *, note: str = "") -> EndpointUnavailableError:
        """Return the error that names every endpoint. The caller must hold the lock.

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
        """Wake the watcher, threads in `describe`, and all readers. The caller must hold the lock."""
        self._has_news = True
        self._changed.notify_all()
        for listener in self._listeners:
            listener.on_fleet_change()

    def _watch(self) -> None:
        """Run the watcher. If it fails, end all reading, because no other thread prepares endpoints."""
        try:
            self._follow()
        except BaseException as error:
            logger.error("internal error", exc_info=error)
            with self.lock:
                self.fail(HeteroError(f"internal error while following the data hosts: {error!r}"))

    def _follow(self) -> None:
        """Follow the directory and prepare endpoints until the fleet is closed. Runs in the watcher's thread."""
        while True:
            # Close the readers that the script dropped.
            while self._abandoned:
                self._abandoned.popleft().close()
            with self.lock:
                if self._is_closed:
                    return
                # News that comes while the lock is free below sets the flag again. Then this thread does not wait.
                self._has_news = False
                # Make the connections match the directory, and find out what has to be prepared.
                self._table.follow(*self._directory.contents())
                ended = self._table.pop_ended()
                self.router.update()
                now_s = self.clock()
                # The first endpoint of the job is prepared even if this rank does not use it, because its description
                # is the reference of all ranks.
                first = next(iter(self._table), None)
                due, next_due_s = unprepared(self.router.endpoints, self._datasets, first=first, now_s=now_s)
                for connection, spec in due:
                    # Mark it while the lock is held. Otherwise the next round could prepare the data set a second time.
                    connection.preparing.add(spec)
                remaining = list(self._table)
            # Without the lock, close old connections and start the preparations.
            for connection in ended:
                connection.disconnect()
            for connection in remaining:
                connection.close_stale()
            self._receive_for_absent()
            for connection, spec in due:
                threading.Thread(
                    target=self._prepare,
                    args=(connection, spec),
                    name=f"prepare-{connection.record.endpoint_id}",
                    daemon=True,
                ).start()
            # Wait for news, for the end of the first back-off, or for the next look at consumers that do not receive
            # the batches that they have requested. Wait at least 10 ms, because this thread must not run without a
            # pause.
            with self.lock:
                if not self._has_news and not self._is_closed:
                    self._changed.wait(max(0.01, min(next_due_s, now_s + ABSENT_S) - self.clock()))

    def _receive_for_absent(self) -> None:
        """Call `FleetListener.receive_for_absent` of all readers. Called without the lock."""
        with self.lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener.receive_for_absent()

    def _prepare(self, connection: EndpointConnection, spec: DatasetSpec) -> None:
        """Make one endpoint serve one data set. Each call runs in its own thread."""
        with self.lock:
            generation = connection.generation
            dataset = self._datasets[spec]
            connection.mark_connecting()
            expected = [each for each in self._expected if each != spec]  # the host may build them too, see `expect`
        outcome: Description | Exception
        begin_s = self.clock()
        try:
            outcome = connection.prepare(spec, expected=expected, timeout_s=self.prepare_timeout_s)
            dataset.build_s = max(dataset.build_s, self.clock() - begin_s)
        except Exception as error:  # noqa: BLE001 - `_conclude` handles it
            outcome = error
        with self.lock:
            connection.preparing.discard(spec)
            if not self._is_closed:
                if not connection.is_retired:
                    self._conclude(connection, dataset, outcome, generation)
                # Other endpoints may have waited for this endpoint's description, which may be the reference now.
                dataset.update(list(self._table))
            self._notify()

    def _conclude(
        self, connection: EndpointConnection, dataset: ServedDataset, outcome: Description | Exception, generation: int
    ) -> None:
        """Record the outcome of a preparation. If its link has been given up, ignore facts about that link."""
        if isinstance(outcome, Description):
            # If the generations differ, the link was lost meanwhile. Such a preparation once made the endpoint ready,
            # which ended its back-off. FOREIGN is final. Another call may have set it, and the generation then stays.
            if connection.generation == generation and connection.state is not ConnectionState.FOREIGN:
                connection.mark_ready()
                connection.descriptions[dataset.spec] = outcome
        elif isinstance(outcome, DatasetError):
            dataset.build_failed(connection, outcome)
        elif isinstance(outcome, CallFailedError) and outcome.fault is Fault.MALFORMED:
            dataset.rejected(connection, outcome.details)
        elif isinstance(outcome, CallFailedError):
            self._prepare_failed(connection, outcome, generation)
        elif isinstance(outcome, HeteroError):
            self.fail(outcome)
        else:
            logger.error("cannot prepare %s", connection.name, exc_info=outcome)
            self.fail(HeteroError(f"cannot prepare {connection.name}: {outcome!r}"))

    def _prepare_failed(self, connection: EndpointConnection, error: CallFailedError, generation: int) -> None:
        """Update the endpoint's state after a failed call of `EndpointConnection.prepare`."""
        if error.fault is Fault.FOREIGN:
            self.call_failed(connection, error, generation)
        # A busy endpoint gets the request again after a pause.
        elif error.fault is Fault.BUSY and connection.generation == generation:
            connection.last_message = str(error)
            connection.retry_at_s = self.clock() + FIRST_BACKOFF_S
        # Any other failure counts as a loss. `_mark_down` ignores failures of an older link, even if one is BUSY.
        else:
            self._mark_down(connection, error, generation)

    def _mark_down(self, connection: EndpointConnection, error: CallFailedError, generation: int) -> None:
        """Record the loss of an endpoint. Count and log the loss if the endpoint was ready until now."""
        if connection.mark_down(str(error), self.clock(), generation):
            self.stats.endpoint_losses += 1
            logger.info("endpoint %s is down: %s", connection.name, error)


_fleets: weakref.WeakSet[Fleet] = weakref.WeakSet()


def _after_fork() -> None:
    """Forget the parent's fleets in a forked process."""
    # The child cannot use these fleets. A thread of the parent may have held a lock at the fork, and the child
    # lacks the thread that would release the lock.
    for fleet in list(_fleets):
        atexit.unregister(fleet.close)
        fleet._table.clear()
    _fleets.clear()


os.register_at_fork(after_in_child=_after_fork)
