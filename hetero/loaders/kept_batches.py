"""Batches that a profile run keeps and hands out again, each time as new memory that the script may write to.

A batch is copied when it is kept, before the script gets it, and again each time it is handed out. A thread copies
large batches ahead, as the threads of a reader receive batches ahead. Small ones are copied in ``next``, because the
exchange with a thread would take longer.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

__all__ = ["KeptBatches", "max_kept_bytes"]

MAX_KEPT = 8
_MAX_KEPT_BYTES = 2**30
_SMALL_BYTES = 2**20
_NUM_AHEAD = 2


class KeptBatches:
    """The first batches of a loader, up to 8. Thread-safe, except for `keep`.

    Args:
        max_bytes: Limit of all kept batches together. One batch is always kept.
        copy: Returns a batch that shares no memory with the given one.
        nbytes: Returns the bytes of a batch's arrays.
    """

    def __init__(self, max_bytes: int, *, copy: Callable[[Any], Any], nbytes: Callable[[Any], int]) -> None:
        self._max_bytes = max_bytes
        self._copy = copy
        self._nbytes_of = nbytes
        self._batches: list[Any] = []
        self._nbytes = 0
        self._copies: Iterator[Any] | None = None
        self._lock = threading.Lock()
        self._cpu_s = 0.0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the thread has used for copies."""
        return self._cpu_s

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch, unless there are enough already."""
        nbytes = self._nbytes_of(batch)
        if len(self._batches) >= MAX_KEPT or (self._batches and self._nbytes + nbytes > self._max_bytes):
            return
        self._batches.append(self._copy(batch))
        self._nbytes += nbytes

    def next(self) -> Any:
        """Return a copy of the batch whose turn it is. At least one batch must be kept."""
        with self._lock:
            if self._copies is None:
                is_small = self._nbytes <= _SMALL_BYTES * len(self._batches)
                endless = map(self._handed_out, itertools.cycle(self._batches))
                self._copies = endless if is_small else self._copied_ahead(endless)
            return next(self._copies)

    def _handed_out(self, batch: Any) -> Any:
        """Return a copy of a kept batch for the script. A thread may call this."""
        return self._copy(batch)

    def _copied_ahead(self, copies: Iterator[Any]) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(_NUM_AHEAD)

        def copy() -> None:
            for made in copies:
                self._cpu_s = time.thread_time()
                ready.put(made)

        threading.Thread(target=copy, name="hetero-kept-batches", daemon=True).start()
        while True:
            yield ready.get()


def max_kept_bytes() -> int:
    """Return the limit of the batches that a profile run keeps: an eighth of the free memory, at most 1 GiB."""
    return min(_MAX_KEPT_BYTES, psutil.virtual_memory().available // 8)
