"""The answer to one request. The connection's thread sends it, or another thread does so later.

If a connection's thread waits for a batch, it is woken twice: when the batch is ready, and when the next request
arrives. Therefore the compute thread sends a batch itself if the batch is small, or if it has up to 2 MiB and took
almost no time to compute. For such batches of 1 MB this doubled the rate. Meanwhile the connection's thread waits for
the next request, and notices if the reader leaves.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from hetero.system.waits import POLL_S
from hetero.wire.framing import EncodedBatch
from hetero.wire.limits import AT_ONCE_BYTES
from hetero.wire.transports.interface import Connection

__all__ = ["LATER", "Answer", "Later", "Reply"]

logger = logging.getLogger(__name__)


class Later:
    """The type of `LATER`."""


LATER: Final = Later()
"""Returned if `Reply.send` will be called with the answer."""

Answer: TypeAlias = EncodedBatch | bytes | None
"""A batch, another answer, or None to end the connection without an answer."""


class Reply:
    """The answer to one request. `send_here`, `wait` and `give_up` are for the connection's thread.

    Args:
        connection: The connection that the request came from.
        on_end: Called once, when the request has ended. Its argument is True if a batch was sent.
        damage: For tests. Returns the damaged message and payload to send instead of a batch, or None to send the
            batch. The connection ends after a damaged answer.
    """

    def __init__(
        self,
        connection: Connection,
        on_end: Callable[[bool], object],
        damage: Callable[[EncodedBatch], tuple[bytes, Sequence[memoryview]] | None] | None = None,
    ) -> None:
        self._connection = connection
        self._on_end = on_end
        self._damage = damage
        self._lock = threading.Lock()
        self._has_ended = False
        # This lock is held until the request has ended. `wait` takes it. A lock is cheaper than an event.
        self._in_progress = threading.Lock()
        self._in_progress.acquire()
        self._sender: threading.Thread | None = None
        """Thread that sends the rest of a large answer. None if no thread was needed."""
        self._cancel_task: Callable[[], object] | None = None
        """Cancels the task that computes the answer, see `if_given_up`. None before that, and after the end."""

    def has_left(self) -> bool:
        """Return whether the reader has left. Does not block. Do not call this after `LATER` was returned."""
        return self._connection.is_ended()

    def if_given_up(self, cancel: Callable[[], object]) -> None:
        """Call ``cancel`` if the reader leaves before the answer is ready for `send`."""
        with self._lock:
            # If the task has sent its answer already, do not keep `cancel`, because it keeps the batch in memory.
            if not self._has_ended:
                self._cancel_task = cancel

    def send_here(self, answer: Answer) -> bool:
        """Send the answer. Block until the kernel has taken it. Return whether the connection may be used again.

        After an answer of None, or one that was damaged for a test, the connection must end.

        Raises:
            OSError: The connection failed.
        """
        is_sent = False
        try:
            if answer is not None:
                message, payload, is_damaged = self._to_send(answer)
                self._connection.send(message, payload)
                is_sent = not is_damaged
            return is_sent
        finally:
            self._end(is_batch=is_sent and _is_batch(answer))

    def send(self, answer: Answer) -> None:
        """Send the answer to a request for which `LATER` was returned. Called from any thread.

        Does not block, and raises nothing. If the kernel does not take the whole answer at once, a new thread sends the
        rest, and ends the reply.
        """
        with self._lock:
            if self._has_ended:  # the reader has left
                return
            is_batch = False
            try:
                if answer is None:
                    raise ConnectionAbortedError("there is no answer")
                message, payload, is_damaged = self._to_send(answer)
                # A new thread sends a large batch completely, because sending it would take this thread too long.
                if sum(map(len, payload)) <= AT_ONCE_BYTES:
                    send_rest = self._connection.send_now(message, payload)
                else:
                    send_rest = functools.partial(self._connection.send, message, payload)
                is_batch = _is_batch(answer) and not is_damaged
                if send_rest is not None:
                    # The new thread ends the reply, so do not end it below.
                    self._sender = threading.Thread(
                        target=self._send_rest, args=(send_rest, is_batch), name="sender", daemon=True
                    )
                    self._sender.start()
                    return
                if is_damaged:
                    self._connection.shut_down()
            except Exception as error:  # noqa: BLE001 - also if the host runs out of threads
                logger.debug("a connection failed: %s", error)
                # Forget the thread, because it may not have started, and `give_up` cannot join such a thread.
                self._sender, is_batch = None, False
                # The connection's thread notices the shutdown, and closes the connection.
                self._connection.shut_down()
            self._end(is_batch=is_batch)

    def wait(self) -> bool:
        """Block until the request has ended. Return False if the reader leaves first."""
        while not self._in_progress.acquire(timeout=POLL_S):
            if self.has_left():
                return False
        return True

    def give_up(self) -> None:
        """End the reply, because the reader has left. Then no other thread uses the connection. Idempotent."""
        with self._lock:
            cancel_task, sender = self._cancel_task, self._sender
            # A thread that sends the rest ends the reply itself.
            if not self._has_ended and sender is None:
                self._end(is_batch=False)
        # After the shutdown the thread fails at once. The lock must be free, or the thread could not end the reply.
        if sender is not None:
            self._connection.shut_down()
            sender.join()
        elif cancel_task is not None:
            cancel_task()

    def _to_send(self, answer: EncodedBatch | bytes) -> tuple[bytes, Sequence[memoryview], bool]:
        """Return the message, the payload, and whether they were damaged on purpose for a test."""
        if not isinstance(answer, EncodedBatch):
            return answer, (), False
        damaged = None if self._damage is None else self._damage(answer)
        return (answer.message, answer.payload, False) if damaged is None else (*damaged, True)

    def _send_rest(self, send_rest: Callable[[], None], is_batch: bool) -> None:
        """Send the part of an answer that the kernel did not take at once, and end the reply. Runs in a new thread."""
        try:
            send_rest()
        except Exception as error:  # noqa: BLE001 - the connection's thread closes it
            logger.debug("a connection failed: %s", error)
            is_batch = False
        # After a failed or damaged answer, the connection must not be used again.
        if not is_batch:
            self._connection.shut_down()
        self._end(is_batch=is_batch)

    def _end(self, *, is_batch: bool) -> None:
        """Record that the request has ended, and wake the thread in `wait`. Called once."""
        # The connection's thread keeps the reply while it waits for the next request. So drop `_cancel_task`, which
        # keeps the batch in memory.
        self._has_ended, self._cancel_task = True, None
        self._on_end(is_batch)
        self._in_progress.release()


def _is_batch(answer: Answer) -> bool:
    """Return whether an answer counts as a batch. Parts of batches do not."""
    return isinstance(answer, EncodedBatch) and not answer.is_part
