"""One request in flight, its attempts, and what a failed attempt means for it. No threads, no network."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hetero.batches.failures import dataset_error, index_text
from hetero.batches.request import BatchRequest, plain_indices
from hetero.dataplane.reader.connection import EndpointConnection
from hetero.dataplane.reader.consistency import Agreement
from hetero.dataplane.reader.failures import MAX_ATTEMPTS, CallFailedError, Fault
from hetero.dataplane.reader.poison import Losses
from hetero.errors import BatchTimeoutError, DataPlaneError, DatasetError, ProtocolError

__all__ = ["Attempt", "Item"]

_MAX_NAMED_INDICES = 64
"""Bound of the indices in the error of a batch that is to blame."""
_MAX_HINTED_INDICES = 8
"""Bound of the indices in a note on a batch that may be to blame."""


@dataclass(slots=True, eq=False)
class Item:
    """One request, from its planning until its batch or its error is there."""

    sequence: int
    request: BatchRequest
    agreement: Agreement
    losses: Losses = field(default_factory=Losses)
    attempts: list[Attempt] = field(default_factory=list)
    """The attempts in progress, at most two."""
    num_damaged: int = 0
    num_late: int = 0
    num_broken: int = 0

    def failed(
        self, connection: EndpointConnection, error: CallFailedError, *, data_timeout_s: float
    ) -> BaseException | None:
        """Record a failed call whose endpoint was not lost. Return what to raise, or None to ask again."""
        if error.fault is Fault.LATE:
            self.num_late += 1
            message = f"{MAX_ATTEMPTS} times no batch within {data_timeout_s:g} s, last from {connection.name}"
            return BatchTimeoutError(message) if self.num_late >= MAX_ATTEMPTS else None
        if error.fault is Fault.BROKEN:
            self.num_broken += 1
            message = f"{connection.name} failed: {error.details}"
            return DataPlaneError(message) if self.num_broken >= MAX_ATTEMPTS else None
        if error.fault is Fault.MALFORMED:
            return ProtocolError(f"{connection.name} rejects the request: {error.details}")
        return None

    def damaged(self, connection: EndpointConnection, error: ProtocolError) -> BaseException | None:
        """Record that the batch arrived damaged. Return what to raise, or None to ask again."""
        self.num_damaged += 1
        if self.num_damaged < MAX_ATTEMPTS:
            return None
        damaged = ProtocolError(f"a batch arrived damaged {MAX_ATTEMPTS} times, last from {connection.name}: {error}")
        damaged.__cause__ = error
        return damaged

    def killed_too_often(self) -> DatasetError:
        """Return the error of a request that killed too many endpoints. It names the request's indices."""
        names = [lost.record.endpoint_id for lost in self.losses.endpoints if lost.has_died]
        indices = self._first_indices(_MAX_NAMED_INDICES)
        note = "; on_sample_error='skip' covers exceptions only" if self.request.on_sample_error == "skip" else ""
        return dataset_error(
            f"the endpoint died {len(names)} times ({', '.join(names)}) while it computed the batch of the indices "
            f"{indices}: out of memory, or a crash in native code; the data hosts' logs say which" + note,
            dataset=self.request.spec.name,
            host=names[-1],
            stage="sample",
        )

    def words_on_losses(self) -> str:
        """Return on one line how many calls for this request were lost, and its indices. Empty if no call was lost."""
        if not self.losses.num_calls:
            return ""
        calls = f"calls for batch {self.request.position} that were lost: {self.losses.num_calls}"
        return f"{calls}; its indices: {self._first_indices(_MAX_HINTED_INDICES)}"

    def _first_indices(self, bound: int) -> str:
        given = self.request.indices
        more = f" and {len(given) - bound} more" if len(given) > bound else ""
        return ", ".join(index_text(index) for index in plain_indices(given[:bound])) + more


@dataclass(slots=True, eq=False)
class Attempt:
    """One call for an item, in progress until its outcome is settled."""

    item: Item
    connection: EndpointConnection
    issued_s: float
    """Monotonic."""
    is_alone: bool = False
    """Whether the endpoint computes no other request of this process meanwhile."""
    is_hedge: bool = False
    """Whether it is the second of two attempts at the same time."""
    is_given_up: bool = False
    """Whether the other attempt was faster. Then the outcome of this one says nothing."""
    call: Any = None
    """The call, which has ``cancel``. The fetcher sets it without the lock."""
    generation: int = field(init=False)
    """The connection's generation when the call began."""

    def __post_init__(self) -> None:
        self.generation = self.connection.generation
        self.item.attempts.append(self)

    @property
    def since_s(self) -> float:
        """Time from which the answer is due, in monotonic seconds.

        It is when the request was sent, or when the endpoint last answered if that was later. An endpoint computes one
        batch after the other, so this excludes most of the time in its queue. Emulated slots compute at the same time.
        For them it is always when the request was sent.
        """
        if self.connection.record.num_slots > 1:
            return self.issued_s
        return max(self.issued_s, self.connection.load_at_s)

    def is_lowest_of(self, items: Iterable[Item]) -> bool:
        """Return whether no earlier request of ``items`` is on the same endpoint, or was lost with it.

        An endpoint computes lower steps first. If this is true, it was probably computing this request.
        """
        connection = self.connection
        earlier = [item for item in items if item.sequence < self.item.sequence]
        return not any(
            connection in item.losses.endpoints or any(its.connection is connection for its in item.attempts)
            for item in earlier
        )

    def cancel(self) -> None:
        """Cancel the call if it has begun. Called without the lock."""
        call = self.call
        if call is not None:
            call.cancel()
