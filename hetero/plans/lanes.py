"""The order of a pass over an iterable: the samples of batch k, as places in lanes.

A *lane* is one iterator over its part of the source. The samples of a pass are numbered. Chunk j is the samples
[j C, (j + 1) C), where C is `LaneLayout.chunk_samples`. It comes from lane j mod L, and is the (j // L)-th chunk of
that lane. As for other plans, global batch k is the run [k B, (k + 1) B), and rank r takes the r-th part of it. So the
global batches do not depend on the number of ranks, if B stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetero.errors import ConfigError

__all__ = ["LaneLayout", "LanePart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePart:
    """Samples of one lane that follow each other."""

    lane: int
    """Number of the lane, from 0."""
    place: int
    """Place of the first sample in the lane, from 0."""
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneLayout:
    """How a pass is made of lanes. It stays the same for a whole pass, also when the number of ranks changes."""

    num_lanes: int
    """Lanes of all ranks together, at least 1."""
    chunk_samples: int
    """Samples that follow each other in the pass and come from one lane, at least 1."""
    num_sources: int = 1
    """Sources of a `hetero.Mixture`. Each has `num_lanes` lanes, see `hetero.plans.lane_mixtures`."""

    @property
    def num_all_lanes(self) -> int:
        """Lanes of all sources together."""
        return self.num_lanes * self.num_sources

    def check(self, *, batch_size: int, world_size: int) -> None:
        """Check that the lanes can be divided over the chunks of a global batch, and the chunks over the ranks.

        Each lane is then read by the same rank in the whole pass. Chunks that are larger than a batch are read by
        several ranks.

        Raises:
            ConfigError: If they cannot be divided.
        """
        global_batch, chunk = batch_size * world_size, self.chunk_samples
        if global_batch % chunk and not chunk % batch_size:
            raise ConfigError(
                f"chunk_samples is {chunk}, and a step of all ranks has {global_batch} samples now\n"
                f"  Choose a batch_size whose product with the number of ranks is a multiple of {chunk}."
            )
        if batch_size % chunk and chunk % batch_size:
            raise ConfigError(
                f"chunk_samples is {chunk}, and batch_size is {batch_size} now\n"
                "  Choose them so that one divides the other. Within an epoch, chunk_samples cannot change."
            )
        num_chunks = global_batch // chunk
        if self.num_lanes % num_chunks:
            below = self.num_lanes // num_chunks * num_chunks
            allowed = " or ".join(str(number) for number in (below, below + num_chunks) if number)
            fitting = next((ranks for ranks in range(world_size, 2 * world_size + 1) if not self.num_lanes % ranks), 0)
            more_ranks = f", or run {fitting} ranks" if chunk == batch_size and fitting else ""
            raise ConfigError(
                f"{self.num_lanes} lanes cannot be divided over a step, which takes {chunk} samples of each of "
                f"{num_chunks} lanes\n"
                f"  Pass lanes={allowed}{more_ranks}. Within an epoch, lanes cannot change."
            )

    def steps_between(self, *, global_batch: int) -> int:
        """Return how many steps lie between two chunks of the same lane."""
        return max(1, self.num_lanes * self.chunk_samples // global_batch)

    def place(self, lane: int, position: int) -> int:
        """Return how many samples of a lane come before a position of the pass, which is a multiple of a chunk."""
        chunks = position // self.chunk_samples
        return max(0, chunks - lane + self.num_lanes - 1) // self.num_lanes * self.chunk_samples

    def parts(self, step: int, *, batch_size: int, rank: int, world_size: int) -> Iterator[LanePart]:
        """Yield the parts of lanes that make the batch of a rank, in order."""
        position = (step * world_size + rank) * batch_size
        end = position + batch_size
        while position < end:
            chunk, within = divmod(position, self.chunk_samples)
            count = min(end - position, self.chunk_samples - within)
            turn, lane = divmod(chunk, self.num_lanes)
            yield LanePart(lane=lane, place=turn * self.chunk_samples + within, num_samples=count)
            position += count
