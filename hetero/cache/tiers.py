"""The places where the loaded samples of one data set are kept: memory first, then a disk."""

from __future__ import annotations

import functools
import logging
import multiprocessing.util
import os
import weakref
from pathlib import Path
from typing import Any

from hetero.cache.entries import EncodedSample
from hetero.cache.folders import MEMORY, SharedFolder, folder_bytes, sweep_memory
from hetero.cache.store import ABSENT, SampleStore
from hetero.documents.quantities import bytes_text
from hetero.errors import ConfigError
from hetero.spec import Cache

__all__ = ["Tiers", "close_at_exit", "close_tiers", "open_tiers"]

_FREE_SHARE_OF_MEMORY = 0.25
"""Share of /dev/shm that stays free, because torch's workers put batches there."""
_FREE_SHARE_OF_DISK = 0.05
"""As ext4 keeps free for root by default, see mke2fs(8)."""
_LATE = -100
"""Priority of a finalizer of `multiprocessing` that runs after all others."""

logger = logging.getLogger(__name__)


class Tiers:
    """The stores of one data set, open in this process. Use `open_tiers` to make them.

    Args:
        settings: Where samples may be kept.
        name: Registered name of the data set.
        key: See `hetero.cache.fingerprint`.
        num_samples: Indices are in ``[0, num_samples)``.
    """

    def __init__(self, settings: Cache, name: str, key: bytes, num_samples: int) -> None:
        self.num_samples = num_samples
        self._name = name
        self._key = key
        self._stores: list[SampleStore] = []
        self._has_warned = False
        if settings.memory:
            # Remove the samples that killed processes have left in memory.
            sweep_memory()
            self._open(MEMORY, int(settings.memory), _FREE_SHARE_OF_MEMORY)
        if settings.folder is not None:
            self._open(Path(os.path.expandvars(settings.folder)).expanduser(), int(settings.disk), _FREE_SHARE_OF_DISK)
        # The arguments do not include `self`, because the finalizer would then keep this object alive. The process id
        # is needed, because a forked child inherits the finalizer and must not close the stores of its parent.
        self._finalizer = weakref.finalize(self, _close, self._stores, os.getpid())

    @property
    def num_damaged(self) -> int:
        """How many kept samples were damaged so far."""
        return sum(store.num_damaged for store in self._stores)

    def get(self, number: int) -> Any:
        """Return a kept sample in new memory, or `ABSENT`."""
        for store in self._stores:
            found = store.get(number)
            if found is not ABSENT:
                return found
        return ABSENT

    def put(self, number: int, sample: EncodedSample) -> None:
        """Keep a sample in the first store with room. Log once if all are full."""
        # `put` of a store returns False if the store is full. Without a store, a warning was logged when the stores
        # could not be opened.
        if any(store.put(number, sample) for store in self._stores) or self._has_warned or not self._stores:
            return
        self._has_warned = True
        logger.warning(
            "data set %r: the cache is full, so some samples are loaded again in each epoch (%s)",
            self._name,
            "; ".join(store.why_full for store in self._stores),
        )

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._finalizer()

    def _open(self, base: Path, max_bytes: int, free_share: float) -> None:
        """Open a store below a folder. If this fails, log a warning and go on without it."""
        try:
            folder = SharedFolder(base, self._name, self._key.hex())
            store = SampleStore(folder, self._key, self.num_samples, max_bytes=max_bytes, free_share=free_share)
        except (ConfigError, OSError, OverflowError) as error:
            text = str(error).partition("\n")[0]
            logger.warning(
                "data set %r: no samples are kept in %s (%s): %s", self._name, base, bytes_text(max_bytes), text
            )
        else:
            self._stores.append(store)
            # Samples in memory do not outlive the processes that use them. Samples on a disk may be from earlier jobs.
            if base != MEMORY:
                kept = bytes_text(folder_bytes(folder.path))
                logger.info("data set %r: %s of its samples are kept in %s", self._name, kept, folder.path)


_known: weakref.WeakValueDictionary[tuple[int, Cache, str, bytes, int], Tiers] = weakref.WeakValueDictionary()
"""The open stores of this process. They are shared, because a script may build a data set again for each epoch."""


def open_tiers(settings: Cache, name: str, key: bytes, num_samples: int) -> Tiers:
    """Return the stores of a data set, which this process opens once. The arguments are those of `Tiers`."""
    # A forked process inherits the stores of its parent and must not use them, so the process id is in the key.
    known_as = (os.getpid(), settings, name, key, num_samples)
    tiers = _known.get(known_as)
    if tiers is None:
        tiers = _known[known_as] = Tiers(settings, name, key, num_samples)
    # This registers `close_tiers` once per process, because a forked child does not inherit the registration.
    close_at_exit(os.getpid())
    return tiers


@functools.cache
def close_at_exit(_pid: int) -> None:
    """Call `close_tiers` when this process ends, after the end of its children.

    `functools.cache` makes later calls with the same ``_pid`` do nothing.

    Args:
        _pid: Id of this process. A forked child calls this function with another id, so the call is not skipped. This
            is needed, because multiprocessing clears the finalizers that a forked child has inherited.
    """
    # Use a finalizer of multiprocessing, because its processes run no handlers of `atexit`. With a priority below 0,
    # the finalizer runs after `multiprocessing` has ended the children. A handler of `atexit` may run while
    # children still live.
    multiprocessing.util.Finalize(obj=None, callback=close_tiers, exitpriority=_LATE)


def close_tiers() -> None:
    """Close all stores of this process, and remove the samples in memory if no other process uses them."""
    for key, tiers in list(_known.items()):
        # A key begins with a process id. A forked child has inherited its parent's stores, and leaves them open.
        if key[0] == os.getpid():
            _known.pop(key, None)
            tiers.close()
    sweep_memory()


def _close(stores: list[SampleStore], pid: int) -> None:
    """Close stores and empty the list, unless they belong to the process that this process was forked from."""
    if pid == os.getpid():
        while stores:
            stores.pop().close()
