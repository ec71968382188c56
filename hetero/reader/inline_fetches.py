"""The fetches that a consumer's thread makes itself, for batches that are not large.

To wake a fetcher for each request, and the consumer for each batch, takes longer than to transfer a small batch.
Therefore the consumer may send the requests itself, and receive the answers while it waits for a batch, see
`hetero.reader.receiver_choice`. Until the consumer waits, the answers stay in the buffers of the sockets on both hosts.

If the consumer does not come back, another thread receives the answers after one to two seconds. Without this, answered
requests would count as the load of their endpoint.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable, Iterable
from typing import Any

from hetero.endpoint.link import SentFetch
from hetero.reader.attempts import Attempt
from hetero.reader.connection import Fetched
from hetero.system.waits import POLL_S

__all__ = ["ABSENT_S", "InlineFetches"]

ABSENT_S = 1.0
"""Seconds. A consumer that has received nothing for so long is absent. Another thread checks this once in this time."""


class InlineFetches:
    """Batches of one reader whose requests the consumer has sent and whose answers have not arrived completely.

    A thread that has the fleet's lock must not take `lock`.

    Args:
        clock: Returns monotonic seconds.
        settle: See `hetero.reader.outcomes.Outcomes.settle`. Called with `lock` held.
        hand_over: Called instead of ``settle`` if the connection ended. Makes another thread fetch the batch.
    """

    def __init__(
        self, clock: Callable[[], float], *, settle: Callable[..., Any], hand_over: Callable[[Attempt], object]
    ) -> None:
        self.lock = threading.RLock()
        """Held by the consumer while it waits. Reentrant, because a signal handler may close the reader meanwhile."""
        self._clock = clock
        self._settle = settle
        self._hand_over = hand_over
        self._sent: dict[int, tuple[Attempt, SentFetch[Fetched]]] = {}  # by descriptor
        # Not `select.poll`, because its cost grows with the number of descriptors. A rank with 32 data hosts has 512
        # descriptors, and epoll reduced its CPU time by a tenth.
        self._poll: select.epoll | None = None
        self._wake_descriptor = -1  # an eventfd
        self._is_closed = False
        self._is_waiting = False
        """Whether the consumer waits in `receive`, or is about to. Then `wake` has to end this wait."""
        self._last_receive_s = 0.0
        """Time when the consumer last received."""
        self._next_check_s = 0.0
        """Time of the next search for late fetches, see `_late`."""

    def __len__(self) -> int:
        """Return the number of fetches in progress. Needs no lock."""
        return len(self._sent)

    def add(self, attempt: Attempt, sent: SentFetch[Fetched]) -> None:
        """Add a fetch. The caller holds `lock`."""
        # If the reader is closed here, a signal handler has closed it since the request was sent.
        if self._is_closed:
            sent.give_up()
            return
        if self._poll is None:
            self._poll = select.epoll()
            self._wake_descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._poll.register(self._wake_descriptor, select.EPOLLIN)
        descriptor = sent.fileno()
        self._sent[descriptor] = attempt, sent
        self._watch(descriptor)

    def prepare_to_receive(self) -> None:
        """Let `wake` end the next `receive`. Called by the consumer with the fleet's lock."""
        self._is_waiting = True

    def receive(self, timeout_s: float) -> None:
        """Block until an answer or a part of it has arrived, or until `wake`. Receive it. Called by the consumer."""
        with self.lock:
            # An answer that is readable at once arrived while the consumer was away, at an unknown time. The time away
            # must not count as time of the endpoint. So the time of the last `receive` counts as the arrival.
            arrived_s = None
            # First look without waiting. The duration of one epoll call does not show whether an answer was there
            # before: with 100 descriptors, 37 of 60 calls were misjudged.
            readable = self._readable(timeout_s=0.0)
            if readable:
                arrived_s = self._last_receive_s
            else:
                readable = self._readable(timeout_s)
            self._is_waiting = False
            # Reset the descriptor. Otherwise the next wait would end at once.
            if self._wake_descriptor in readable:
                with contextlib.suppress(OSError):  # a signal handler may have closed the descriptor
                    os.eventfd_read(self._wake_descriptor)
            self._receive(readable, arrived_s)
            # No descriptor tells that the time of a fetch is over. `SentFetch.receive` raises if it is over.
            self._receive(self._late(), arrived_s=None)
            self._last_receive_s = self._clock()

    def receive_for_absent(self) -> None:
        """Receive what has arrived, if the consumer does not. Does not block. Called by another thread."""
        # If the consumer has the lock, it waits for the answers itself.
        if not self.lock.acquire(blocking=False):
            return
        try:
            oldest = next(iter(self._sent.values()), None)
            if oldest is None:
                return
            # The consumer is absent if it has received nothing since this time although a fetch was in progress.
            since_s = max(oldest[0].issued_s, self._last_receive_s)
            if self._clock() - since_s >= ABSENT_S:
                self._receive(self._readable(timeout_s=0.0), arrived_s=self._last_receive_s)
            self._receive(self._late(), arrived_s=None)
        finally:
            self.lock.release()

    def wake(self) -> None:
        """End the consumer's `receive`, if it waits there. Called with the fleet's lock, and not with `lock`."""
        if self._is_waiting and self._poll is not None:
            os.eventfd_write(self._wake_descriptor, 1)

    def close(self) -> None:
        """Close the connections of all fetches. Idempotent. The caller holds `lock` and the fleet's lock."""
        self._is_closed = True
        # Forget the fetches first, because the consumer's `_receive` may be in progress in this thread.
        sent = [fetch for _, fetch in self._sent.values()]
        self._sent.clear()
        for fetch in sent:
            fetch.give_up()
        poll, self._poll = self._poll, None
        if poll is not None:
            # A signal handler may call `close` while `_readable` waits in the same thread. Then that wait fails at
            # once.
            poll.close()
        wake_descriptor, self._wake_descriptor = self._wake_descriptor, -1
        if wake_descriptor >= 0:
            os.close(wake_descriptor)

    def _readable(self, timeout_s: float) -> list[int]:
        """Return the descriptors where something has arrived, after at most ``timeout_s`` seconds."""
        poll = self._poll
        if poll is None:
            return []
        try:
            return [descriptor for descriptor, _ in poll.poll(timeout_s)]
        except (OSError, ValueError):
            if not self._is_closed:
                raise
            return []  # a signal handler has closed the reader

    def _late(self) -> list[int]:
        """Return the descriptors of fetches whose time is over. Search for such fetches at most twice a second."""
        now_s = self._clock()
        if now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + POLL_S
        return [descriptor for descriptor, (_, sent) in list(self._sent.items()) if sent.is_late]

    def _receive(self, descriptors: Iterable[int], arrived_s: float | None) -> None:
        """Receive the data that has arrived. Settle the attempts that have an outcome.

        If a connection has ended, hand its attempt over to a fetcher. If an answer is incomplete, keep waiting for it.

        Args:
            descriptors: Descriptors of the connections to receive from. Those without a fetch are ignored.
            arrived_s: Monotonic time that counts as the arrival of complete answers, or the time of the request if that
                is later. None if the answers arrive now.
        """
        for descriptor in descriptors:
            # The descriptor is the one of `wake`, or a signal handler has closed the reader.
            if descriptor not in self._sent:
                continue
            attempt, sent = self._sent[descriptor]
            outcome: Fetched | Exception | None
            try:
                outcome = sent.receive()
            except Exception as error:  # noqa: BLE001 - the outcome of the attempt
                outcome = error
            if outcome is None:
                # `_readable` returns a descriptor only once, so ask for it again.
                self._watch(descriptor)
                continue
            # The entry may be gone already, because a signal handler may close the reader during `receive`.
            self._sent.pop(descriptor, None)
            # The connection may have ended only because it was idle. Let a fetcher ask again over a new connection.
            if isinstance(outcome, ConnectionResetError | BrokenPipeError):
                self._hand_over(attempt)
                continue
            answered_s = None if arrived_s is None else max(attempt.issued_s, arrived_s)
            self._settle(attempt, outcome, answered_s=answered_s)

    def _watch(self, descriptor: int) -> None:
        """Let `_readable` return the descriptor once, when something arrives.

        The kernel forgets a closed connection only when no process has it open, and a forked process may still have it
        open. With EPOLLONESHOT, such a connection is not reported again and again.
        """
        if self._poll is None:  # a signal handler has closed the reader
            return
        try:
            # The connection was used before, so the kernel knows the descriptor.
            self._poll.modify(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
        except FileNotFoundError:
            self._poll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
