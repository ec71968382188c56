"""The batches that one reader has planned but not delivered yet, in order. Pure: no threads, no network.

A `PendingBatch` is missing (has to be requested), has one or two attempts in progress, or has an outcome. The fetchers
(`hetero.reader.fetchers`) start an attempt for a missing batch and put its outcome here. If the last attempt
of a batch fails, the batch is missing again. The consumer takes outcomes in order. The fleet's lock guards everything.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

from hetero.batches.request import BatchRequest
from hetero.reader.attempts import Attempt, PendingBatch
from hetero.reader.connection import EndpointConnection, Fetched
from hetero.reader.consistency import ServedDataset
from hetero.reader.window_size import WindowGrowth

__all__ = ["Window"]


class Window:
    """The undelivered batches of one reader in order, with limits of their number and their bytes.

    Args:
        planned: Returns the planned number of batches in flight, at least 2. The number changes with the endpoints.
        max_bytes: Bound of the bytes of all batches that have arrived or are in progress. All windows of this process
            share the bound.
        all_bytes: Returns the bytes of such batches of all windows of this process.
    """

    def __init__(self, *, planned: Callable[[], int], max_bytes: int, all_bytes: Callable[[], int]) -> None:
        self.next_sequence = 0
        """Number of the next batch to deliver."""
        self.outcomes: dict[int, Fetched | BaseException] = {}
        """Batches and exceptions that wait for their turn, by number."""
        self.missing: list[PendingBatch] = []
        """Batches to request, in order."""
        self.attempts: set[Attempt] = set()
        """Attempts in progress, including those that were given up."""
        self.request: BatchRequest | None = None
        """Request of the outcome that `pop` last returned. None at first, and after an exception of `add_failure`."""
        self._requests: dict[int, BatchRequest] = {}
        """Requests of the undelivered batches, by number."""
        self._planned = planned
        self._max_bytes = max_bytes
        self._all_bytes = all_bytes
        self._num_added = 0
        """Number of batches and exceptions that were ever added. The next one gets this number."""
        self._held_bytes = 0
        """Bytes of the batches that wait for their turn."""
        self._delivered_bytes = 0
        """Bytes of the last delivered batch, while they still count as used. See `free_delivered`."""
        self._growth = WindowGrowth()

    @property
    def size(self) -> int:
        """Largest number of batches in flight: the number that ``planned`` returns, but at least 3.

        With two batches, one might be delivered while the other is sent, and no endpoint would compute. If two are
        planned, `has_room` lets a third batch begin only if the batches beyond the planned number have at most
        `WindowGrowth.MAX_BYTES`.
        """
        # With batches of 10 MB from one endpoint, the throughput is 1.18 times as high with the third batch.
        return max(3, self._planned())

    @property
    def has_place(self) -> bool:
        """Whether another request may be added.

        The window has `size` places. It has more places while the next batch is late, and for some time after.
        """
        limit = self._growth.limit(num_waiting=len(self.outcomes), size=self.size)
        return self._num_added < self.next_sequence + limit

    @property
    def used_bytes(self) -> int:
        """Bytes of the batches that have arrived or are in progress."""
        return self._held_bytes + sum(attempt.batch.dataset.batch_bytes for attempt in self.attempts)

    @property
    def is_empty(self) -> bool:
        """Whether everything that was added has been delivered."""
        return self.next_sequence >= self._num_added

    def add(self, request: BatchRequest, dataset: ServedDataset) -> None:
        """Add a request after all others."""
        self._requests[self._num_added] = request
        self.missing.append(PendingBatch(self._num_added, request, dataset))
        self._num_added += 1

    def add_failure(self, error: Exception) -> None:
        """Add an exception, which is to be raised after all batches that were added before."""
        self.put(self._num_added, error)
        self._num_added += 1

    def put(self, sequence: int, outcome: Fetched | BaseException) -> bool:
        """Set the batch to deliver, or the exception to raise, when its turn comes.

        Returns:
            Whether the consumer has something to do: take the next outcome, or add requests because the window grew.
        """
        if isinstance(outcome, Fetched):
            self._held_bytes += outcome.nbytes
        self.outcomes[sequence] = outcome
        return self.is_deliverable or self._growth.is_held_up(num_waiting=len(self.outcomes), size=self.size)

    @property
    def is_deliverable(self) -> bool:
        """Whether the next outcome in order has arrived."""
        return self.next_sequence in self.outcomes

    def pop(self) -> Fetched | BaseException | None:
        """Return the next outcome in order, None if it has not arrived."""
        if not self.is_deliverable:
            return None
        outcome = self.outcomes.pop(self.next_sequence)
        self.request = self._requests.pop(self.next_sequence, None)
        self.next_sequence += 1
        self._growth.delivered()
        if isinstance(outcome, Fetched):
            self._held_bytes -= outcome.nbytes
            # A large batch counts until the consumer comes back, because the loop still holds it. Before this rule, in
            # one of five runs, a loop held two batches of 40 MB while two more were in flight. This took 168 MB instead
            # of 129 MB.
            self._delivered_bytes = outcome.nbytes if outcome.nbytes > WindowGrowth.MAX_BYTES else 0
        return outcome

    @property
    def counts_delivered(self) -> bool:
        """Whether the delivered batch still counts as used memory, because the consumer has not come back."""
        return self._delivered_bytes > 0

    def free_delivered(self) -> None:
        """Stop counting the bytes of the last delivered batch, because the consumer wants the next batch.

        A loop drops a batch only when it gets the next one, so it holds two batches for a moment. If the older one did
        not count before, two more batches could be in flight then. Therefore a delivered batch of more than
        `WindowGrowth.MAX_BYTES` counts as used memory until the consumer wants the next one.
        """
        self._delivered_bytes = 0

    def has_room(self, batch: PendingBatch) -> bool:
        """Return whether the bytes of a missing batch fit. The next batch to deliver always fits.

        There are two bounds. Batches beyond the planned number have at most `WindowGrowth.MAX_BYTES` together. And the
        window keeps within its part of the bound that all windows of this process share, see `_own_max_bytes`.
        """
        # The consumer waits for this batch, and nothing frees bytes before it is delivered.
        if batch.sequence == self.next_sequence:
            return True
        batch_bytes = batch.dataset.batch_bytes
        # Batches in progress, and this batch, may become as large as the largest recent batch.
        used_bytes = self._delivered_bytes + self._held_bytes + (len(self.attempts) + 1) * batch_bytes
        if used_bytes > self._planned() * batch_bytes + WindowGrowth.MAX_BYTES:
            return False
        # The script may never ask for a batch of the next epoch, so such a batch leaves more room to other loaders.
        is_of_next_epoch = self.request is not None and batch.request.epoch != self.request.epoch
        # A window may always use half of the bound. Check this first, because it needs no sum over all windows.
        if used_bytes <= self._max_bytes // 2 and not is_of_next_epoch:
            return True
        return used_bytes <= self._own_max_bytes(is_of_next_epoch=is_of_next_epoch)

    def is_over_bound(self, dataset: ServedDataset) -> bool:
        """Return whether the window will exceed its byte limit when all attempts in progress have arrived."""
        return self._held_bytes + len(self.attempts) * dataset.batch_bytes > self._own_max_bytes()

    def _own_max_bytes(self, *, is_of_next_epoch: bool = False) -> int:
        """Return the bound of this window's bytes.

        All windows of this process share one bound. But each window may use half of the bound, whatever the others use.
        A batch of the next epoch is requested only while all windows together use less than half of the bound. So the
        other half is left for loaders whose pass is in progress.
        """
        others_bytes = self._all_bytes() - self.used_bytes
        if is_of_next_epoch:
            return self._max_bytes // 2 - others_bytes
        return max(self._max_bytes - others_bytes, self._max_bytes // 2)

    def start(
        self, batch: PendingBatch, connection: EndpointConnection, now_s: float, *, is_hedge: bool = False
    ) -> Attempt:
        """Start an attempt to get a batch: the first of a missing batch, or the second if ``is_hedge`` is true."""
        if not is_hedge:
            self.missing.remove(batch)
            batch.was_requested = True
        attempt = Attempt(batch, connection, now_s, is_alone=batch.poison.is_suspect, is_hedge=is_hedge)
        self.attempts.add(attempt)
        return attempt

    def end(self, attempt: Attempt) -> None:
        """Record that an attempt has ended, whatever its outcome."""
        self.attempts.discard(attempt)
        attempt.batch.attempts.remove(attempt)
        attempt.call = None

    def retry(self, batch: PendingBatch) -> None:
        """Make a batch missing again, because its attempts have failed."""
        # Insert the batch in order, because fetchers request the first batch of the list first. The consumer waits for
        # the lowest.
        bisect.insort(self.missing, batch, key=lambda other: other.sequence)

    def attempt_of_next(self) -> Attempt | None:
        """Return an attempt to get the next batch, None if none is in progress."""
        return next((attempt for attempt in self.attempts if attempt.batch.sequence == self.next_sequence), None)

    def unanswered(self) -> set[PendingBatch]:
        """Return the batches that are missing or in progress."""
        return {*self.missing, *(attempt.batch for attempt in self.attempts)}

    def describe_lost_calls(self) -> str:
        """Return how many calls for the next batch were lost, empty if none were."""
        waiting = (batch for batch in self.unanswered() if batch.sequence == self.next_sequence)
        return next((batch.describe_lost_calls() for batch in waiting), "")

    def clear(self) -> None:
        """Forget everything except the attempts in progress."""
        self.missing.clear()
        self.outcomes.clear()
        self._held_bytes = self._delivered_bytes = 0
