"""One request in flight, its attempts, and what a failed attempt means for it. No threads, no network."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.batches.failures import dataset_error, index_text
from hetero.batches.request import BatchRequest, Helper
from hetero.errors import BatchTimeoutError, DataPlaneError, DatasetError, ProtocolError
from hetero.reader.connection import EndpointConnection
from hetero.reader.consistency import ServedDataset
from hetero.spec import DatasetSpec
from hetero.wire.faults import MAX_ATTEMPTS, CallFailedError, Fault

__all__ = ["Attempt", "PendingBatch", "PoisonDetector"]

_MAX_NAMED_INDICES = 64
"""Largest number of indices in a message about a batch that killed endpoints or may have killed them."""


@dataclass(slots=True)
class PoisonDetector:
    """The endpoints that were lost while they had one request, and whether the request may have killed them.

    If an endpoint ends while its host stays, the request may have killed it. After three such deaths the request fails
    with an error that names its indices. The loss of a whole host says nothing about the request, because cables are
    cut and spot instances are taken away. Such losses are limited by the number of endpoints and by `too_long_s`.
    """

    endpoints: list[EndpointConnection] = field(default_factory=list)
    """Endpoints that were lost while they had the request. The request may have killed them."""
    is_suspect: bool = False
    """Whether the request may have killed its endpoint. Then its endpoint gets no other request of this process."""
    num_calls: int = 0
    """Calls that failed because the endpoint was lost, whether or not it had the request."""
    first_s: float = 0.0
    """Monotonic time when the first of the ``num_calls`` calls failed."""

    def add(self, connection: EndpointConnection, fault: Fault, now_s: float, *, was_first: bool) -> None:
        """Record that the request's endpoint could not be reached or was lost.

        Suspect the request only if it was sent and its answer had not begun. An answer that has begun proves that the
        batch was computed, so the request did not kill the endpoint. The request that the endpoint was probably
        computing (``was_first``) becomes a suspect at its first loss. Any other request becomes a suspect at its second
        loss. Therefore a request that kills endpoints is a suspect before it kills the third one. And the loss of a
        host does not make suspects of all requests that were queued there.
        """
        if not self.num_calls:
            self.first_s = now_s
        self.num_calls += 1
        # With UNREACHABLE, the request was sent at least in part, and the endpoint was lost before its answer began.
        # With UNSENT, the endpoint did not get the request. With CUT_OFF, the answer had begun, so the batch was
        # computed. When losses during an answer counted, three kills of endpoints during answers of 32 MB ended a job
        # whose samples were not to blame.
        if fault is not Fault.UNREACHABLE:
            return
        # An endpoint that is lost a second time has served again after the first loss, so the first loss was not its
        # death. List the endpoint only once, because it has died at most once.
        is_repeated = connection in self.endpoints
        if not is_repeated:
            self.endpoints.append(connection)
        self.is_suspect = was_first or is_repeated or len(self.endpoints) > 1

    def is_possible(self, spec: DatasetSpec) -> bool:
        """Return whether it is still possible that the request killed three endpoints.

        First, remove the endpoints that have not died from `endpoints`. An endpoint has not died if it serves again,
        or if it left the directory together with its host.

        Args:
            spec: The request's data set.
        """
        self.endpoints = [
            lost for lost in self.endpoints if not (lost.serves(spec) or (lost.is_retired and not lost.has_died))
        ]
        return len(self.endpoints) >= MAX_ATTEMPTS

    @property
    def is_proven(self) -> bool:
        """Whether the request has to fail, because three of the lost endpoints are known to have died."""
        return sum(lost.has_died for lost in self.endpoints) >= MAX_ATTEMPTS

    def too_long_s(self, now_s: float, *, data_timeout_s: float) -> float | None:
        """Return for how many seconds calls for this request have been lost if that is too long, else None.

        This limit is needed, because calls can be lost for ever without three known deaths. An endpoint may come back
        after each loss, but never deliver a batch. It may never become known whether an endpoint died. And hosts can be
        lost one by one.
        """
        lost_s = now_s - self.first_s
        return lost_s if self.num_calls >= MAX_ATTEMPTS and lost_s > data_timeout_s else None


# Compared by identity, because windows keep them in sets.
@dataclass(slots=True, eq=False)
class PendingBatch:
    """One request, from its planning until its batch or its error has arrived."""

    sequence: int
    request: BatchRequest
    dataset: ServedDataset
    was_requested: bool = False
    """Whether there was an attempt. The consumer itself makes only the first attempt of a batch."""
    poison: PoisonDetector = field(default_factory=PoisonDetector)
    attempts: list[Attempt] = field(default_factory=list)
    """The attempts in progress, at most two."""
    doubted: dict[EndpointConnection, frozenset[str]] = field(default_factory=dict)
    """Optional endpoints that skipped samples of the batch, with the indices of these samples.

    An endpoint that the job was planned with then computes the batch too. Its result shows whether the samples or the
    optional endpoints are to blame.
    """
    num_failures: Counter[str] = field(default_factory=Counter)
    """Attempts that were late, broken (by an internal error of the endpoint) or damaged."""

    def failed(
        self, connection: EndpointConnection, error: CallFailedError, *, data_timeout_s: float
    ) -> BaseException | None:
        """Record a failed call whose endpoint was not lost. Return the exception to raise, or None to retry."""
        if error.fault is Fault.LATE:
            message = (
                f"no batch arrived within {data_timeout_s:g} s in {MAX_ATTEMPTS} attempts, last from {connection.name}"
            )
            return BatchTimeoutError(message) if self._is_too_often("late") else None
        if error.fault is Fault.BROKEN:
            message = f"{connection.name} failed: {error.details}"
            return DataPlaneError(message) if self._is_too_often("broken") else None
        # The refusal contains a checksum of the request, so the request arrived undamaged. Another endpoint would
        # refuse this request too.
        if error.fault is Fault.MALFORMED:
            return ProtocolError(f"{connection.name} rejects the request: {error.details}")
        # Any other fault (busy, not prepared, foreign) concerns only the endpoint, so request the batch again.
        return None

    def damaged(self, connection: EndpointConnection, error: ProtocolError) -> BaseException | None:
        """Record that the batch arrived damaged. Return the exception to raise, or None to retry."""
        if not self._is_too_often("damaged"):
            return None
        damaged = ProtocolError(f"a batch arrived damaged {MAX_ATTEMPTS} times, last from {connection.name}: {error}")
        damaged.__cause__ = error
        return damaged

    def _is_too_often(self, kind: str) -> bool:
        """Count a failure of this kind. Return whether the batch must not be requested again."""
        self.num_failures[kind] += 1
        return self.num_failures[kind] >= MAX_ATTEMPTS

    def killed_too_often(self) -> DatasetError:
        """Return the error of a request that killed too many endpoints. It names the request's indices.

        Call this only if `PoisonDetector.is_proven`. So at least three of the lost endpoints are known to have died.
        The others in the list may have died too, but the error names only the endpoints that certainly died.
        """
        names = [lost.record.endpoint_id for lost in self.poison.endpoints if lost.has_died]
        indices = self._first_indices()
        note = ". on_sample_error='skip' handles exceptions only" if self.request.on_sample_error == "skip" else ""
        return dataset_error(
            f"the endpoint died {len(names)} times ({', '.join(names)}) while it computed the batch with the indices "
            f"{indices}. It ran out of memory, or native code crashed: see the logs of the data hosts" + note,
            dataset=self.request.spec.name,
            host=names[-1],
            stage="sample",
        )

    def describe_lost_calls(self) -> str:
        """Return one line with the number of lost calls for this request and its indices, empty if no call was lost."""
        if not self.poison.num_calls:
            return ""
        indices = self._first_indices()
        return f"lost calls for batch {self.request.position}: {self.poison.num_calls}. Its indices: {indices}"

    def _first_indices(self) -> str:
        given = self.request.work.labels
        num_more = len(given) - _MAX_NAMED_INDICES
        more = f" and {num_more} more" if num_more > 0 else ""
        return ", ".join(index_text(index) for index in given[:_MAX_NAMED_INDICES]) + more


@dataclass(slots=True, eq=False)
class Attempt:
    """One call for a batch, in progress until its outcome is settled."""

    batch: PendingBatch
    connection: EndpointConnection
    issued_s: float
    """Monotonic time when the request was sent, or when its call began."""
    is_alone: bool = False
    """Whether the endpoint computes no other request of this process meanwhile."""
    is_hedge: bool = False
    """Whether this is the second of two attempts at the same time."""
    is_inline: bool = False
    """Whether the consumer's thread makes the call itself: see `hetero.reader.inline_fetches`."""
    was_sent: bool = False
    """Whether the request was sent before the call, over a connection that failed."""
    is_given_up: bool = False
    """Whether the other attempt has settled the batch. Then the outcome of this one does not matter."""
    helpers: tuple[EndpointConnection, ...] = ()
    """One endpoint of each other host that has samples of the batch in its cache. It computes these samples."""
    owners: npt.NDArray[np.uint8] | None = None
    """For each sample, the number of the endpoint that computes it, see `BatchRequest.owners`."""
    call: Any = None
    """The call in progress, see `hetero.endpoint.link.Call`. Set without the fleet's lock."""
    generation: int = field(init=False)
    """The connection's generation when the call began."""

    def __post_init__(self) -> None:
        self.generation = self.connection.generation
        self.batch.attempts.append(self)

    @property
    def request(self) -> BatchRequest:
        """The request to send. If other hosts compute samples of the batch, it names the endpoint of each sample.

        ``helpers`` are the endpoints of the other hosts. ``owners`` has a number for each sample: 0 for the endpoint
        that gets the request, i for the i-th helper, from 1.
        """
        if not self.helpers:
            return self.batch.request
        records = [connection.record for connection in self.helpers]
        named = [
            Helper(
                endpoint_id=record.endpoint_id,
                host=record.host,
                address=record.address,
                incarnation=record.incarnation,
            )
            for record in records
        ]
        return dataclasses.replace(self.batch.request, helpers=tuple(named), owners=self.owners)

    @property
    def since_s(self) -> float:
        """Monotonic time when the endpoint probably began to compute the batch.

        An endpoint computes one batch after the other. So this is the time of the request, or the time when the
        endpoint delivered its last batch if that is later.
        """
        # Only an endpoint that emulates several vCPUs, for an experiment, has several slots. It computes one batch in
        # each slot at the same time, so it begins a batch when the request arrives.
        if self.connection.record.num_slots > 1:
            return self.issued_s
        return max(self.issued_s, self.connection.delivered_at_s)

    def is_lowest_of(self, batches: Iterable[PendingBatch]) -> bool:
        """Return whether this attempt's batch is the first of ``batches`` on its endpoint.

        A batch that was lost with the endpoint counts as being on it. Endpoints compute batches in the order of
        ``sequence``, so the endpoint was probably computing the first one. This is not certain. While an earlier batch
        waits for samples from other hosts, the endpoint computes later ones.
        """
        connection = self.connection
        earlier = [batch for batch in batches if batch.sequence < self.batch.sequence]
        return not any(
            connection in batch.poison.endpoints or any(other.connection is connection for other in batch.attempts)
            for batch in earlier
        )

    def cancel(self) -> None:
        """Cancel the call if it has begun. Called without the fleet's lock."""
        # Read the attribute once, because the thread that makes the call sets it without the lock.
        call = self.call
        if call is not None:
            call.cancel()
