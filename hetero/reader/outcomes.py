"""What the outcome of an attempt means for its batch, its endpoint and its data set. No threads, no network.

An attempt ends with a batch or with an exception. The batch is then delivered, fails, or is requested again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from hetero.errors import AuthenticationError, DatasetError, HeteroError, ProtocolError
from hetero.reader.attempts import Attempt, PendingBatch
from hetero.reader.connection import Fetched
from hetero.reader.fleet import Fleet
from hetero.reader.window import Window
from hetero.wire.compression import ChecksumError
from hetero.wire.faults import CallFailedError

__all__ = ["Outcomes"]

logger = logging.getLogger(__name__)


class Outcomes:
    """Settles the attempts of one reader. Methods need the fleet's lock unless their docstring says otherwise.

    Args:
        fleet: The endpoints.
        window: The reader's batches.
        on_outcome: Called when the outcome of a batch is in the window. Its argument says whether the consumer has
            something to do.
        on_missing: Called when all attempts of a batch have failed, so the batch has to be requested again.
    """

    def __init__(
        self,
        fleet: Fleet,
        window: Window,
        *,
        on_outcome: Callable[[bool], None],
        on_missing: Callable[[], None],
    ) -> None:
        self.is_closed = False
        """Whether outcomes no longer matter."""
        self._fleet = fleet
        self._router = fleet.router
        self._hedging = fleet.hedging
        self._window = window
        self._on_outcome = on_outcome
        """Called when an outcome is in the window. The argument says whether the consumer has something to do."""
        self._on_missing = on_missing
        """Called when a batch has to be requested again."""

    def settle(self, attempt: Attempt, outcome: Fetched | Exception, *, answered_s: float | None = None) -> None:
        """Deliver the outcome of an attempt, leave the batch to its other attempt, or let the batch be requested again.

        If an outcome is delivered, the other attempt is cancelled. Called without the lock.

        Args:
            attempt: The attempt that ended.
            outcome: The batch, or the exception.
            answered_s: Monotonic time when the batch arrived. None if it has just arrived.
        """
        batch = attempt.batch
        with self._fleet.lock:
            # End the attempt even if its outcome no longer matters, because its endpoint is free again.
            self.end(attempt)
            if self.is_closed:
                return
            if isinstance(outcome, Fetched):
                self._answered(attempt, outcome, answered_s)
            # The attempt was cancelled or slightly slower than the other one, so its endpoint is not to blame.
            if attempt.is_given_up:
                return
            if isinstance(outcome, Fetched):
                if self._is_doubted(attempt, outcome):
                    self._retry(batch)
                    return
                self._won(attempt, outcome)
            elif not self._settle_failure(attempt, outcome):
                return
            others = tuple(batch.attempts)
            # Mark the other attempt before it is cancelled below. Otherwise its end would count as a loss of its
            # endpoint.
            for other in others:
                other.is_given_up = True
        for other in others:
            other.cancel()

    def _is_doubted(self, attempt: Attempt, fetched: Fetched) -> bool:
        """Return whether an endpoint that the job was planned with must compute the batch too.

        An optional endpoint that skips a sample may lack its file. If the planned endpoint does not skip the sample,
        the optional one is no longer used.
        """
        batch, used = attempt.batch, self._router.endpoints
        skipped = frozenset(skip.index for skip in fetched.skips.listed) if fetched.skips is not None else frozenset()
        # An optional endpoint has skipped samples, so an endpoint of the plan must try them too.
        if skipped and attempt.connection.record.is_optional and batch.dataset.has_planned(used):
            batch.doubted[attempt.connection] = skipped
            return True
        # This batch will be delivered. An optional endpoint that skipped one of its samples is no longer used.
        for connection, indices in batch.doubted.items():
            if missing := indices - skipped:
                why = f"it skipped sample {min(missing)}, and {attempt.connection.record.endpoint_id} did not"
                batch.dataset.leave_to_others(connection, used, why)
        return False

    def end(self, attempt: Attempt) -> None:
        """Record that an attempt has ended. Idempotent."""
        if attempt not in self._window.attempts:
            return
        self._window.end(attempt)
        self._router.release(attempt.connection, alone_for=attempt.batch if attempt.is_alone else None)

    def deliver(self, batch: PendingBatch, outcome: Fetched | BaseException) -> None:
        """Put the outcome of a batch into the window."""
        self._on_outcome(self._window.put(batch.sequence, outcome))

    def _answered(self, attempt: Attempt, fetched: Fetched, answered_s: float | None) -> None:
        """Record what a batch says about its endpoint and its data set, whether or not it is delivered."""
        request, stats, now_s = attempt.batch.request, self._fleet.stats, self._fleet.clock()
        # An answer may have lain in the socket while the script was away. This time does not count in ``took_s``.
        answered_s = now_s if answered_s is None else min(answered_s, now_s)
        # Count only the computation, from `since_s` on. The time from the request on also contains the time in the
        # endpoint's queue, which depends on how many requests this rank has in flight.
        took_s = max(0.0, answered_s - attempt.since_s)
        self._hedging.observe(request, took_s)
        # A batch has several parts if other hosts have computed those of its samples that they keep.
        stats.gathered += fetched.num_parts > 1
        attempt.connection.delivered(num_queued=fetched.num_queued, now_s=now_s)
        stats.received_bytes += fetched.nbytes - fetched.saved_bytes
        stats.saved_bytes += fetched.saved_bytes
        if fetched.lacks_compression:
            self._fleet.note_uncompressed(attempt.connection, request.compression)
        attempt.batch.dataset.observe_size(fetched.nbytes)

    def _won(self, attempt: Attempt, fetched: Fetched) -> None:
        """Deliver a batch. If it is from a hedge, avoid the endpoint of the first attempt.

        If other hosts computed parts of the first attempt, these hosts may be to blame for the delay. Then the endpoint
        of the first attempt is avoided only if it has sent no answer since the request.
        """
        self._fleet.stats.batches += 1
        if attempt.is_hedge:
            self._fleet.stats.hedges_won += 1
            now_s = self._fleet.clock()
            for other in attempt.batch.attempts:
                # Without ``owners``, no other host computed a part.
                if other.owners is None or other.connection.delivered_at_s < other.issued_s:
                    other.connection.avoid(kept_s=now_s - other.since_s, now_s=now_s)
        self.deliver(attempt.batch, fetched)

    def _settle_failure(self, attempt: Attempt, error: Exception) -> bool:
        """Act on a failed attempt. Its batch fails, will be requested again, or waits for its other attempt.

        Returns:
            Whether the batch has failed.
        """
        batch, stats = attempt.batch, self._fleet.stats
        final = self._failed(attempt, error)
        # Wait for the other attempt if one is in progress, unless the user's code raises or the token is wrong. Then
        # the other attempt cannot help.
        if batch.attempts and not isinstance(final, DatasetError | AuthenticationError):
            return False
        if final is not None:
            self.deliver(batch, final)
            return True
        stats.failovers += isinstance(error, CallFailedError) and error.fault.is_loss
        self._retry(batch)
        return False

    def _retry(self, batch: PendingBatch) -> None:
        """Let a batch be requested again, unless its other attempt is in progress."""
        if not batch.attempts:
            self._fleet.stats.retries += 1
            self._window.retry(batch)
            self._on_missing()

    def _failed(self, attempt: Attempt, error: Exception) -> BaseException | None:
        """Record a failed attempt in its endpoint and its batch. Return the exception to raise, or None to retry."""
        fleet, batch, connection = self._fleet, attempt.batch, attempt.connection
        if isinstance(error, CallFailedError):
            # If the endpoint was lost, this request may have killed it (`PoisonDetector`). Endpoints compute requests
            # in order, so the first request on a lost endpoint probably was in progress there.
            was_first = attempt.is_lowest_of(self._window.unanswered())
            fleet.call_failed(connection, error, attempt.generation)
            if error.fault.is_loss:
                batch.poison.add(connection, error.fault, fleet.clock(), was_first=was_first)
                return self.lost_too_long(batch)
            return batch.failed(connection, error, data_timeout_s=self._fleet.data_timeout_s)
        if isinstance(error, AuthenticationError):
            fleet.fail(error)
            return error
        if isinstance(error, ProtocolError):
            fleet.stats.checksum_errors += isinstance(error, ChecksumError)
            logger.warning("batch %d from %s is damaged: %s", batch.request.position, connection.name, error)
            # Avoid the endpoint for a second. `avoid` doubles this time with each repetition.
            connection.avoid(kept_s=1.0, now_s=fleet.clock())
            return batch.damaged(connection, error)
        if isinstance(error, DatasetError):
            why = str(error).splitlines()[0]
            return None if batch.dataset.leave_to_others(connection, self._router.endpoints, why) else error
        # All other errors are final at once, because a repetition gives the same error. A batch with a type that this
        # process lacks (`UnknownTypeError`) was once requested three times and counted as damaged.
        if not isinstance(error, HeteroError):
            logger.error("internal error while fetching from %s", connection.name, exc_info=error)
        return error

    def lost_too_long(self, batch: PendingBatch) -> HeteroError | None:
        """Return the error to raise if calls for this batch have been lost for too long, else None."""
        lost_s = batch.poison.too_long_s(self._fleet.clock(), data_timeout_s=self._fleet.data_timeout_s)
        if lost_s is None:
            return None
        what = f"batch {batch.request.position} of data set {batch.request.spec.name!r}"
        return self._fleet.unavailable(what, lost_s, note=batch.describe_lost_calls())
