"""Batches that a profile run keeps and hands out again, each time as new memory that the script may write to.

A batch is copied when it is kept, before the script gets it, and again each time it is handed out. A thread copies
batches before the script asks for them, as the threads of a reader receive batches.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil

__all__ = ["MAX_KEPT", "KeptBatches"]

MAX_KEPT = 8
_NUM_PREFETCHED = 2


class KeptBatches:
    """The first batches of a loader, at most 8. Thread-safe, except for `keep`.

    Args:
        copy: Returns a batch that shares no memory with the given one.
        nbytes: Returns the bytes of a batch's arrays.
        max_bytes: Limit of all kept batches together. One batch is always kept. None: an eighth of the free memory.
    """

    def __init__(
        self, *, copy: Callable[[Any], Any], nbytes: Callable[[Any], int], max_bytes: int | None = None
    ) -> None:
        # An eighth, because the other ranks of this host keep batches too.
        self._max_bytes = psutil.virtual_memory().available // 8 if max_bytes is None else max_bytes
        self._copy = copy
        self._nbytes_of = nbytes
        self._batches: list[Any] = []
        self._nbytes = 0
        self._copies: Iterator[Any] | None = None
        self._lock = threading.Lock()
        self.cpu_s = 0.0
        """CPU seconds that the thread of `_prefetched` has used. They are not part of the training."""

    def __len__(self) -> int:
        return len(self._batches)

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch, unless 8 batches are kept or the kept bytes would exceed their limit."""
        nbytes = self._nbytes_of(batch)
        # Keep the first batch whatever its size, because `next` needs one.
        if len(self._batches) >= MAX_KEPT or (self._batches and self._nbytes + nbytes > self._max_bytes):
            return
        self._batches.append(self._copy(batch))
        self._nbytes += nbytes

    def next(self) -> Any:
        """Return a copy of the batch whose turn it is. At least one batch must be kept."""
        with self._lock:
            if self._copies is None:
                self._copies = self._prefetched(map(self._handed_out, itertools.cycle(self._batches)))
            return next(self._copies)

    def _handed_out(self, batch: Any) -> Any:
        """Return a copy of a kept batch for the script. A thread calls this."""
        return self._copy(batch)

    def _prefetched(self, copies: Iterator[Any]) -> Iterator[Any]:
        """Yield the copies without end. A thread makes them before the script asks for them.

        Args:
            copies: Makes a copy at each ``next``. It never ends.
        """
        ready: queue.Queue[Any] = queue.Queue(_NUM_PREFETCHED)

        def copy() -> None:
            for made in copies:
                # Only the thread itself can read its CPU time.
                self.cpu_s = time.thread_time()
                ready.put(made)

        # A daemon thread, which ends with the process. A profile run ends right after these batches.
        threading.Thread(target=copy, name="hetero-kept-batches", daemon=True).start()
        while True:
            yield ready.get()
