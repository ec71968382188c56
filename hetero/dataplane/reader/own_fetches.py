"""The fetches that a consumer's thread makes itself, for small batches.

To wake a fetcher for each request, and the consumer for each batch, takes longer than to transfer a small batch.
Therefore the consumer sends the requests for small batches itself, and receives the answers while it waits for a batch.
If the consumer does not wait, the answers stay in the buffers of the sockets, which hold small batches.

If the consumer does not come back, another thread receives the answers after a second. Otherwise requests that are
answered would count as the load of their endpoint.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from hetero.dataplane.reader.attempts import Attempt
from hetero.dataplane.reader.connection import BegunBatch, Fetched

__all__ = ["OwnFetches"]

_ABSENT_S = 1.0


class Settle(Protocol):
    """See `OwnFetches`."""

    def __call__(self, attempt: Attempt, outcome: Fetched | Exception, *, answered_s: float) -> None:
        """Settle an attempt, whose batch had arrived at this monotonic time."""


class OwnFetches:
    """Batches of one reader whose requests are sent.

    A thread that has the fleet's lock must not take `lock`.

    Args:
        clock: Returns monotonic seconds.
        settle: Called with the outcome of each attempt, with `lock` held.
        hand_over: Called instead if the connection failed. Another thread should fetch the batch.
    """

    def __init__(self, clock: Callable[[], float], *, settle: Settle, hand_over: Callable[[Attempt], object]) -> None:
        self.lock = threading.RLock()
        """Held by the consumer while it waits for answers. Reentrant, because a signal handler may close the reader."""
        self._clock = clock
        self._settle = settle
        self._hand_over = hand_over
        self._begun: dict[int, tuple[Attempt, BegunBatch]] = {}  # by descriptor
        self._poll = select.poll()
        self._news: int | None = None  # an eventfd that ends the waiting
        self._is_waiting = False
        self._looked_s = 0.0  # when `receive` last looked for answers

    def __len__(self) -> int:
        """Return the number of fetches in progress. Needs no lock."""
        return len(self._begun)

    def add(self, attempt: Attempt, begun: BegunBatch) -> None:
        """Add a fetch. The caller holds `lock`."""
        if self._news is None:
            self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._news, select.POLLIN)
        descriptor = begun.fileno()
        self._begun[descriptor] = attempt, begun
        self._poll.register(descriptor, select.POLLIN)

    def prepare_to_receive(self) -> None:
        """Let `wake` end the next `receive`. Called by the consumer with the fleet's lock."""
        self._is_waiting = True

    def receive(self, timeout_s: float) -> None:
        """Block until an answer or a part of it has arrived, or until `wake`. Receive it. Called by the consumer."""
        with self.lock:
            begin_s = self._clock()
            arrived = [descriptor for descriptor, _ in self._poll.poll(timeout_s * 1e3)]
            self._is_waiting = False
            if self._news in arrived:
                arrived.remove(self._news)
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._news)
            now_s = self._clock()
            overdue = [each for each in self._requested_before(now_s - _ABSENT_S) if each not in arrived]
            self._receive(arrived + overdue, waited_s=now_s - begin_s)
            self._looked_s = now_s

    def receive_for_absent(self) -> None:
        """Receive what has arrived, if the consumer does not. Does not block. Called by another thread."""
        if self._begun and self.lock.acquire(blocking=False):  # otherwise the consumer waits for them
            try:
                self._receive(self._requested_before(self._clock() - _ABSENT_S))
            finally:
                self.lock.release()

    def wake(self) -> None:
        """End the consumer's `receive`, if it waits there. Called with the fleet's lock, and not with `lock`."""
        if self._is_waiting and self._news is not None:
            os.eventfd_write(self._news, 1)

    def close(self) -> None:
        """Give up all fetches. Idempotent. The caller holds `lock` and the fleet's lock."""
        for descriptor, (_, begun) in list(self._begun.items()):
            self._remove(descriptor)
            begun.give_up()
        if self._news is not None:
            self._poll.unregister(self._news)
            os.close(self._news)
            self._news = None

    def _requested_before(self, time_s: float) -> list[int]:
        return [descriptor for descriptor, (attempt, _) in self._begun.items() if attempt.issued_s < time_s]

    def _receive(self, descriptors: Iterable[int], *, waited_s: float = 0.0) -> None:
        """Receive what has arrived. Settle the attempts that have an outcome.

        Args:
            descriptors: Where to look.
            waited_s: Seconds that the consumer has waited just now.
        """
        for descriptor in descriptors:
            if descriptor not in self._begun:  # a signal handler has closed the reader
                continue
            attempt, begun = self._begun[descriptor]
            outcome: Fetched | Exception | None
            try:
                outcome = begun.receive()
            except Exception as error:  # noqa: BLE001 - the outcome of the attempt
                outcome = error
            if outcome is None:
                continue
            self._remove(descriptor)
            if isinstance(outcome, OSError):
                self._hand_over(attempt)
                continue
            # If the consumer was away, it is not known when the answer arrived. That time does not count.
            self._settle(attempt, outcome, answered_s=max(attempt.issued_s, self._looked_s) + waited_s)

    def _remove(self, descriptor: int) -> None:
        if self._begun.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)
