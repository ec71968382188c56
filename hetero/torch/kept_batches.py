"""Batches that a profile run keeps and hands out again, each time as new memory that the script may write to.

A batch is copied when it is kept, before the script gets it, and again each time it is handed out. A thread copies
large batches ahead, as the threads of a reader receive batches ahead. Small ones are copied in ``next``, because the
exchange with a thread would take longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.data

from hetero.torch.leaf_copies import copy_leaves

__all__ = ["KeptBatches", "batch_nbytes"]

MAX_KEPT = 8
_SMALL_BYTES = 2**20
_NUM_AHEAD = 2


class KeptBatches:
    """The first batches of a loader, up to 8. For one thread.

    Args:
        max_bytes: Limit of all kept batches together. One batch is always kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._batches: list[Any] = []
        self._nbytes = 0
        self._is_pinned = False
        self._copies: Iterator[Any] | None = None
        self._cpu_s = 0.0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the thread has used for copies."""
        return self._cpu_s

    def keep(self, batch: Any) -> None:
        """Keep a copy of a batch, unless there are enough already."""
        nbytes = batch_nbytes(batch)
        if len(self._batches) >= MAX_KEPT or (self._batches and self._nbytes + nbytes > self._max_bytes):
            return
        self._is_pinned = self._is_pinned or _has_pinned(batch)
        self._batches.append(copy_leaves(batch))
        self._nbytes += nbytes

    def next(self) -> Any:
        """Return a copy of the batch whose turn it is. At least one batch must be kept."""
        if self._copies is None:
            is_small = self._nbytes <= _SMALL_BYTES * len(self._batches)
            endless = (self._copied(batch) for batch in itertools.cycle(self._batches))
            self._copies = endless if is_small else self._copied_ahead(endless)
        return next(self._copies)

    def first(self, count: int) -> list[Any]:
        """Return up to ``count`` kept batches. The caller must not write to them."""
        return self._batches[:count]

    def _copied(self, batch: Any) -> Any:
        # pin_memory copies too, and makes new containers.
        if self._is_pinned:
            return torch.utils.data._utils.pin_memory.pin_memory(batch)
        return copy_leaves(batch)

    def _copied_ahead(self, copies: Iterator[Any]) -> Iterator[Any]:
        ready: queue.Queue[Any] = queue.Queue(_NUM_AHEAD)

        def copy() -> None:
            for made in copies:
                self._cpu_s = time.thread_time()
                ready.put(made)

        threading.Thread(target=copy, name="hetero-kept-batches", daemon=True).start()
        while True:
            yield ready.get()


def batch_nbytes(value: Any) -> int:
    """Return the bytes of the tensors and arrays in nested mappings, sequences and dataclasses."""
    return sum(leaf.nbytes for leaf in _leaves(value))


def _has_pinned(batch: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.is_pinned() for leaf in _leaves(batch))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        for item in value:
            yield from _leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None))
