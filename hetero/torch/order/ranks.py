"""Compares the orders of ranks through the store of the process group. No rank waits for another one.

If ranks shuffle with different seeds, each rank takes its part of another order. Then some samples come twice and
others never. The same happens if the script's sampler draws from a generator that every rank seeds differently.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hetero.errors import DatasetMismatchError

__all__ = ["MAX_INDICES", "DrawnPass", "RankOrders", "RankStore"]

MAX_INDICES = 2**16
"""Only indices below this bound are compared. So a rank publishes at most 8 KiB, and a comparison takes 0.1 ms."""

logger = logging.getLogger(__name__)

_num_loaders: Counter[tuple[object, ...]] = Counter()


@dataclass(frozen=True, slots=True)
class DrawnPass:
    """A pass that was drawn to its end."""

    number: int
    """The number of the pass."""
    counts: npt.NDArray[np.uint32]
    """How often each index came, for the first `MAX_INDICES` indices."""
    largest_batch: int
    """Indices in the largest batch."""


class RankStore:
    """The part of the process group's store that belongs to one loader.

    Loaders of two ranks are the same if they have the same kind, the same line of the script makes them, and they are
    the n-th such loader on both ranks. So rank 0 may make further loaders in other lines.

    Args:
        purpose: What this part of the store is for.
        loader: Name of the loader.
        properties: The other properties that loaders with the same batches have in common. Their texts must be equal on
            all ranks.
    """

    def __init__(self, purpose: str, loader: str, *properties: object) -> None:
        kind = (purpose, loader, *properties, _line_of_script())
        _num_loaders[kind] += 1
        self.loader = loader
        """Name of the loader, for messages."""
        self._kind = kind
        self._prefix = f"hetero/{kind}/{_num_loaders[kind]}"

    @property
    def is_open(self) -> bool:
        """Whether the process group has a store, and more than one rank."""
        return _store() is not None

    def set(self, key: str, text: str) -> None:
        """Write a text."""
        _store().set(f"{self._prefix}/{key}", text)

    def get(self, key: str) -> str:
        """Return a text. Call `check` first, because this waits for it."""
        return str(_store().get(f"{self._prefix}/{key}").decode())

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all texts were written. Does not wait."""
        return bool(_store().check([f"{self._prefix}/{key}" for key in keys]))

    def set_if_missing(self, key: str, text: str) -> str:
        """Write a text, unless a rank has written one. Return what is there then. Does not wait."""
        return str(_store().compare_set(f"{self._prefix}/{key}", "", text).decode())

    def count(self, key: str) -> int:
        """Add 1 to a counter, and return its value. Does not wait."""
        return int(_store().add(f"{self._prefix}/{key}", 1))

    def delete(self, key: str) -> None:
        """Delete a text. Without effect in a store that cannot delete."""
        with suppress(RuntimeError):
            _store().delete_key(f"{self._prefix}/{key}")


class RankOrders(RankStore):
    """Compares the order of one loader with the orders of the same loader on other ranks.

    Args:
        purpose: See `RankStore`.
        loader: See `RankStore`.
        properties: See `RankStore`.
    """

    def __init__(self, purpose: str, loader: str, *properties: object) -> None:
        super().__init__(purpose, loader, *properties)
        self._is_checked = False
        """Whether the seed was compared."""
        self._has_warned = False
        """Whether a warning about shared samples was logged."""

    def check_seed(self, seed: int) -> None:
        """Compare the seed of a shuffled order with that of the first rank that has called this method.

        Raises:
            DatasetMismatchError: If the seeds differ.
        """
        if self._is_checked or not self.is_open:
            return
        self._is_checked = True
        rank = torch.distributed.get_rank()
        with suppress(RuntimeError):  # the rank that holds the store may have ended
            other, _, found = self.set_if_missing("seed", f"{rank} {seed}").partition(" ")
            if int(found) != seed:
                raise DatasetMismatchError(
                    f"loader {self.loader:.40}: its seed is {seed} on rank {rank} and {found} on rank {other}\n"
                    "  Each rank takes its part of the order that the seed gives, so some samples would come twice and "
                    "others never.\n"
                    "  Pass the same seed= or generator on every rank: each sample has a seed of its own anyway. "
                    "If this loader is for one rank alone, pass shard=(0, 1)."
                )

    def compare_parts(self, drawn: DrawnPass, *, sampler: str) -> None:
        """Log one warning if a pass of this rank and the same pass of a neighbour share samples by chance.

        If two ranks permute all samples independently and each takes a part, they share about 1 / (world size) of their
        parts. The bound for the warning is half of this. Equal parts cause no warning, because ranks that hold parts of
        one model need the same samples. A few shared samples cause none either, because a batch may have been filled up
        with samples of another rank.

        Args:
            drawn: The pass of this rank.
            sampler: Class of the sampler.
        """
        store = _store()
        # If an index came twice, the sampler draws with replacement, and its ranks share samples anyway.
        if self._has_warned or store is None or drawn.counts.max(initial=0) > 1:
            return
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        own = drawn.counts > 0
        # All loaders of a kind use the same key, because the store must not grow.
        key = f"hetero/part/{self._kind}"
        num_own = int(own.sum())
        with suppress(RuntimeError):
            store.set(f"{key}/{rank}", drawn.number.to_bytes(16, "little") + np.packbits(own).tobytes())
            # A set, because with two ranks both neighbours are the same.
            for other in {(rank - 1) % world_size, (rank + 1) % world_size}:
                # Check first, because `get` would wait until the neighbour has finished its pass, or for a timeout.
                if not store.check([f"{key}/{other}"]):
                    continue
                # The first 16 bytes are the number of the pass. After them, each bit is one index.
                found = store.get(f"{key}/{other}")
                part = np.unpackbits(np.frombuffer(found, np.uint8, offset=16))
                # A part ends after its largest index, so the parts may have different lengths.
                length = min(len(own), len(part))
                num_shared = int(np.count_nonzero(own[:length] & part[:length]))
                # Chance gives about 1 / (world size) of the samples, and half of this is enough for a warning. A
                # filled-up batch may share samples too, so more samples than one batch has must be shared.
                least_shared = max(drawn.largest_batch, num_own / (2 * world_size))
                is_chance = least_shared < num_shared < num_own
                # No rank waits, so the neighbour's part may belong to another pass. Then it is not compared.
                if not is_chance or int.from_bytes(found[:16], "little") != drawn.number:
                    continue
                self._has_warned = True
                logger.warning(
                    "sampler %s: ranks %d and %d have %d of %d samples of this pass in common. If each rank should "
                    "have a part of its own, let the sampler draw from the global generators, which hetero seeds "
                    "equally on every rank. numpy.random.default_rng() differs between ranks",
                    sampler,
                    rank,
                    other,
                    num_shared,
                    num_own,
                )
                return


def _line_of_script() -> str:
    """Return file and line of the code outside of this package that makes the loader."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "hetero":
        frame = frame.f_back
    return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _store() -> Any:
    """Return the store of the process group. None without a group, and for MPI."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return None
    with suppress(AttributeError, RuntimeError, ValueError):
        return distributed.distributed_c10d._get_default_store()
    return None
