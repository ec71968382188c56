"""The threads of one reader that fetch batches and act on the outcome of each fetch.

Each fetcher takes the first missing batch of the window, lets the router choose an endpoint, fetches the batch, and
puts the outcome into the window. If the consumer waits for an overdue batch, the consumer orders a second attempt,
which another fetcher makes. The first answer is used, and the other attempt is cancelled. The fleet's lock guards
everything. No thread holds this lock during a call.

The consumer may fetch batches that are not large without a fetcher: see `hetero.reader.inline_fetches`. If a connection
has to be opened, or if a connection fails, a fetcher takes over.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hetero.batches.request import BatchRequest
from hetero.errors import HeteroError
from hetero.reader.attempts import Attempt, PendingBatch
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.consistency import ServedDataset
from hetero.reader.fleet import Fleet
from hetero.reader.inline_fetches import InlineFetches
from hetero.reader.outcomes import Outcomes
from hetero.reader.window import Window
from hetero.system.waits import END_TIMEOUT_S, POLL_S
from hetero.wire.faults import CallFailedError, Fault
from hetero.wire.limits import AT_ONCE_BYTES

__all__ = ["Fetchers"]

logger = logging.getLogger(__name__)

# Contract of the reader's locks and wake-ups. If this does not hold, it is a bug.
#
# Threads. The consumer is the script's thread in `Reader.__next__`. A reader has at most one fetcher for each batch in
# flight. A process has one watcher (`Fleet._follow`) and a short-lived thread for each preparation.
#
# Locks.
#   1. `Fleet.lock` guards the fleet, its connections, and the windows and attempts of all readers. A thread that holds
#      it calls nothing that may block or that belongs to the user: no network, no sampler, no `allocate`, no callback.
#   2. `InlineFetches.lock` guards the requests that the consumer has sent itself. The consumer holds it while it waits
#      for their answers.
#   3. A thread may take `Fleet.lock` while it holds `InlineFetches.lock`, never the other way round. The watcher, which
#      receives for a consumer that stays away, only tries `InlineFetches.lock`. So a waiting consumer cannot block it.
#
# Attempts.
#   4. An attempt starts with the lock (`Window.start`), which counts its endpoint as occupied. It ends exactly once, in
#      `Outcomes.end`, which gives the endpoint back. `settle` and `close` may both end it: the second does nothing.
#   5. A batch has one outcome. The first attempt with an answer gives it. The others are marked as given up before they
#      are cancelled, because a cancelled call would otherwise count as a loss of its endpoint.
#   6. After `close` has set `is_closed`, no outcome reaches the window, and each call that begins sees the flag and
#      cancels itself (`_on_call`).
#
# Who wakes whom. Each wait looks at the state again when it ends, and has a bound, so a wake-up may be one too many.
#   the next batch in order has its outcome, or the window grew   -> the consumer
#   any outcome, while an overdue batch needs another endpoint    -> the consumer, which hedges
#   a batch is missing (new, or to be requested again)            -> one fetcher
#   a fetcher has found work                                      -> one further fetcher, if a batch is missing still
#   the consumer took a batch, so bytes are free                  -> one fetcher, if a batch is missing
#   the consumer ordered a second attempt                         -> all fetchers
#   an endpoint came, left or is free; or the reader closes       -> the consumers and all fetchers of all its readers
# The consumer waits in one of two places: for `_outcome_arrived`, or in `InlineFetches.receive`, which
# `InlineFetches.wake` ends. `prepare_to_receive` is called before the lock is released, because a wake-up could be lost
# otherwise.


class Fetchers:
    """The fetchers of one reader. Methods need the fleet's lock unless their docstring says otherwise.

    Args:
        fleet: The endpoints.
        window: The reader's batches.
        allocate: See `hetero.reader.reader.Reader`.
    """

    def __init__(
        self,
        fleet: Fleet,
        window: Window,
        *,
        allocate: Callable[[int], memoryview] | None,
    ) -> None:
        self._fleet = fleet
        self._router = fleet.router
        self._hedging = fleet.hedging
        self.window = window
        """The reader's batches."""
        self._allocate = allocate
        self._outcome_arrived = threading.Condition(fleet.lock)  # the consumer waits for this condition
        self._work_exists = threading.Condition(fleet.lock)  # the fetchers wait for this condition
        self._for_fetchers: deque[Attempt] = deque()  # started attempts: hedges, and attempts that were handed over
        self._outcomes = Outcomes(
            fleet,
            window,
            on_outcome=self._on_outcome,
            on_missing=self._engage_fetcher,
        )
        self._inline = InlineFetches(
            fleet.clock, settle=self._outcomes.settle, hand_over=functools.partial(self._hand_over, was_sent=True)
        )
        # Whether the consumer's batch is overdue, and no endpoint is less busy than the one that has the request.
        self._needs_endpoint = False
        self._threads: list[threading.Thread] = []
        self._pid = os.getpid()  # a forked process has no fetchers, see `close`

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._outcomes.is_closed

    # For the consumer

    def add(self, request: BatchRequest, dataset: ServedDataset) -> Attempt | None:
        """Put a request into the window.

        Args:
            request: The request.
            dataset: Its data set.

        Returns:
            The attempt of a missing batch whose request the consumer has to `send` itself, or None.
        """
        # Each request, and not each attempt, adds to the budget of hedges. A busy endpoint refuses a request several
        # times a second. When each attempt added to the budget, the busiest endpoints got the most hedges.
        self._hedging.budget.earn()
        self.window.add(request, dataset)
        attempt = self._start_inline()
        if self.window.missing:
            self._engage_fetcher()
        return attempt

    def _start_inline(self) -> Attempt | None:
        """Start an attempt for the first missing batch if the consumer should send the request itself."""
        batch = self.window.missing[0]
        if (
            not batch.dataset.receiver.is_consumer
            # Fetchers receive larger batches, because several fetchers can receive at the same time.
            or batch.dataset.batch_bytes > AT_ONCE_BYTES
            # An attempt has failed. Leave the batch to fetchers, because they know what to do with suspect batches.
            or batch.was_requested
            or not self.window.has_room(batch)
        ):
            return None
        connection = self._choose(batch)
        if connection is None:
            return None
        attempt = self._start(batch, connection)
        attempt.is_inline = True
        return attempt

    def _choose(
        self, batch: PendingBatch, *, alone_for: object | None = None, is_optional_allowed: bool = True
    ) -> EndpointConnection | None:
        """Return the endpoint for a batch, see `Router.choose`."""
        return self._router.choose(
            batch.request.spec,
            lane=batch.request.lane,
            may_leave_lane=batch.request.work.may_be_hedged,
            alone_for=alone_for,
            is_optional_allowed=is_optional_allowed,
        )

    def _start(self, batch: PendingBatch, connection: EndpointConnection) -> Attempt:
        """Start an attempt for a missing batch. If other hosts have its samples in a cache, let them compute these."""
        attempt = self.window.start(batch, connection, self._fleet.clock())
        request = batch.request
        if (
            # If one sample raises, the helper that computes it sends none of its samples. With "skip", samples that
            # raise are expected, so helpers would often compute in vain.
            request.on_sample_error == "raise"
            # A request that may kill endpoints must reach one endpoint only, so it asks no helpers.
            and not batch.poison.num_calls
            # An optional endpoint has skipped samples of this batch. One endpoint of the plan must itself try them all.
            and not batch.doubted
            # A purity check computes all samples twice on one endpoint.
            and not request.verify
        ):
            attempt.helpers, attempt.owners = self._router.choose_owners(request, connection)
        return attempt

    def send(self, attempt: Attempt) -> None:
        """Send the request of an attempt that `add` returned. Does not block. Called without the lock."""
        try:
            sent = attempt.connection.begin(
                attempt.request,
                timeout_s=self._fleet.data_timeout_s,
                allocate=self._allocate,
                on_call=functools.partial(self._on_call, attempt),
            )
        except Exception as error:  # noqa: BLE001 - delivered as the batch's outcome
            self._outcomes.settle(attempt, error)
            return
        # The request could not be sent without blocking, for example because no connection is idle.
        if sent is None:
            self._hand_over(attempt)
            return
        with self._inline.lock:
            # A signal handler may have closed the reader since the request was sent.
            if not self.is_closed:
                self._inline.add(attempt, sent)
                return
        sent.give_up()
        self._outcomes.settle(attempt, CallFailedError(Fault.CANCELLED, details=""))

    def pop(self) -> Fetched | BaseException | None:
        """Return the next outcome in order, None if it has not arrived."""
        outcome = self.window.pop()
        if outcome is not None:
            self._needs_endpoint = False
            # A fetcher may now have room for a missing batch, because the delivery has freed bytes, and because the
            # batch that is next to deliver is allowed to exceed the byte limit.
            self._wake_one()
        return outcome

    def free_delivered(self) -> None:
        """Stop counting the bytes of the last delivered batch, because the consumer wants the next batch."""
        self.window.free_delivered()
        self._wake_one()

    def wait(self, timeout_s: float) -> None:
        """Wait until the consumer may go on. Hedge the batch that it waits for if that batch is overdue."""
        timeout_s = min(timeout_s, self.hedge_if_overdue())
        # If the consumer has sent no request itself, all answers go to fetchers, which wake the consumer.
        if not len(self._inline):
            self._outcome_arrived.wait(timeout_s)
            return
        self._inline.prepare_to_receive()
        # The caller holds the lock. Release it during the wait, as `Condition.wait` does.
        self._fleet.lock.release()
        try:
            self._inline.receive(timeout_s)
        finally:
            self._fleet.lock.acquire()

    def hedge_if_overdue(self) -> float:
        """Request the next batch a second time if it is overdue and a second attempt may help.

        Only the next batch to deliver is hedged, because the trainer waits for no other batch. Batches that wait behind
        it on the same endpoint will be overdue as well when they are next. While the next batch is overdue, the window
        is full of batches that wait for it. Therefore a hedge may exceed the window's byte limit by one batch until one
        of the two attempts ends. If the window already exceeds its limit, for example by one very large batch, the
        batch is not hedged. A request with a purity check is not hedged either, because the check is lost if its
        attempt is cancelled.

        Returns:
            Seconds until the batch is overdue. Infinite if it is overdue already, or is not hedged now. The consumer
            calls this method again at least twice a second while it waits.
        """
        self._needs_endpoint = False
        attempt = self.window.attempt_of_next()
        if attempt is None or attempt.is_given_up:
            return math.inf
        batch, now_s = attempt.batch, self._fleet.clock()
        # A suspect request may kill endpoints, so only one endpoint gets it. A purity check is lost if its attempt is
        # cancelled.
        may_be_hedged = batch.request.work.may_be_hedged and not batch.request.verify
        if len(batch.attempts) > 1 or batch.poison.is_suspect or not may_be_hedged:
            return math.inf
        remaining_s = attempt.since_s + self._hedging.deadline_s(batch.request) - now_s
        if remaining_s > 0:
            return remaining_s
        if not self._hedging.budget.allows or self.window.is_over_bound(batch.dataset):
            return math.inf
        other = self._router.choose_other(batch.request.spec, attempt.connection)
        if other is None:
            self._needs_endpoint = True
            return math.inf
        self._hedging.budget.spend()
        self._fleet.stats.hedges += 1
        logger.info(
            "batch %d was requested from %s %.1f s ago, requesting it from %s too",
            batch.request.position,
            attempt.connection.name,
            now_s - attempt.issued_s,
            other.name,
        )
        self._for_fetchers.append(self.window.start(batch, other, now_s, is_hedge=True))
        self._ensure_thread()
        # Wake all fetchers, because a single one may take a missing batch instead.
        self._work_exists.notify_all()
        return math.inf

    def _on_outcome(self, has_work: bool) -> None:
        """Wake the consumer if it has something to do: take an outcome, add requests, or make a second attempt.

        ``has_work`` is the return value of `Window.put`. It does not cover a second attempt that needs an endpoint.
        """
        # Any outcome may free the endpoint that a second attempt needs.
        if has_work or self._needs_endpoint:
            self._wake_consumer()

    def _engage_fetcher(self) -> None:
        """Start a fetcher if there are too few, and wake one. It requests a missing batch, or makes a queued call."""
        self._ensure_thread()
        self._work_exists.notify()

    def _wake_consumer(self) -> None:
        self._outcome_arrived.notify_all()
        self._inline.wake()

    # For the fleet

    def on_fleet_change(self) -> None:
        """See `hetero.reader.fleet.FleetListener`."""
        self._work_exists.notify_all()
        self._wake_consumer()

    def receive_for_absent(self) -> None:
        """See `hetero.reader.fleet.FleetListener`."""
        self._inline.receive_for_absent()

    def abandon(self) -> None:
        """Close soon, in another thread. For finalizers, which may run in a thread that holds any lock."""
        if self._pid == os.getpid():
            self._fleet.close_later(self)

    def close(self) -> None:
        """Cancel the attempts and end the fetchers. Idempotent. Blocks until they have ended. Called without the lock.

        In a forked process this does nothing, because the fetchers run in the parent and the lock may be held for ever.
        """
        if self._pid != os.getpid():
            return
        window = self.window
        with self._fleet.lock:
            # From here on no outcome reaches the window, and calls that begin cancel themselves.
            self._outcomes.is_closed = True
            # No fetcher will take these attempts, so end them here.
            while self._for_fetchers:
                self._outcomes.end(self._for_fetchers.popleft())
            attempts = tuple(window.attempts)
            self._router.unreserve(window.unanswered())
            window.clear()
            self.on_fleet_change()
        for attempt in attempts:
            attempt.cancel()
        # Every thread takes the locks in this order. With both orders, two threads could wait for each other for ever.
        # The consumer releases the first lock, because `on_fleet_change` has ended its wait.
        with self._inline.lock, self._fleet.lock:
            self._inline.close()
            # End the consumer's own attempts here. Each fetcher ends its attempt itself, after the call.
            for attempt in attempts:
                if attempt.is_inline:
                    # An exception may have ended the consumer before it added the fetch.
                    if attempt.call is not None:
                        attempt.call.give_up()
                    self._outcomes.end(attempt)
            self._fleet.count_outstanding()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    # The threads

    def _ensure_thread(self) -> None:
        """Start a fetcher, unless there are enough for the present work or the limit is reached.

        The limit is one fetcher for each place in the window, and one for each attempt beyond the first of a batch.
        """
        window, num_threads = self.window, len(self._threads)
        # The work: batches to request, and attempts that the consumer does not make itself.
        if num_threads >= len(window.missing) + len(window.attempts) - len(self._inline):
            return
        # Attempts beyond one for each batch are second attempts, or were given up and still occupy their fetcher.
        batches = {attempt.batch.sequence for attempt in window.attempts if not attempt.is_given_up}
        num_further_attempts = len(window.attempts) - len(batches)
        if num_threads >= window.size + num_further_attempts:
            return
        thread = threading.Thread(target=self._run, name=f"hetero-fetcher-{num_threads}", daemon=True)
        thread.start()
        # Add the thread only after it has started, because a thread that failed to start cannot be joined. When the
        # process could start no more threads, closing the reader raised a second error.
        self._threads.append(thread)

    def _wake_one(self) -> None:
        """Wake one fetcher if a batch is missing. Usually no batch is missing, because each has its own fetcher.

        A fetcher looks for work before it waits, and wakes another fetcher if it finds work. Therefore it is enough to
        wake one fetcher. A fetcher that frees room looks for work next, so it need not wake another.
        """
        if self.window.missing:
            self._work_exists.notify()

    def _run(self) -> None:
        """Fetch batches until the reader is closed. Runs in a fetcher's thread."""
        try:
            while (attempt := self._next_attempt()) is not None:
                self._outcomes.settle(attempt, self._fetch(attempt))
        except BaseException as error:
            # A fetcher that ends must end the reading too. Otherwise the consumer would wait for its batch for ever.
            logger.error("internal error", exc_info=error)
            with self._fleet.lock:
                self._fleet.fail(HeteroError(f"internal error while fetching batches: {error!r}"))

    def _next_attempt(self) -> Attempt | None:
        """Block until there is a started attempt, or a missing batch to request. Return the attempt, None if closed."""
        with self._fleet.lock:
            while not self.is_closed:
                attempt = self._for_fetchers.popleft() if self._for_fetchers else self._start_first()
                if attempt is not None:
                    self._wake_one()
                    return attempt
                # Nothing wakes a fetcher when a busy endpoint may be asked again. Without the bound `next_free_s`, the
                # endpoint was asked after 0.5 s instead of 0.2 s.
                self._work_exists.wait(min(POLL_S, self._router.next_free_s()) if self.window.missing else POLL_S)
        return None

    def _start_first(self) -> Attempt | None:
        """Start an attempt for the lowest missing batch that has room and an endpoint."""
        # Data sets that lack room or an endpoint for one batch, and so for all. With a lane, for all of this lane.
        passed: set[tuple[ServedDataset, int | None]] = set()
        # A copy, because `_is_held_back` removes batches that fail.
        for batch in tuple(self.window.missing):
            lane = None if batch.request.work.may_be_hedged else batch.request.lane
            if (batch.dataset, None) in passed or (batch.dataset, lane) in passed:
                continue
            if not self.window.has_room(batch):
                passed.add((batch.dataset, None))
                continue
            if self._is_held_back(batch):
                continue
            is_suspect = batch.poison.is_suspect
            # Optional endpoints have skipped samples of a doubted batch. An endpoint that the job was planned with must
            # compute it too, to show whether the samples or the optional endpoints are to blame.
            needs_planned = bool(batch.doubted) and batch.dataset.has_planned(self._router.endpoints)
            connection = self._choose(
                batch, alone_for=batch if is_suspect else None, is_optional_allowed=not needs_planned
            )
            if connection is not None:
                return self._start(batch, connection)
            # A suspect batch needs an endpoint for itself. If it or a doubted batch gets no endpoint, other batches of
            # the data set may still get one.
            if not is_suspect and not needs_planned:
                passed.add((batch.dataset, lane))
        return None

    def _is_held_back(self, batch: PendingBatch) -> bool:
        """Return whether the batch must not be requested now, because it may have killed too many endpoints.

        The batch waits until it is known which of the lost endpoints died. If too many died, the batch fails. If this
        does not become known in time, the batch fails too.
        """
        if not batch.poison.is_possible(batch.request.spec):
            return False
        error = batch.killed_too_often() if batch.poison.is_proven else self._outcomes.lost_too_long(batch)
        if error is not None:
            self.window.missing.remove(batch)
            self._router.unreserve((batch,))
            self._outcomes.deliver(batch, error)
        return True

    def _fetch(self, attempt: Attempt) -> Fetched | Exception:
        """Fetch the batch from the attempt's endpoint. Return it, or the exception. Without the lock."""
        # If the attempt is given up, the other attempt settled the batch before this call began.
        if attempt.is_given_up:
            return CallFailedError(Fault.CANCELLED, details="")
        try:
            return attempt.connection.fetch(
                attempt.request,
                timeout_s=self._fleet.data_timeout_s,
                allocate=self._allocate,
                on_call=functools.partial(self._on_call, attempt),
                was_sent=attempt.was_sent,
            )
        except Exception as error:  # noqa: BLE001 - settled by the caller
            return error

    def _on_call(self, attempt: Attempt, call: Any) -> None:
        """Keep the call that begins, for threads that cancel it. Cancel the call at once if it is not needed."""
        # No lock is needed. This thread sets the call and then reads the flags. A thread that cancels sets a flag and
        # then reads the call. Therefore at least one of the two threads cancels the call.
        attempt.call = call
        if self.is_closed or attempt.is_given_up:
            call.cancel()

    def _hand_over(self, attempt: Attempt, *, was_sent: bool = False) -> None:
        """Let a fetcher make the call of an attempt that the consumer has started.

        ``was_sent``: whether the consumer has sent the request, over a connection that then failed.
        """
        with self._fleet.lock:
            # The consumer no longer makes this call itself.
            attempt.is_inline, attempt.was_sent = False, was_sent
            if self.is_closed:
                self._outcomes.end(attempt)
                return
            # If the request was sent, the fetcher sends it a second time, which counts as a retry.
            self._fleet.stats.retries += was_sent
            attempt.issued_s = self._fleet.clock()
            self._for_fetchers.append(attempt)
            self._engage_fetcher()
