"""Several sources in given shares.

Each step of the training gets the shares as exactly as whole samples allow. What a source gets too much or too little
in a step is made up for in later steps, so after any step each source is less than two samples away from its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hetero.epochs import MAX_EPOCHS
from hetero.errors import ConfigError
from hetero.plans.permutations import keys_of, mixed, permuted
from hetero.plans.plan import Source
from hetero.plans.windows import LaneRows

__all__ = ["Mixture", "MixtureOrder", "MixturePlan", "next_counts"]

_Weights = Mapping[str, float]

_STEPS_AHEAD = 4096


class Mixture:
    """The shares of the sources of a data set. Pass it to a loader as ``shuffle``.

    Args:
        weights: Share of each source by its name, in any unit. Or a function that returns the shares of a step of the
            training. It must return the same for the same step in every process. Steps count from 0, over all epochs.
            With iterables, they count from 0 in each pass.
        samples: Samples of an epoch, over all ranks. None for the samples of all sources together.

    Raises:
        ConfigError: If a share is negative or not finite, or all are 0, or ``samples`` is less than 1.
    """

    def __init__(self, weights: _Weights | Callable[[int], _Weights], *, samples: int | None = None) -> None:
        if samples is not None and (type(samples) is not int or samples < 1):
            raise ConfigError(f"samples of a Mixture is {samples!r}, expected an integer of at least 1")
        self.samples = samples
        self._weights = weights
        self.names = tuple(self._at(0))
        """Names of the sources, as the script orders them."""

    @property
    def is_constant(self) -> bool:
        """Whether the shares are the same in all steps."""
        return not callable(self._weights)

    def shares(self, step: int) -> list[float]:
        """Return the share of each of `names` in a step. The sum is 1.

        Raises:
            ConfigError: If the function of the user returns other names, or no valid shares.
        """
        weights = self._at(step)
        if weights.keys() != set(self.names):
            raise ConfigError(
                f"the function of a Mixture returns the sources {', '.join(weights)} in step {step}, and "
                f"{', '.join(self.names)} in step 0\n  Return all sources in each step, with 0 for those that get none."
            )
        total = math.fsum(weights.values())
        return [weights[name] / total for name in self.names]

    def check_names(self, names: Sequence[str]) -> None:
        """Check that a data set has the sources of the mixture.

        Raises:
            ConfigError: If the names differ.
        """
        if set(names) != set(self.names):
            raise ConfigError(
                f"the Mixture has the sources {', '.join(self.names)}, and the data set has "
                f"{', '.join(name for name in names if name) or 'none with a name'}\n"
                "  Return hetero.Sources(name=data_set, ...) from the registered function, with the same names."
            )

    def digest(self) -> str:
        """Return a digest of the names and of the shares in some steps, for the state of a loader."""
        steps = [0] if self.is_constant else [0, *(2**exponent for exponent in range(24))]
        text = repr([(self.names, self.shares(step)) for step in steps])
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def _at(self, step: int) -> _Weights:
        weights: Any = self._weights(step) if callable(self._weights) else self._weights
        if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
            raise ConfigError(
                f"the shares of a Mixture are {weights!r:.80} in step {step}, expected numbers by the names of sources"
            )
        values = list(weights.values())
        if not all(isinstance(each, (int, float)) and 0 <= each < math.inf for each in values) or not any(values):
            raise ConfigError(
                f"the shares of a Mixture are {dict(weights)!r:.200} in step {step}, expected numbers >= 0, not all 0"
            )
        return cast("_Weights", weights)


class MixturePlan:
    """The plan of a loader with a `Mixture`.

    Args:
        mixture: What the script wants.
        sources: What the data set has.
        fraction: Share of an epoch that a canary run uses.

    Raises:
        ConfigError: If the names differ, or a source is empty.
    """

    def __init__(self, mixture: Mixture, sources: Sequence[Source], *, fraction: float = 1.0) -> None:
        by_name = {source.name: source for source in sources}
        mixture.check_names(list(by_name))
        if empty := [name for name, source in by_name.items() if not source.num_samples]:
            raise ConfigError(f"source {empty[0]} of the Mixture has no samples")
        self._mixture = mixture
        self._sources = [by_name[name] for name in mixture.names]
        firsts = dict(zip(by_name, np.cumsum([0, *(each.num_samples for each in sources)]).tolist(), strict=False))
        self._firsts = [firsts[name] for name in mixture.names]
        whole = mixture.samples or sum(source.num_samples for source in sources)
        self._num_samples = max(1, round(fraction * whole))

    @property
    def num_samples(self) -> int:
        """Samples of a pass."""
        return self._num_samples

    def digest(self) -> str:
        """Return a digest of the shares and of the layouts of the sources."""
        layouts = [source.layout.digest() if source.layout else str(source.num_samples) for source in self._sources]
        return blake2b(" ".join([self._mixture.digest(), *layouts]).encode(), digest_size=8).hexdigest()

    def count(self, indices: npt.NDArray[np.int64]) -> dict[str, int]:
        """Return how many of these samples are of each source."""
        return {
            source.name: int(np.count_nonzero((indices >= first) & (indices < first + source.num_samples)))
            for source, first in zip(self._sources, self._firsts, strict=True)
        }

    def order(self, *, seed: int, epoch: int, global_batch: int) -> MixtureOrder:
        """Return the order of a pass."""
        first_step = epoch % MAX_EPOCHS * -(-self._num_samples // global_batch)
        key = int(keys_of("mixtures", seed, epoch)[0])
        # Sources with equal rows must not have equal orders.
        orders = [
            LaneRows(source.layout or source.num_samples, keys_of(f"mixtures/{source.name}", seed, epoch))
            for source in self._sources
        ]
        return MixtureOrder(
            self._mixture, orders, self._firsts, key=key, global_batch=global_batch, first_step=first_step
        )


class MixtureOrder:
    """The order of one pass.

    The steps before a position are counted when it is first drawn. For 10^5 steps of eight sources this takes 0.6 s,
    and 1.3 s if the shares are a function.

    Args:
        mixture: The shares.
        sources: The order of each source.
        firsts: First sample of each source in the data set.
        key: Decides the order of sources within a step.
        global_batch: Samples of a step.
        first_step: Step of the training that the pass begins with.
    """

    def __init__(
        self,
        mixture: Mixture,
        sources: Sequence[LaneRows],
        firsts: Sequence[int],
        *,
        key: int,
        global_batch: int,
        first_step: int,
    ) -> None:
        self._mixture = mixture
        self._sources = sources
        self._firsts = firsts
        self._key = np.uint64(key)
        self._global_batch = global_batch
        self._first_step = first_step
        self._counts = np.zeros((0, len(sources)), dtype=np.int64)
        """Samples of each source in each step, for the steps that were counted."""
        self._credits = [0.0] * len(sources)
        """What each source has got too little so far."""
        self._begins = np.zeros((0, len(sources)), dtype=np.int64)
        """How many samples of its lane each source has given before each step."""

    def draw(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32] | None]:
        """Return the sample at each position of the pass, and how often it came before in the pass."""
        steps, places = np.divmod(positions, self._global_batch)
        indices, passes = np.empty_like(positions), np.empty_like(positions)
        for step in np.unique(steps).tolist():
            self._count_to(step)
            # In the permuted order of a step, the samples of each source follow each other.
            chosen = np.flatnonzero(steps == step)
            sizes = np.full(len(chosen), self._global_batch)
            keys = mixed(np.full(len(chosen), step, dtype=np.uint64) ^ self._key)
            slots = permuted(places[chosen], sizes, keys)
            counts = self._counts[step]
            ends = np.cumsum(counts)
            kinds = np.searchsorted(ends, slots, side="right")
            ranks = slots - (ends - counts)[kinds]
            for kind in np.unique(kinds).tolist():
                own = kinds == kind
                source = self._sources[kind]
                rows, repeats = source.draw(step % source.num_lanes, self._begins[step, kind] + ranks[own])
                indices[chosen[own]] = rows + self._firsts[kind]
                passes[chosen[own]] = repeats
        return indices, passes.astype(np.uint32) if passes.any() else None

    def lane(self, position: int, num_samples: int) -> int | None:
        """Return the lane of the step of a position. In each step, each source gives samples of one lane."""
        return position // self._global_batch % max(source.num_lanes for source in self._sources)

    def counts(self, num_steps: int) -> npt.NDArray[np.int64]:
        """Return the samples of each source in the first steps of the pass, an array of (steps, sources)."""
        self._count_to(num_steps - 1)
        return self._counts[:num_steps]

    def _count_to(self, step: int) -> None:
        """Count the samples of each source up to a step."""
        if step < len(self._counts):
            return
        # Count further steps too, because the sums below are made anew each time.
        num_steps = max(step + 1, len(self._counts) + _STEPS_AHEAD)
        counts = np.zeros((num_steps, len(self._sources)), dtype=np.int64)
        counts[: len(self._counts)] = self._counts
        shares = self._mixture.shares(self._first_step)
        for number in range(len(self._counts), num_steps):
            if not self._mixture.is_constant:
                shares = self._mixture.shares(self._first_step + number)
            counts[number], self._credits = next_counts(shares, self._credits, self._global_batch)
        self._counts = counts
        self._begins = np.zeros_like(counts)
        for kind, source in enumerate(self._sources):
            for lane in range(source.num_lanes):
                own = counts[lane :: source.num_lanes, kind]
                self._begins[lane :: source.num_lanes, kind] = np.cumsum(own) - own


def next_counts(shares: Sequence[float], rests: Sequence[float], num_samples: int) -> tuple[list[int], list[float]]:
    """Return the samples of each source in the next step, and what each has got too little after it.

    Args:
        shares: Share of each source. Their sum is 1.
        rests: What each source has got too little before.
        num_samples: Samples of the step.
    """
    # Lists, because arrays of a few numbers take twice as long.
    wanted = [rest + share * num_samples for rest, share in zip(rests, shares, strict=True)]
    counts = [max(0, math.floor(each)) for each in wanted]
    # The largest rests get one more until the sum fits, or the smallest ones get one fewer.
    missing = num_samples - sum(counts)
    by_rest = sorted(range(len(wanted)), key=lambda kind: counts[kind] - wanted[kind])
    for kind in by_rest[: max(missing, 0)]:
        counts[kind] += 1
    for kind in [kind for kind in reversed(by_rest) if counts[kind]][: max(-missing, 0)]:
        counts[kind] -= 1
    return counts, [each - count for each, count in zip(wanted, counts, strict=True)]
