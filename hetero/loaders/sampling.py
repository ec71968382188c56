"""The loader's own order: which samples make batch k of an epoch on a rank.

This is pure arithmetic on int64 arrays. Let R be the world size and B the batch size. Global batch k is the slice
[k R B, (k + 1) R B) of the epoch's order. Rank r takes every R-th element of the slice, starting at the r-th. The
samples of a global batch therefore do not depend on R if R B stays the same.

With a plan (`hetero.plans`), rank r takes the r-th run of B elements of the slice instead, because elements that follow
each other may lie together in a file. The last global batch, which may be incomplete, is shared as above.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hetero.batches.indexed import IndexedWork
from hetero.batches.request import Work
from hetero.errors import ConfigError
from hetero.plans.plan import Order, Plan

__all__ = ["BuiltInOrder", "Permute", "PlannedBatch", "Shard", "epoch_permutation"]


class Permute(Protocol):
    """A function like `epoch_permutation`."""

    def __call__(self, num_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return a permutation of ``range(num_samples)`` drawn from (seed, epoch)."""


# Half of the 32 bits that a request has for an occurrence (protos/hetero/v1/data.proto). The other half counts the
# repeats of padding.
_MANY = 2**16
# Mixed into the seed, because other code that seeds from (seed, epoch) must draw different numbers.
_ORDER_TAG = int.from_bytes(b"hetero", "big")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank and world size of one of the ranks that share an epoch."""

    rank: int = 0
    """Rank in [0, world_size)."""
    world_size: int = 1
    """Number of ranks, >= 1."""

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ConfigError(f"world size is {self.world_size}, expected at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank {self.rank} is out of range, expected 0 to {self.world_size - 1}")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """A batch that is planned, but not fetched yet."""

    position: int
    """Position of the global batch in the epoch, from 0."""
    work: Work
    """The samples of the batch."""
    rank: int | None = None
    """Rank that the batch belongs to. None if the user's sampler decides."""
    sampler_state: object = None
    """State of the user's sampler after this batch, if the sampler is stateful."""
    num_drawn: int = 0
    """Number of indices drawn in this epoch, including this batch. 0 for the built-in order."""
    lane: int | None = None
    """Lane of the first sample, see `hetero.plans.plan.Order`. None in an order without lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInOrder:
    """Sequential or shuffled order, sharded over the ranks."""

    num_samples: int
    """Samples in the data set, >= 0."""
    batch_size: int
    """Samples per batch on each rank, >= 1."""
    seed: int
    """Signed 64-bit seed."""
    shuffle: bool = False
    """Whether every epoch is a different permutation."""
    drop_last: bool = False
    """Whether an incomplete global batch is left out."""
    padding: bool = True
    """Whether all ranks get the same number of samples, with at most world size - 1 repeats."""
    permute: Permute | None = None
    """Function that draws the permutation of an epoch. None for `epoch_permutation`."""
    plan: Plan | None = None
    """The order of a shuffled epoch. None for a permutation of all samples."""
    part: npt.NDArray[np.int64] | None = None
    """Indices of the samples that are used, `num_samples` of them. None if all samples of the data set are used."""

    def num_global_batches(self, world_size: int) -> int:
        """Return the number of global batches of an epoch, including an incomplete last one unless it is dropped."""
        global_batch = self.batch_size * world_size
        return self.num_samples // global_batch if self.drop_last else -(-self.num_samples // global_batch)

    def num_batches(self, shard: Shard) -> int:
        """Return the number of batches of an epoch on one rank. Ranks differ only without padding."""
        count = self.num_global_batches(shard.world_size)
        if count and not self.drop_last and not self.padding:
            # Without padding, the last global batch may lack samples for the higher ranks.
            num_last = self.num_samples - (count - 1) * self.batch_size * shard.world_size
            count -= num_last <= shard.rank
        return count

    def num_samples_of(self, shard: Shard) -> int:
        """Return the number of samples of an epoch on one rank, including repeats."""
        end = self._end(shard.world_size)
        return len(range(shard.rank, end, shard.world_size))

    def batches(self, epoch: int, shard: Shard, *, start: int = 0) -> Iterator[PlannedBatch]:
        """Yield one rank's batches from global batch ``start`` on.

        With shuffling, the first batch costs O(n) time and 8 bytes per sample. Each later batch costs O(batch size).
        """
        world_size = shard.world_size
        count = self.num_global_batches(world_size)
        if start >= count:
            return
        global_batch = self.batch_size * world_size
        order = self._order(epoch, global_batch)
        end = self._end(world_size)
        for position in range(start, count):
            first, stop = position * global_batch, min((position + 1) * global_batch, end)
            if self.plan is not None and stop == first + global_batch:
                begin = first + shard.rank * self.batch_size
                places = np.arange(begin, begin + self.batch_size, dtype=np.int64)
            else:
                places = np.arange(first + shard.rank, stop, world_size, dtype=np.int64)
            # Empty if the last global batch lacks a sample for this rank, see `num_batches`.
            if len(places):
                yield self._planned(places, order, position, shard.rank)

    def num_whole_batches(self, world_size: int) -> int:
        """Return the number of batches that `whole_batches` yields in an epoch."""
        if self.drop_last or self.padding:
            return self.num_global_batches(world_size) * world_size
        return -(-self.num_samples // self.batch_size)

    def whole_batches(self, epoch: int, world_size: int, *, start: int = 0) -> Iterator[PlannedBatch]:
        """Yield consecutive pieces of the epoch's order, as torch's ``BatchSampler`` does.

        This is for accelerate, which shards batches instead of samples: with R ranks, rank r gets the pieces r, r + R,
        r + 2 R and so on. The global batches are the same as those of `batches`, with one exception. With padding and
        several ranks, the last global batch is filled up to its full size, as accelerate does with torch's loader.

        Args:
            epoch: Epoch, >= 0.
            world_size: Number of ranks that share the batches, >= 1.
            start: Number of global batches to skip.
        """
        if start >= self.num_global_batches(world_size):
            return
        order = self._order(epoch, self.batch_size * world_size)
        num_batches = self.num_whole_batches(world_size)
        # With ``drop_last`` all pieces are whole anyway.
        fills_up = self.drop_last or (self.padding and world_size > 1)
        end = num_batches * self.batch_size if fills_up else self.num_samples
        for number in range(start * world_size, num_batches):
            position, rank = divmod(number, world_size)
            stop = min((number + 1) * self.batch_size, end)
            yield self._planned(np.arange(number * self.batch_size, stop, dtype=np.int64), order, position, rank)

    def _order(self, epoch: int, global_batch: int) -> Order:
        """Return the order of an epoch."""
        if not self.shuffle:
            return _Fixed(None)
        if self.plan is not None:
            return self.plan.order(seed=self.seed, epoch=epoch, global_batch=global_batch)
        return _Fixed((self.permute or epoch_permutation)(self.num_samples, seed=self.seed, epoch=epoch))

    def _end(self, world_size: int) -> int:
        """Return the length of the epoch's order, with padding and without dropped samples."""
        if self.drop_last:
            return self.num_global_batches(world_size) * self.batch_size * world_size
        if self.padding:
            return -(-self.num_samples // world_size) * world_size
        return self.num_samples

    def _planned(self, places: npt.NDArray[np.int64], order: Order, position: int, rank: int) -> PlannedBatch:
        """Return the batch of the samples at ``places`` in the epoch's order. Places past the end wrap, for padding."""
        lane = order.lane(int(places[0]), len(places))
        repeats = None
        if places[-1] >= self.num_samples:
            # ``repeats``: how often the sample of each place came before. With fewer samples than ranks, the order
            # wraps more than once, so this can exceed 1.
            repeats, places = np.divmod(places, self.num_samples)
        indices, occurrences = order.draw(places)
        # A sample that a plan draws several times is another occurrence each time, also in the padding.
        if repeats is not None:
            occurrences = (repeats if occurrences is None else repeats * _MANY + occurrences).astype(np.uint32)
        work = IndexedWork(indices if self.part is None else self.part[indices], occurrences)
        return PlannedBatch(position, work, rank, lane=lane)


class _Fixed:
    """An order that is a permutation, or the order of the data set.

    Args:
        permutation: The permutation of an epoch. None without shuffling.
    """

    def __init__(self, permutation: npt.NDArray[np.int64] | None) -> None:
        self._permutation = permutation

    def draw(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], None]:
        """Return the sample at each position."""
        return (positions if self._permutation is None else self._permutation[positions]), None

    def lane(self, position: int, num_samples: int) -> None:
        """Return None, because each batch has samples of all files."""


def epoch_permutation(num_samples: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return the order of one epoch: a permutation of ``range(num_samples)`` drawn from (seed, epoch).

    The global generators are not used. The cost is O(n): 30 ms for a million samples, and 8 bytes per sample.

    Args:
        num_samples: Samples in the data set, >= 0.
        seed: Signed 64-bit seed.
        epoch: Epoch, >= 0.
    """
    # SeedSequence takes no negative numbers, so use the seed modulo 2**64.
    entropy = (_ORDER_TAG, seed % 2**64, epoch)
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
    return generator.permutation(num_samples).astype(np.int64, copy=False)
