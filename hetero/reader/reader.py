"""The trainer's side of the data plane. Delivers batches in order, no matter which endpoint computes them.

The fetchers refer to the window and the fleet, but not to the reader. Therefore a reader that the script drops without
`close` is garbage-collected, which ends its fetchers.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from hetero.batches.request import BatchRequest
from hetero.batches.skips import Skips
from hetero.errors import ConfigError, DatasetError
from hetero.reader.connection import Fetched
from hetero.reader.consistency import ServedDataset
from hetero.reader.fetchers import Fetchers
from hetero.reader.fleet import Fleet
from hetero.reader.window import Window
from hetero.reader.window_size import PREFETCH_FACTOR, window_bytes_of
from hetero.spec import DatasetSpec
from hetero.system.cgroups import memory_use
from hetero.system.waits import LOG_INTERVAL_S, POLL_S

__all__ = ["Reader", "default_window_bytes"]

logger = logging.getLogger(__name__)


class Reader(Iterator[Any]):
    """Iterator over batches, strictly in the order of their requests. For one consuming thread.

    The reader takes requests from their iterator in the consuming thread, at construction and in ``next``. It takes no
    more requests than fit into the window. Therefore a sampler draws from the trainer's random generators at the same
    points as with torch's own loader.

    If the consumer waits for a batch that takes too long, the reader asks another endpoint for the same batch: see
    `hetero.reader.hedging`.

    A `DatasetError` belongs to one batch, and the next call returns the batch after it. After any other exception, and
    after the last batch, the reader is closed. Several readers share one fleet.

    Args:
        fleet: The endpoints.
        requests: The batches to fetch. May be endless.
        prefetch_factor: Batches in flight per endpoint slot, of all ranks together. Default 2. This rank plans its
            share of these batches, at least 2. With a plan of 2, a third batch may be in flight. While one batch delays
            the batches after it, the window grows to at most 8 times its size. All batches beyond the plan together
            have at most 24 MiB: see `hetero.reader.window_size.WindowGrowth`.
        window_bytes: Bound of the bytes in the windows of all readers of the fleet together, `default_window_bytes` by
            default. One batch is always allowed.
        allocate: Allocates memory for leaves (pinned memory, for example). Called with a size in bytes, in any thread.
        on_skips: Called with the substituted samples of a batch, in the consuming thread, just before `next` returns
            that batch. Called once per batch, however often the batch was requested. If it raises, `next` raises that
            exception instead.
        on_received: Called with the bytes of a batch before compression, and with how many of them compression saved.
            Called in the same thread and at the same time as ``on_skips``.
        on_wait: Called at least twice a second while the consumer waits for a batch, in its thread and without the
            lock. Its argument is True if no endpoint serves. If it raises, the reader ends.

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
        allocate: Callable[[int], memoryview] | None = None,
        on_skips: Callable[[Skips], object] | None = None,
        on_received: Callable[[int, int], object] | None = None,
        on_wait: Callable[[bool], None] | None = None,
    ) -> None:
        if prefetch_factor is None:
            prefetch_factor = PREFETCH_FACTOR
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
        self._is_exhausted = False
        """Whether the iterator of requests has ended or raised."""
        self._dataset: ServedDataset | None = None
        """Data set of the latest request that was taken from the iterator."""
        self._sampler_failure: Exception | None = None
        """Exception of the iterator of requests. `next` raises it after all earlier batches."""
        self._window = Window(
            planned=functools.partial(fleet.router.planned_batches, prefetch_factor),
            max_bytes=default_window_bytes() if window_bytes is None else window_bytes,
            all_bytes=fleet.used_bytes,
        )
        self._fetchers = Fetchers(fleet, self._window, allocate=allocate)
        # `abandon` takes no lock, because the garbage collector may run this finalizer in a thread that holds one.
        self._finalizer = weakref.finalize(self, self._fetchers.abandon)
        with fleet.lock:
            fleet.add_listener(self._fetchers)
        self._fill()

    def __next__(self) -> Any:
        """Return the next batch. Blocks.

        Raises:
            StopIteration: The requests are exhausted, or the reader is closed.
            DatasetError: The user's code raised for this batch, or the batch killed its endpoint three times.
            EndpointUnavailableError: No endpoint served for the data timeout.
            DataPlaneError: See `hetero.errors`.
        """
        self._fleet.check_process()
        receiver = None if self._dataset is None else self._dataset.receiver
        # Measure how long the consumer was away, to choose who receives the next batches.
        if receiver is not None:
            receiver.come_back(self._fleet.clock())
        # The consumer is done with its last batch. Only a large batch still counts in the window. Take the lock only
        # for such a batch, because the lock may take longer than the delivery of a small batch.
        if self._window.counts_delivered:
            with self._fleet.lock:
                self._fetchers.free_delivered()
        try:
            self._fill()
            outcome = self._wait()
            if isinstance(outcome, Fetched):
                if outcome.skips is not None and self._on_skips is not None:
                    self._on_skips(outcome.skips)
                if self._on_received is not None:
                    self._on_received(outcome.nbytes, outcome.saved_bytes)
                # The place of this batch in the window is free. So another batch can be computed while the script uses
                # this one.
                self._fill()
                if receiver is not None:
                    receiver.leave(self._fleet.clock())
                return outcome.batch
            # After a `DatasetError` the reader goes on with the next batch. After an error of the sampler, whatever its
            # type, no batch can come.
            if not isinstance(outcome, DatasetError) or outcome is self._sampler_failure:
                self.close()
        except BaseException:
            self.close()
            raise
        try:
            raise outcome
        finally:
            # The exception's traceback refers to this frame. If this frame kept the exception, both would keep all
            # frames of the caller alive.
            del outcome

    @property
    def request(self) -> BatchRequest | None:
        """Request of the last batch or exception of `next`. None before, and if the iterator of requests raised."""
        return self._window.request

    @property
    def spec(self) -> DatasetSpec | None:
        """Data set of the latest request that was taken from the iterator. None before the first."""
        return None if self._dataset is None else self._dataset.spec

    @property
    def is_open(self) -> bool:
        """Whether another batch may come."""
        return self._finalizer.alive

    def close(self) -> None:
        """Cancel the requests in flight and end the threads. Idempotent. Blocks until they have ended."""
        if self._finalizer.detach() is not None:
            self._fetchers.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fill(self) -> None:
        """Take requests until the window is full. The user's sampler runs here, without the lock."""
        while not self._is_exhausted:
            with self._fleet.lock:
                if self._fetchers.is_closed or not self._window.has_place:
                    return
            try:
                request = next(self._requests)
            except StopIteration:
                self._is_exhausted = True
                return
            except Exception as error:  # noqa: BLE001 - raised by the sampler, and raised again when its turn comes
                # Ctrl-C is not an `Exception`, so it passes through here and is raised at once.
                self._is_exhausted = True
                self._sampler_failure = error
                with self._fleet.lock:
                    self._window.add_failure(error)
                return
            with self._fleet.lock:
                self._dataset = self._fleet.prepare(request.spec)
                attempt = self._fetchers.add(request, self._dataset)
            # This thread itself sends the request of this attempt. Otherwise a fetcher does so.
            if attempt is not None:
                self._fetchers.send(attempt)

    def _wait(self) -> Fetched | BaseException:
        """Block until the next outcome has arrived. Return the batch, or the exception to raise."""
        window, fetchers, fleet = self._window, self._fetchers, self._fleet
        begin_s = fleet.clock()
        log_after_s = LOG_INTERVAL_S
        unserved_since_s: float | None = None
        while True:
            with fleet.lock:
                outcome = fetchers.pop()
                if outcome is not None:
                    return outcome
                # The reader was closed, or all batches were delivered and no request is left.
                if not self._finalizer.alive or window.is_empty or self._dataset is None:
                    return StopIteration()
                fleet.raise_failure(self._dataset)
                now_s = fleet.clock()
                spec = self._dataset.spec
                # Give up if no endpoint has served for too long.
                if fleet.has_ready(spec):
                    unserved_since_s = None
                elif unserved_since_s is None:
                    unserved_since_s = now_s
                elif now_s - unserved_since_s > self._patience_s(self._dataset):
                    what, note = f"data set {spec.name!r}", window.describe_lost_calls()
                    raise fleet.unavailable(what, now_s - unserved_since_s, note=note)
                # Log at growing intervals that the wait is long.
                if now_s >= begin_s + log_after_s:
                    log_after_s = 2 * max(log_after_s, now_s - begin_s)
                    logger.warning(
                        "waiting for batch %d for %.0f s: %s",
                        window.next_sequence,
                        now_s - begin_s,
                        fleet.describe_endpoints(),
                    )
                fetchers.wait(POLL_S)
                # The batch has arrived, so deliver it before anything else.
                if window.is_deliverable:
                    continue
            if self._on_wait is not None:
                is_unserved = unserved_since_s is not None
                self._on_wait(is_unserved)
            # The window grows when endpoints join.
            self._fill()

    def _patience_s(self, dataset: ServedDataset) -> float:
        """Return how many seconds the reader waits without an endpoint.

        The reader waits longer until the data set was served for the first time, and while an endpoint builds it.
        """
        if not dataset.was_served or self._fleet.is_preparing(dataset.spec):
            return max(self._fleet.data_timeout_s, self._fleet.prepare_timeout_s)
        return self._fleet.data_timeout_s


def default_window_bytes() -> int:
    """Return the default bound of a window in bytes.

    It is 1 GiB, or this rank's share of a quarter of the memory if that is less. The memory is the host's, or the limit
    of this process's control group (a container, for example) if that is less. ``LOCAL_WORLD_SIZE`` gives the number of
    ranks on this host, 1 if it is not set.
    """
    # Count one rank if the variable is not a positive number.
    given = os.environ.get("LOCAL_WORLD_SIZE", "1")
    num_local_readers = int(given) if given.isdigit() and int(given) > 0 else 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Four ranks in a container of 4 GiB, on a host of 64 GiB, could once fill the container with windows of 1 GiB each.
    use = memory_use()
    if use is not None and use.limit_bytes is not None:
        memory_bytes = min(memory_bytes, use.limit_bytes)
    return window_bytes_of(memory_bytes, num_local_readers)
