"""The trainer's side of the data plane: batches in order, whoever computes them.

A `Reader` is a handle on its `Window`. The fetching threads hold the window and
never the reader, so that a reader that is dropped without `close` is collected,
which closes its window.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skips
from hetero.dataplane.reader.attempts import Item
from hetero.dataplane.reader.consistency import Agreement
from hetero.dataplane.reader.fleet import Fleet
from hetero.dataplane.reader.window import Arrived, Window
from hetero.errors import ConfigError, DatasetError
from hetero.system.cgroups import memory_use

__all__ = ["Reader", "default_window_bytes"]

_PREFETCH_FACTOR = 2
_MAX_WINDOW_BYTES = 2**30
_POLL_S = 0.5
_LOG_AFTER_S = 10.0

logger = logging.getLogger(__name__)


class Reader(Iterator[Any]):
    """Batches strictly in the order of their requests; an iterator. For one consuming thread.

    Requests are taken from the iterator in the consuming thread, at construction and in
    ``next``, never further ahead than the window: a sampler that draws from the trainer's
    generators draws where torch's own loader would.

    A batch that the consumer waits for and that takes longer than it ought to is asked for a
    second time, elsewhere: see `hetero.dataplane.reader.hedging`.

    A `DatasetError` is one batch's: the next call returns the batch after it. After any other exception, and after the
    end, the reader is closed. Several readers share one fleet.

    Args:
        fleet: The endpoints.
        requests: What to fetch; may be endless.
        prefetch_factor: Batches on their way per endpoint slot; this rank's share of them, at least 2, is the window.
            Default 2. The window has a third place, and up to 8 times as many while one batch holds up those that came
            after it, for at most 24 MiB more: see `hetero.dataplane.reader.window_growth`.
        window_bytes: Bound of what the window holds; default `default_window_bytes`. One batch is always allowed.
        data_timeout_s: Bound of one call, and of the time without any endpoint; default the fleet's.
        allocate: Where leaves go (pinned memory); called with a size in bytes from fetching threads.
        on_skips: Given the samples of a batch that others stand in for, in the consuming thread, just before it returns
            that batch: once, however often it was asked for. What it raises is raised instead.
        on_received: Given the bytes of a batch before compression, and of them those that it saved; called as
            `on_skips` is.
        on_wait: Called at least twice a second while a batch is waited for, in that thread and without the lock; told
            whether no endpoint serves. What it raises ends the reader.

    Raises:
        ConfigError: If ``prefetch_factor`` or ``window_bytes`` is not positive.
    """

    def __init__(
        self,
        fleet: Fleet,
        requests: Iterator[BatchRequest],
        *,
        prefetch_factor: float | None = None,
        window_bytes: int | None = None,
        data_timeout_s: float | None = None,
        allocate: Callable[[int], memoryview] | None = None,
        on_skips: Callable[[Skips], object] | None = None,
        on_received: Callable[[int, int], object] | None = None,
        on_wait: Callable[[bool], None] | None = None,
    ) -> None:
        if prefetch_factor is None:
            prefetch_factor = _PREFETCH_FACTOR
        if prefetch_factor <= 0:
            raise ConfigError(f"prefetch_factor is {prefetch_factor}, expected more than 0")
        if window_bytes is not None and window_bytes <= 0:
            raise ConfigError(f"window_bytes is {window_bytes}, expected more than 0")
        fleet.check_process()
        self._fleet = fleet
        self._requests = iter(requests)
        self._on_skips = on_skips
        self._on_received = on_received
        self._on_wait = on_wait
        self._num_taken = 0
        self._is_exhausted = False
        self._agreement: Agreement | None = None
        self._plan_failure: Exception | None = None
        self._window = Window(
            fleet,
            prefetch_factor=prefetch_factor,
            window_bytes=window_bytes if window_bytes is not None else default_window_bytes(),
            data_timeout_s=data_timeout_s if data_timeout_s is not None else fleet.data_timeout_s,
            allocate=allocate,
        )
        # The collector may run it in a thread that holds the lock.
        self._finalizer = weakref.finalize(self, self._window.abandon)
        with fleet.lock:
            fleet.listen(self._window)
        self._fill()

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        """Return the next batch; blocks.

        Raises:
            StopIteration: The requests are exhausted, or the reader is closed.
            DatasetError: The user's code raised for this batch, or killed its endpoint three times.
            EndpointUnavailableError: There was no endpoint for the data timeout.
            DataPlaneError: See `hetero.errors`.
        """
        self._fleet.check_process()
        try:
            self._fill()
            outcome = self._wait()
            if isinstance(outcome, Arrived):
                if outcome.skips is not None and self._on_skips is not None:
                    self._on_skips(outcome.skips)
                if self._on_received is not None:
                    self._on_received(outcome.nbytes, outcome.saved_bytes)
                self._fill()
                return outcome.batch
            if not isinstance(outcome, DatasetError) or outcome is self._plan_failure:
                self.close()
        except BaseException:
            self.close()
            raise
        try:
            raise outcome
        finally:
            del outcome  # it holds this frame by its traceback, and so everybody who iterates

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return self._finalizer.alive

    def close(self) -> None:
        """Cancel what is on its way and end the threads; idempotent. Blocks until they have ended."""
        if self._finalizer.detach() is not None:
            self._window.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        """Take requests until the window is full; the user's sampler runs here, without the lock."""
        while not self._is_exhausted:
            with self._fleet.lock:
                if self._window.is_closed or self._num_taken >= self._window.next_sequence + self._window.limit:
                    return
            try:
                request = next(self._requests)
            except StopIteration:
                self._is_exhausted = True
                return
            except Exception as error:  # noqa: BLE001 - the sampler's: raised when its turn comes
                self._is_exhausted = True
                self._plan_failure = error
                with self._fleet.lock:
                    self._window.put(self._num_taken, error)
                self._num_taken += 1
                return
            with self._fleet.lock:
                self._agreement = self._fleet.want(request.spec)
                self._window.add(Item(self._num_taken, request, self._agreement))
            self._num_taken += 1

    def _wait(self) -> Arrived | BaseException:
        """Block until the next batch is there; return it or what is to be raised."""
        window, fleet = self._window, self._fleet
        begin_s = fleet.clock()
        log_after_s = _LOG_AFTER_S
        unserved_since_s: float | None = None
        while True:
            with fleet.lock:
                outcome = window.pop()
                if outcome is not None:
                    return outcome
                is_over = not self._finalizer.alive or window.next_sequence >= self._num_taken
                if is_over or self._agreement is None:
                    return StopIteration()
                fleet.raise_failure(self._agreement)
                now_s = fleet.clock()
                spec = self._agreement.spec
                if fleet.has_ready(spec):
                    unserved_since_s = None
                elif unserved_since_s is None:
                    unserved_since_s = now_s
                elif now_s - unserved_since_s > self._patience_s(self._agreement):
                    what, note = f"data set {spec.name!r}", window.words_on_losses()
                    raise fleet.unavailable(what, now_s - unserved_since_s, note=note)
                if now_s >= begin_s + log_after_s:
                    log_after_s = 2 * max(log_after_s, now_s - begin_s)
                    logger.warning(
                        "waiting for batch %d for %.0f s: %s",
                        window.next_sequence,
                        now_s - begin_s,
                        fleet.describe_endpoints(),
                    )
                window.arrived.wait(min(_POLL_S, window.hedge_if_overdue()))
            if self._on_wait is not None:
                self._on_wait(unserved_since_s is not None)
            self._fill()  # the window grows with the fleet

    def _patience_s(self, agreement: Agreement) -> float:
        """Return how long there may be no endpoint: longer at the start, and while one builds the data set."""
        if not agreement.was_served or self._fleet.is_preparing(agreement.spec):
            return max(self._window.data_timeout_s, self._fleet.prepare_timeout_s)
        return self._window.data_timeout_s


def default_window_bytes() -> int:
    """Return the default bound of a window: 1 GiB, or a rank's share of a quarter of the memory, if that is less.

    The memory is the host's, or what this process's control group may use (a container's limit), if that is less. The
    ranks of this host are ``LOCAL_WORLD_SIZE``, else 1.
    """
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    num_local_readers = int(given) if given.isdigit() and int(given) > 0 else 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    use = memory_use()
    if use is not None and use.limit_bytes is not None:
        memory_bytes = min(memory_bytes, use.limit_bytes)
    return min(_MAX_WINDOW_BYTES, memory_bytes // 4 // num_local_readers)
