"""The batches between delivery and the furthest request, and the fetchers: the threads that fetch them.

A request (`Item`) is missing, has one or two attempts in progress, or has an outcome. Each fetcher takes the lowest
missing request, chooses an endpoint, fetches the batch, and stores the outcome. If the last attempt of a request fails,
the request is missing again. The consumer takes outcomes in order. If it waits for a request that is overdue, it starts
a second attempt, which another fetcher makes. The first answer wins, and the other attempt is cancelled. The fleet's
lock guards everything.
"""

from __future__ import annotations

import bisect
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hetero.batches.skips import Skips
from hetero.dataplane.reader.attempts import Attempt, Item
from hetero.dataplane.reader.connection import Fetched
from hetero.dataplane.reader.consistency import Agreement
from hetero.dataplane.reader.failures import CallFailedError, Fault
from hetero.dataplane.reader.fleet import Fleet
from hetero.dataplane.reader.window_growth import Stretch
from hetero.errors import AuthenticationError, DatasetError, HeteroError, ProtocolError
from hetero.wire.compression import ChecksumError, package_of

__all__ = ["Arrived", "Window"]

_POLL_S = 0.5
_JOIN_S = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrived:
    """A batch that is there and waits for its turn."""

    batch: Any
    nbytes: int
    skips: Skips | None = None
    saved_bytes: int = 0


class Window:
    """State that the fetchers of one reader share. Methods need the fleet's lock unless their docstring says otherwise.

    Args:
        fleet: The endpoints.
        prefetch_factor, window_bytes, data_timeout_s, allocate: See `hetero.dataplane.reader.reader.Reader`.
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
        self.next_sequence = 0  # the next one to deliver
        self.outcomes: dict[int, Arrived | BaseException] = {}
        self.data_timeout_s = data_timeout_s
        self._prefetch_factor = prefetch_factor
        self._window_bytes = window_bytes
        self._allocate = allocate
        self._missing: list[Item] = []  # to be asked for, by sequence
        self._attempts: set[Attempt] = set()  # in progress, including those given up
        self._hedges: deque[Attempt] = deque()  # the attempts that no fetcher has taken yet
        self._wants_place = False  # the consumer's request is overdue, but every other endpoint is at least as busy
        self._stretch = Stretch()
        self._held_bytes = 0
        self._lanes: list[threading.Thread] = []
        self._pid = os.getpid()

    @property
    def size(self) -> int:
        """Largest number of batches in flight: the plan, but at least 3.

        The third place is used only if it needs no more bytes than a `Stretch` may. With two places, one batch is
        delivered and one is sent, and no endpoint computes.
        """
        return max(3, self._planned)

    @property
    def _planned(self) -> int:
        """This rank's share of all slots, times the prefetch factor."""
        return max(2, math.ceil(self._prefetch_factor * self.fleet.num_slots() / self.fleet.world_size))

    @property
    def limit(self) -> int:
        """Batches that may lie between delivery and the furthest request.

        This is `size`, and more while the next batch is late and for some time after.
        """
        return self._stretch.limit(num_waiting=len(self.outcomes), size=self.size)

    def add(self, item: Item) -> None:
        """Put a request into the window, and start a fetcher for it if none is free."""
        self.fleet.hedging.budget.earn()  # once per request, however often it is sent
        self._insert(item)
        self._ensure_lane()
        self.work.notify()

    def put(self, sequence: int, outcome: Arrived | BaseException) -> None:
        """Set the batch to deliver, or the exception to raise, when its turn comes."""
        if isinstance(outcome, Arrived):
            self._held_bytes += outcome.nbytes
        self.outcomes[sequence] = outcome
        if (
            self.deliverable() is not None
            or self._stretch.is_held_up(num_waiting=len(self.outcomes), size=self.size)
            or self._wants_place
        ):
            self.arrived.notify_all()  # the consumer takes the outcome, fills new places, or hedges

    def deliverable(self) -> int | None:
        """Return the sequence number of the next outcome in order, None if it is not there yet."""
        return self.next_sequence if self.next_sequence in self.outcomes else None

    def pop(self) -> Arrived | BaseException | None:
        """Return the next outcome in order, None if it is not there yet."""
        sequence = self.deliverable()
        if sequence is None:
            return None
        outcome = self.outcomes.pop(sequence)
        self.next_sequence += 1
        self._wants_place = False
        self._stretch.delivered()
        if isinstance(outcome, Arrived):
            self._held_bytes -= outcome.nbytes
        self._wake_lane()  # there is room in bytes, and the next request may exceed the bound
        return outcome

    def words_on_losses(self) -> str:
        """Return how many calls for the next batch were lost, empty if none were."""
        return next((item.words_on_losses() for item in self._unanswered() if item.sequence == self.next_sequence), "")

    def hedge_if_overdue(self) -> float:
        """Send the next request a second time if it is overdue and that may help. For the consumer that waits for it.

        Only the next request is hedged, because the trainer waits for no other. Requests that wait behind it on the
        same endpoint are overdue as well when their turn comes. A hedge may exceed the window's bytes by one batch,
        because a window that is full of batches that wait for this one leaves no other place for it. One of the two
        attempts ends soon. There is no hedge if the window exceeds its bytes without it, as it does with one batch that
        is too large. A purity check is not hedged either, because it would be lost with its attempt.

        Returns:
            Seconds until the request is overdue, infinite if no attempt is to be watched.
        """
        fleet, hedging = self.fleet, self.fleet.hedging
        self._wants_place = False
        attempt = next((found for found in self._attempts if found.item.sequence == self.next_sequence), None)
        if attempt is None or attempt.is_given_up:
            return math.inf
        item, now_s = attempt.item, fleet.clock()
        if len(item.attempts) > 1 or item.losses.is_suspect or item.request.verify:
            return math.inf
        remaining_s = attempt.since_s + hedging.deadline_s(item.request) - now_s
        if remaining_s > 0:
            return remaining_s
        if not hedging.budget.allows or self._expected_bytes(item.agreement, num_more=0) > self._window_bytes:
            return math.inf
        other = fleet.choose_other(item.request.spec, attempt.connection)
        if other is None:
            self._wants_place = True
            return math.inf
        hedging.budget.spend()
        fleet.stats.hedges += 1
        logger.info(
            "batch %d has been on %s for %.1f s: asking %s too",
            item.request.position,
            attempt.connection.name,
            now_s - attempt.issued_s,
            other.name,
        )
        hedge = Attempt(item, other, now_s, is_hedge=True)
        self._attempts.add(hedge)
        self._hedges.append(hedge)
        self._ensure_lane()
        self.work.notify_all()  # all, because a single notified fetcher may have been woken for a missing request
        return math.inf

    def _wake_lane(self) -> None:
        """Wake one fetcher if there is work. Usually no request is missing, because each request has its fetcher.

        A fetcher looks for work before it waits, and wakes the next fetcher if it has found some. Therefore it is
        enough to wake one fetcher when room appears. A fetcher that itself makes room needs to wake no other, because
        it looks for work next.
        """
        if self._missing:
            self.work.notify()

    def on_fleet_change(self) -> None:
        """See `hetero.dataplane.reader.fleet.Listener`."""
        self.work.notify_all()
        self.arrived.notify_all()

    def abandon(self) -> None:
        """Close now if the lock is free, otherwise soon, because this thread may hold the lock. For finalizers."""
        if self.fleet.lock.acquire(blocking=False):
            self.fleet.lock.release()
            self.close()
        else:
            self.fleet.abandoned.append(self)

    def close(self) -> None:
        """End the fetchers. Idempotent. Blocks until they have ended. Called without the lock."""
        if self._pid != os.getpid():
            return  # a forked copy: the fetchers are the parent's, and its lock may be held for ever
        with self.fleet.lock:
            self.is_closed = True
            while self._hedges:
                self._end(self._hedges.popleft())
            attempts = tuple(self._attempts)
            self.fleet.unreserve({*(attempt.item for attempt in attempts), *self._missing})
            self._missing.clear()
            self.outcomes.clear()
            self._held_bytes = 0
            self.on_fleet_change()
        for attempt in attempts:
            attempt.cancel()
        deadline_s = time.monotonic() + _JOIN_S
        for lane in self._lanes:
            if lane is not threading.current_thread():
                lane.join(max(0.0, deadline_s - time.monotonic()))

    # Fetchers

    def _ensure_lane(self) -> None:
        """Start a fetcher if all may be busy. Start at most one per request in flight and one per second attempt."""
        num_lanes = len(self._lanes)
        if num_lanes >= len(self._missing) + len(self._attempts):
            return
        if num_lanes >= self.size:
            wanted = {attempt.item.sequence for attempt in self._attempts if not attempt.is_given_up}
            if num_lanes >= self.size + len(self._attempts) - len(wanted):
                return
        lane = threading.Thread(target=self._run_lane, name=f"hetero-lane-{num_lanes}", daemon=True)
        lane.start()
        self._lanes.append(lane)  # only now, because a thread that failed to start cannot be joined

    def _run_lane(self) -> None:
        try:
            while (taken := self._take()) is not None:
                self._settle(taken, self._make(taken))
        except BaseException as error:
            logger.error("internal error", exc_info=error)
            with self.fleet.lock:
                self.fleet.fail(HeteroError(f"internal error while fetching batches: {error!r}"))

    def _take(self) -> Attempt | None:
        """Block until there is a hedge or a request to send. Return the hedge or the lowest request, None if closed."""
        with self.fleet.lock:
            while not self.is_closed:
                attempt = self._hedges.popleft() if self._hedges else self._first_askable()
                if attempt is not None:
                    self._wake_lane()
                    return attempt
                self.work.wait(min(_POLL_S, self.fleet.next_free_s()) if self._missing else _POLL_S)
        return None

    def _first_askable(self) -> Attempt | None:
        passed: set[Agreement] = set()  # data sets whose other requests lack room or an endpoint too
        for item in tuple(self._missing):
            if item.agreement in passed:
                continue
            if item.sequence != self.next_sequence and not self._has_room(item.agreement):
                passed.add(item.agreement)
                continue
            if self._awaits_verdict(item):
                continue
            connection = self.fleet.choose(item.request.spec, alone_for=item if item.losses.is_suspect else None)
            if connection is not None:
                self._missing.remove(item)
                attempt = Attempt(item, connection, self.fleet.clock(), is_alone=item.losses.is_suspect)
                self._attempts.add(attempt)
                return attempt
            if not item.losses.is_suspect:
                passed.add(item.agreement)
        return None

    def _has_room(self, agreement: Agreement) -> bool:
        bound = min(self._window_bytes, self._planned * agreement.batch_bytes + Stretch.MAX_BYTES)
        return self._expected_bytes(agreement, num_more=1) <= bound

    def _expected_bytes(self, agreement: Agreement, *, num_more: int) -> int:
        """Return the window's bytes when all attempts in progress, and ``num_more`` others, have arrived."""
        return self._held_bytes + (len(self._attempts) + num_more) * agreement.batch_bytes

    def _awaits_verdict(self, item: Item) -> bool:
        """Return whether the request must not be sent now, because one more loss could be one death too many.

        The request waits until it is known which losses were deaths. If they were, or if that does not become known in
        time, it fails.
        """
        if not item.losses.may_be_deaths(item.request.spec):
            return False
        error = item.killed_too_often() if item.losses.are_deaths else self._lost_too_long(item)
        if error is not None:
            self._missing.remove(item)
            self.fleet.unreserve((item,))
            self.put(item.sequence, error)
        return True

    def _lost_too_long(self, item: Item) -> HeteroError | None:
        """Return the error to raise if calls for this request have been lost for too long, else None."""
        lost_s = item.losses.too_long_s(self.fleet.clock(), data_timeout_s=self.data_timeout_s)
        if lost_s is None:
            return None
        what = f"batch {item.request.position} of data set {item.request.spec.name!r}"
        return self.fleet.unavailable(what, lost_s, note=item.words_on_losses())

    def _make(self, attempt: Attempt) -> Fetched | Exception:
        """Fetch the batch from the attempt's endpoint. Return it, or the exception."""
        if attempt.is_given_up:  # before the call began
            return CallFailedError(Fault.CANCELLED, "")

        def started(call: Any) -> None:
            # Without the lock. Another thread sets a flag and then looks for the call. This thread sets the call and
            # then looks for the flag. Therefore at least one of them sees the other.
            attempt.call = call
            if self.is_closed or attempt.is_given_up:
                call.cancel()

        try:
            return attempt.connection.fetch(
                attempt.item.request, timeout_s=self.data_timeout_s, allocate=self._allocate, on_call=started
            )
        except Exception as error:  # noqa: BLE001 - settled by the caller
            return error

    def _settle(self, attempt: Attempt, outcome: Fetched | Exception) -> None:
        """Store the outcome of an attempt, leave the request to its other attempt, or let it be sent again.

        This method wakes no fetcher for the room that it makes, because its own fetcher looks for work next.
        """
        item = attempt.item
        with self.fleet.lock:
            self._end(attempt)
            if self.is_closed:
                return
            if isinstance(outcome, Fetched):
                self._answered(attempt, outcome)
            if attempt.is_given_up:  # its end says nothing about the endpoint: it was cancelled, or only slightly late
                return
            if isinstance(outcome, Fetched):
                self._won(attempt, outcome)
            elif not self._is_final(attempt, outcome):
                return
            others = tuple(item.attempts)
            for other in others:
                other.is_given_up = True
        for other in others:
            other.cancel()

    def _end(self, attempt: Attempt) -> None:
        self._attempts.discard(attempt)
        attempt.item.attempts.remove(attempt)
        attempt.call = None
        self.fleet.release(attempt.connection, alone_for=attempt.item if attempt.is_alone else None)

    def _answered(self, attempt: Attempt, fetched: Fetched) -> None:
        """Record what a batch says about its endpoint and its data set, whether or not it is delivered."""
        fleet, connection, now_s = self.fleet, attempt.connection, self.fleet.clock()
        fleet.hedging.observe(attempt.item.request, now_s - attempt.since_s)
        fleet.hedging.stragglers.answered(connection)
        connection.delivered()
        connection.load, connection.load_at_s = fetched.num_queued, now_s
        fleet.stats.received_bytes += fetched.nbytes - fetched.saved_bytes
        fleet.stats.saved_bytes += fetched.saved_bytes
        if fetched.lacks_compression:
            self._note_uncompressed(attempt)
        attempt.item.agreement.observe_size(fetched.nbytes)

    def _note_uncompressed(self, attempt: Attempt) -> None:
        """Count a batch whose endpoint cannot compress. Log a warning once per host.

        Its advice is for every host, because hosts are often set up alike.
        """
        fleet, name = self.fleet, attempt.item.request.compression
        host = attempt.connection.record.host
        fleet.stats.uncompressed += 1
        if name is not None and host not in fleet.uncompressed_hosts:
            fleet.uncompressed_hosts.add(host)
            logger.warning(
                "batches from %s are not compressed: the package %s is not there; pip install it on every host",
                host,
                package_of(name),
            )

    def _won(self, attempt: Attempt, fetched: Fetched) -> None:
        stats, now_s = self.fleet.stats, self.fleet.clock()
        stats.batches += 1
        if attempt.is_hedge:
            stats.hedges_won += 1
            for other in attempt.item.attempts:
                self.fleet.hedging.stragglers.avoid(other.connection, kept_s=now_s - other.since_s, now_s=now_s)
        self.put(attempt.item.sequence, Arrived(fetched.batch, fetched.nbytes, fetched.skips, fetched.saved_bytes))

    def _is_final(self, attempt: Attempt, error: Exception) -> bool:
        """Settle a failed attempt: its request fails, is sent again, or waits for its other attempt.

        Returns:
            Whether the request has failed.
        """
        item, fleet = attempt.item, self.fleet
        final = self._failed(attempt, error)
        # The user's code raises the same everywhere, and a wrong token is wrong everywhere.
        if item.attempts and not isinstance(final, DatasetError | AuthenticationError):
            return False
        if final is not None:
            self.put(item.sequence, final)
            return True
        fleet.stats.retries += 1
        fleet.stats.failovers += isinstance(error, CallFailedError) and error.fault.is_loss
        self._insert(item)
        return False

    def _failed(self, attempt: Attempt, error: Exception) -> BaseException | None:
        """Act on a failed attempt. Return what to raise, or None to ask again."""
        fleet, item, connection = self.fleet, attempt.item, attempt.connection
        if isinstance(error, CallFailedError):
            was_first = attempt.is_lowest_of(self._unanswered())
            fleet.call_failed(connection, error, attempt.generation)
            if error.fault.is_loss:
                item.losses.add(connection, error.fault, fleet.clock(), was_first=was_first)
                return self._lost_too_long(item)
            return item.failed(connection, error, data_timeout_s=self.data_timeout_s)
        if isinstance(error, AuthenticationError):
            fleet.fail(error)
            return error
        if isinstance(error, ProtocolError):
            fleet.stats.checksum_errors += isinstance(error, ChecksumError)
            logger.warning("batch %d from %s is damaged: %s", item.request.position, connection.name, error)
            fleet.hedging.stragglers.avoid(connection, kept_s=1.0, now_s=fleet.clock())
            return item.damaged(connection, error)
        if not isinstance(error, HeteroError):
            logger.error("internal error while fetching from %s", connection.name, exc_info=error)
        return error

    def _unanswered(self) -> set[Item]:
        """Return the requests that are missing or in progress."""
        return {*self._missing, *(attempt.item for attempt in self._attempts)}

    def _insert(self, item: Item) -> None:
        bisect.insort(self._missing, item, key=lambda other: other.sequence)
