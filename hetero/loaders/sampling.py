"""The loader's own order: which samples make batch k of an epoch on a rank.

Pure arithmetic on int64 arrays. Global batch k of world size R and batch size
B is the slice [k R B, (k + 1) R B) of the epoch's order; rank r takes every
R-th element of it from the r-th on. The samples of a global batch therefore do
not depend on R as long as R B is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero.batches.request import Indices
from hetero.errors import ConfigError

__all__ = ["BuiltInOrder", "PlannedBatch", "Shard", "epoch_permutation"]

_ORDER_TAG = 0x6865_7465_726F  # "hetero": other users of (seed, epoch) get other streams


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's place among the ranks that share an epoch."""

    rank: int = 0
    """In [0, world_size)."""
    world_size: int = 1
    """Ranks, >= 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is out of range, expected 0 to {self.world_size - 1}")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """The indices of one batch, before anything was fetched."""

    position: int
    """Of the global batch in the epoch, from 0."""
    indices: Indices
    """What the sampler yielded, see `hetero.batches.request.as_indices`."""
    occurrences: npt.NDArray[np.uint32] | None = None
    """Per index, how often it came before in the epoch; None: all 0."""
    rank: int | None = None
    """Whose batch it is; None where the user's sampler decides."""
    sampler_state: object = None
    """The user's sampler's ``state_dict()`` after this batch, if it has one."""
    num_drawn: int = 0
    """Indices drawn in this epoch up to and with this batch; 0 for the built-in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInOrder:
    """Sequential or shuffled order, shared among ranks."""

    num_samples: int
    """Samples in the data set, >= 0."""
    batch_size: int
    """Per rank, >= 1."""
    seed: int
    """Signed 64-bit."""
    shuffle: bool = False
    """Whether every epoch is a permutation of its own."""
    drop_last: bool = False
    """Whether an incomplete global batch is left out."""
    padding: bool = True
    """Whether ranks get equally many samples, with at most world size - 1 repeats."""

    def num_global_batches(self, world_size: int) -> int:
        """Return the global batches of an epoch, an incomplete last one included unless dropped."""
        global_batch = self.batch_size * world_size
        return self.num_samples // global_batch if self.drop_last else -(-self.num_samples // global_batch)

    def num_batches(self, shard: Shard) -> int:
        """Return the batches of an epoch on one rank; they differ between ranks only without padding."""
        count = self.num_global_batches(shard.world_size)
        if count and not self.drop_last and not self.padding:
            tail = self.num_samples - (count - 1) * self.batch_size * shard.world_size
            count -= tail <= shard.rank
        return count

    def num_samples_of(self, shard: Shard) -> int:
        """Return the samples of an epoch on one rank, repeats included."""
        end = self._end(shard.world_size)
        return len(range(shard.rank, end, shard.world_size))

    def is_ragged(self, world_size: int) -> bool:
        """Whether the last batch of any rank is shorter than the others, or missing."""
        return self._end(world_size) % (self.batch_size * world_size) != 0

    def batches(self, epoch: int, shard: Shard, *, start: int = 0) -> Iterator[PlannedBatch]:
        """Yield one rank's batches from global batch ``start`` on.

        The first one costs O(n) time and 8 bytes per sample where shuffled, a
        batch after that O(batch size).
        """
        return self._iterate(epoch, shard.world_size, range(shard.rank, shard.rank + 1), start)

    def batches_of_all_ranks(self, epoch: int, world_size: int, *, start: int = 0) -> Iterator[PlannedBatch]:
        """Yield the batches of all ranks: rank 0's of a global batch, rank 1's, ..., then the next global batch."""
        return self._iterate(epoch, world_size, range(world_size), start)

    def _end(self, world_size: int) -> int:
        """Return the end of the epoch's order, padding included."""
        if self.drop_last:
            return self.num_global_batches(world_size) * self.batch_size * world_size
        if self.padding:
            return -(-self.num_samples // world_size) * world_size
        return self.num_samples

    def _iterate(self, epoch: int, world_size: int, ranks: range, start: int) -> Iterator[PlannedBatch]:
        count = self.num_global_batches(world_size)
        if start >= count:
            return
        order = epoch_permutation(self.num_samples, seed=self.seed, epoch=epoch) if self.shuffle else None
        global_batch = self.batch_size * world_size
        end = self._end(world_size)
        for position in range(start, count):
            first, stop = position * global_batch, min((position + 1) * global_batch, end)
            for rank in ranks:
                places = np.arange(first + rank, stop, world_size, dtype=np.int64)
                if not len(places):
                    continue
                occurrences = None
                if stop > self.num_samples:  # the padding starts over at the beginning of the order
                    repeats, places = np.divmod(places, self.num_samples)
                    occurrences = repeats.astype(np.uint32) if repeats.any() else None
                indices = places if order is None else order[places]
                yield PlannedBatch(position, indices, occurrences, rank)


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of one epoch: a permutation of ``range(num_samples)`` drawn from (seed, epoch).

    Touches no global generator. O(n): 30 ms for a million samples, 8 bytes each.

    Args:
        num_samples: Samples in the data set, >= 0.
        seed: Signed 64-bit.
        epoch: >= 0.
    """
    entropy = (_ORDER_TAG, seed % 2**64, epoch)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
    return generator.permutation(num_samples).astype(np.int64, copy=False)
