"""The order of a user's sampler: drawn lazily, reproducibly, with occurrences counted."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data.distributed

from hetero.batches.request import Indices, as_indices
from hetero.batches.seeds import preserved_generators, seed_generators
from hetero.datasets import Index
from hetero.torch.sampling import PlannedBatch

__all__ = ["OccurrenceCounter", "SamplerOrder"]

_TORCHS_SAMPLERS = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SequentialSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
    torch.utils.data.distributed.DistributedSampler,
)
_MAX_COUNTED_INDEX = 2**31  # beyond it, a dictionary: 4 bytes for every index up to the largest would be too much


class SamplerOrder:
    """Batches from a user's sampler or batch sampler, as it is: sharding is its own business.

    Drawing is reproducible from (seed, epoch) for samplers that use the global
    generators, or a `torch.Generator` in their ``generator`` attribute: the
    former are swapped for the time of the draw, the latter is seeded anew at
    the start of every epoch. ``set_epoch`` is forwarded.

    Args:
        sampler: Yields indices, or lists of indices if ``is_batch_sampler``.
        is_batch_sampler: Whether one element is a whole batch.
        batch_size: Of the batches made of a plain sampler's indices, >= 1.
        drop_last: Whether a plain sampler's incomplete last batch is left out.
        seed: Signed 64-bit.
    """

    def __init__(
        self, sampler: Iterable[Any], *, is_batch_sampler: bool, batch_size: int, drop_last: bool, seed: int
    ) -> None:
        self.sampler = sampler
        self.is_batch_sampler = is_batch_sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.seed = seed
        inner = getattr(sampler, "sampler", None) if is_batch_sampler else None
        self._parts: tuple[Any, ...] = (sampler,) if inner is None else (sampler, inner)
        self._generator_seeds = [_generator_seed(part) for part in self._parts]
        self._forwarded_epoch = 0
        self.is_stateful = callable(getattr(sampler, "state_dict", None)) and callable(
            getattr(sampler, "load_state_dict", None)
        )

    def num_batches(self) -> int:
        """Return the batches of an epoch.

        Raises:
            TypeError: If the sampler has no length.
        """
        length = len(self.sampler)  # type: ignore[arg-type]
        if self.is_batch_sampler:
            return length
        return length // self.batch_size if self.drop_last else -(-length // self.batch_size)

    def epoch_set_by_user(self) -> int | None:
        """Return the epoch that was set on the sampler itself since the last `set_epoch`, else None."""
        for part in self._parts:
            epoch = getattr(part, "epoch", None)
            if isinstance(epoch, int) and callable(getattr(part, "set_epoch", None)) and epoch != self._forwarded_epoch:
                return epoch
        return None

    def set_epoch(self, epoch: int) -> None:
        """Forward to every sampler that has ``set_epoch``."""
        self._forwarded_epoch = epoch
        for part in self._parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def batches(
        self, epoch: int, *, start: int = 0, state: object = None, num_drawn: int = 0
    ) -> Iterator[PlannedBatch]:
        """Yield the batches of an epoch from the ``start``-th on.

        Args:
            epoch: Seeds the draw.
            start: Batches to pass over; they are drawn and thrown away, unless there is a ``state``.
            state: What the sampler's ``state_dict()`` returned before batch ``start``.
            num_drawn: Indices drawn up to there.
        """
        self.set_epoch(epoch)
        key = _draw_key(self.seed, epoch)
        for part, generator_seed in zip(self._parts, self._generator_seeds, strict=True):
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                if generator_seed is None:  # accelerate's; without it the order is the same on every rank too
                    part.generator = None
                else:
                    generator.manual_seed((key ^ generator_seed) % 2**63)
        if state is not None:
            self.sampler.load_state_dict(state)  # type: ignore[attr-defined]
        own = _OwnGenerators(key, only_torch=_draws_from_torch_only(self.sampler))
        with own.swapped_in():
            elements = iter(self.sampler)
        counter = OccurrenceCounter()
        for position in itertools.count(0 if state is None else start):
            with own.swapped_in():
                drawn = self._draw(elements)
                snapshot = self.sampler.state_dict() if self.is_stateful else None  # type: ignore[attr-defined]
            if drawn is None:
                return
            indices = as_indices(drawn)
            planned = getattr(drawn, "planned", None)  # a tool's wrapper around another loader's batches
            rank = None
            if isinstance(planned, PlannedBatch):
                occurrences, rank = planned.occurrences, planned.rank
            elif self.is_stateful:
                # How often an index came before is unknown after a resume in O(1); how many came before is known.
                occurrences = np.arange(num_drawn, num_drawn + len(indices)).astype(np.uint32)
            else:
                occurrences = counter.count(indices)
            num_drawn += len(indices)
            if position >= start:
                yield PlannedBatch(position, indices, occurrences, rank, snapshot, num_drawn)

    def _draw(self, elements: Iterator[Any]) -> Iterable[Any] | None:
        """Return the next batch of indices, None at the end."""
        if self.is_batch_sampler:
            return next(elements, None)
        drawn = list(itertools.islice(elements, self.batch_size))
        return None if not drawn or (self.drop_last and len(drawn) < self.batch_size) else drawn


class OccurrenceCounter:
    """Count how often each index came before; vectorised for integers."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.uint32)
        self._others: Counter[Any] = Counter()

    def count(self, indices: Indices) -> npt.NDArray[np.uint32] | None:
        """Return the occurrences of these indices before, within this batch included; None if all are 0."""
        plain: Sequence[Index]
        if isinstance(indices, np.ndarray):
            plain = integers = indices.tolist()
            if integers and min(integers) >= 0 and max(integers) < _MAX_COUNTED_INDEX:
                return self._count_array(indices, integers)
        else:
            plain = indices
        result = np.zeros(len(plain), dtype=np.uint32)
        for place, index in enumerate(plain):
            result[place] = self._others[index]
            self._others[index] += 1
        return result if result.any() else None

    def _count_array(self, indices: npt.NDArray[np.int64], plain: list[int]) -> npt.NDArray[np.uint32] | None:
        largest = max(plain)
        if largest >= len(self._counts):
            counts = np.zeros(max(largest + 1, 2 * len(self._counts)), dtype=np.uint32)
            counts[: len(self._counts)] = self._counts
            self._counts = counts
        if len(set(plain)) == len(plain) and not np.count_nonzero(self._counts[indices]):
            self._counts[indices] = 1  # nothing repeats, as with most samplers: 11 us instead of 26 for 64 indices
            return None
        order = np.argsort(indices, kind="stable")
        ordered = indices[order]
        is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
        starts = np.flatnonzero(is_first)
        lengths = np.diff(np.append(starts, len(indices)))
        within = np.arange(len(indices)) - np.repeat(starts, lengths)
        result = np.empty(len(indices), dtype=np.uint32)
        result[order] = self._counts[ordered] + within
        self._counts[ordered[starts]] += lengths.astype(np.uint32)
        return result if result.any() else None


class _OwnGenerators:
    """States of the global generators that belong to one draw, kept between its pieces.

    Args:
        key: Seeds them.
        only_torch: Whether only torch's is drawn from. Of the 140 us that the exchange of all three takes for every
            batch, NumPy's takes 112: its state is copied number by number.
    """

    def __init__(self, key: int, *, only_torch: bool) -> None:
        self._key = key
        self._only_torch = only_torch
        self._torch_state: torch.Tensor | None = None  # None: not seeded yet
        self._other_states: tuple[Any, Any] | None = None

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make these states current inside, and the trainer's again after."""
        with _preserved_torch() if self._only_torch else preserved_generators():
            if self._torch_state is not None:
                torch.default_generator.set_state(self._torch_state)
            elif self._only_torch:
                torch.default_generator.manual_seed(self._key)
            else:
                seed_generators(self._key)
            if self._other_states is not None:
                random.setstate(self._other_states[0])
                np.random.set_state(self._other_states[1])
            yield
            self._torch_state = torch.default_generator.get_state()
            if not self._only_torch:
                self._other_states = random.getstate(), np.random.get_state(legacy=False)


@contextmanager
def _preserved_torch() -> Iterator[None]:
    """Put back the state of torch's default generator on exit."""
    state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


def _draws_from_torch_only(sampler: object) -> bool:
    """Whether it is one of torch's own samplers; a subclass may draw from anything."""
    if type(sampler) is torch.utils.data.BatchSampler:
        return _draws_from_torch_only(sampler.sampler)
    return type(sampler) in _TORCHS_SAMPLERS


def _generator_seed(sampler: object) -> int | None:
    generator = getattr(sampler, "generator", None)
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def _draw_key(seed: int, epoch: int) -> int:
    message = b"%d/%d" % (seed, epoch)
    return int.from_bytes(blake2b(message, digest_size=8, person=b"hetero.draw").digest(), "little")
