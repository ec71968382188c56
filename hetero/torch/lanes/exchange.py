"""What the ranks of a loader of lanes tell each other, through the store of the process group."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time

from hetero.control.rank import session as control
from hetero.errors import DataPlaneError
from hetero.system.waits import LOG_INTERVAL_S
from hetero.torch.order.ranks import RankStore

__all__ = ["StoreExchange"]

logger = logging.getLogger(__name__)

_POLL_S = 0.002
"""Seconds between two looks at the store. Each step of ``end="stop"`` waits for the slowest rank and then up to this
long, so `hetero.system.waits.SHORT_POLL_S` would add up to 50 ms to a step. The store cannot wake this wait, because a
rank that fails sets another key."""


class StoreExchange:
    """See `hetero.loaders.lanes.passes.RankExchange`."""

    def __init__(self, store: RankStore, number: int, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = f"{number}/"
        """Begin of all keys. Another pass has another number, so it does not read old keys."""
        self._rank = rank
        self._world_size = world_size
        self._written: list[list[str]] = []
        """Keys of the latest two steps that this rank has written."""

    def agree(self, step: int, end: int | None) -> int | None:
        """Return the lowest end that a rank passes. Wait until all ranks have called this for the step."""
        key = f"{self._prefix}end/{step}"
        self._store.set(f"{key}/{self._rank}", json.dumps(end))
        begin_s = said_s = time.monotonic()
        keys = [f"{key}/{rank}" for rank in range(self._world_size)]
        written = [f"{key}/{self._rank}"]
        # The last rank to arrive reads the ends of all ranks, and the others read only the lowest one. So the store has
        # a number of requests per step that grows with the ranks, and not with their square.
        if self._store.count(f"{key}/count") == self._world_size:
            ends = [end for each in keys if (end := json.loads(self._store.get(each))) is not None]
            self._store.set(f"{key}/lowest", json.dumps(min(ends, default=None)))
            written += [f"{key}/count", f"{key}/lowest"]
        while not self._store.check([f"{key}/lowest"]):
            if self._store.check([f"{self._prefix}failed"]):
                failed = self._store.get(f"{self._prefix}failed")
                raise DataPlaneError(
                    f"rank {failed} could not deliver a batch, so this rank stops too\n"
                    f"  See the error of rank {failed}."
                )
            session = control.current()
            if session is not None:
                session.check_wait(False)
            now_s = time.monotonic()
            if now_s - said_s > LOG_INTERVAL_S:
                said_s = now_s
                missing = [rank for rank in range(self._world_size) if not self._store.check([keys[rank]])]
                logger.warning(
                    "loader %s: step %d waits until rank %s has its batch, for %.0f s so far. If not all ranks iterate "
                    'over this loader, pass it shard=(0, 1) or end="wrap"',
                    self._store.loader,
                    step,
                    ", ".join(map(str, missing)),
                    now_s - begin_s,
                )
            time.sleep(_POLL_S)
        lowest: int | None = json.loads(self._store.get(f"{key}/lowest"))
        # Each rank has read the keys of the step before, because it has passed one for this step.
        self._written.append(written)
        while len(self._written) > 2:
            self._delete(self._written.pop(0))
        return lowest

    def fail(self) -> None:
        """Let `agree` raise an error on all other ranks. Does not wait."""
        with contextlib.suppress(RuntimeError):
            self._store.set_if_missing(f"{self._prefix}failed", str(self._rank))

    def first(self, lane: int, digest: str) -> int:
        """Return the first lane that was passed with this digest of its first samples. Does not wait."""
        return int(self._store.set_if_missing(f"{self._prefix}first/{digest}", str(lane)))

    def share(self, state: str) -> None:
        """Let other ranks read the snapshots of this rank. Does not wait."""
        with contextlib.suppress(RuntimeError):  # with other ends than "stop", the rank with the store may have ended
            self._store.set(f"{self._prefix}state/{self._rank}", state)

    def close(self) -> None:
        """Delete what this rank has written. Call it when other ranks have read it."""
        self._delete([*itertools.chain(*self._written), f"{self._prefix}state/{self._rank}"])

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._store.delete(key)

    def shared(self) -> list[str]:
        """Return what other ranks have shared. Does not wait."""
        keys = [f"{self._prefix}state/{rank}" for rank in range(self._world_size) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            return [self._store.get(key) for key in keys if self._store.check([key])]
        return []
