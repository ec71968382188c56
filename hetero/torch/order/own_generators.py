"""Generators for the draws of a sampler in one pass. The sampler's order then depends only on the seed and the pass."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hetero.batches.seeds import preserved_generators, seed_generators

__all__ = ["OwnGenerators", "draw_key"]


class OwnGenerators:
    """Generator states for the draws of one epoch, kept from one batch to the next.

    Args:
        key: Seed of the global generators.
        only_torch: Whether torch's is the only global generator that the sampler uses. If so, the states of Python's
            and NumPy's generators are not swapped. Swapping all three takes 140 us per batch. NumPy's state alone takes
            112 us, because it is copied number by number.
        more: The sampler's own generators and their seeds.
    """

    def __init__(self, key: int, *, only_torch: bool, more: Sequence[tuple[torch.Generator, int]]) -> None:
        self._key = key
        self._only_torch = only_torch
        self._torch = [(torch.default_generator, key), *more]
        """torch's generators, each with its seed in this pass."""
        self._torch_states: list[torch.Tensor] | None = None
        """States of these generators in this pass. None before they are seeded."""
        self._other_states: tuple[Any, Any] | None = None
        """States of Python's and NumPy's generators in this pass. None before they are seeded, or if not swapped."""

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Make these states current inside the context, and restore the script's states afterwards."""
        # `preserved_generators` restores all global generators. If only torch's is used, the code below restores it.
        with nullcontext() if self._only_torch else preserved_generators():
            # A generator's state includes its seed, so restoring the state restores the user's initial_seed() too.
            script_states = [generator.get_state() for generator, _ in self._torch]
            try:
                self._make_current()
                yield
                self._torch_states = [generator.get_state() for generator, _ in self._torch]
                if not self._only_torch:
                    self._other_states = random.getstate(), np.random.get_state(legacy=False)
            finally:
                for (generator, _), state in zip(self._torch, script_states, strict=True):
                    generator.set_state(state)

    def next_numbers(self) -> tuple[float, ...]:
        """Draw the next number of each global generator. It shows whether the sampler has drawn from that generator."""
        with self.swapped_in():
            # Name the device, because the script may have set another default device, which does not fit the generator.
            first = torch.rand((), generator=torch.default_generator, device="cpu").item()
            return (first,) if self._only_torch else (first, random.random(), np.random.random())

    def _make_current(self) -> None:
        """Give the generators the states of this pass. Seed them the first time."""
        if self._torch_states is None:
            if not self._only_torch:
                seed_generators(self._key)
            for generator, seed in self._torch:
                generator.manual_seed(seed)
            return
        for (generator, _), state in zip(self._torch, self._torch_states, strict=True):
            generator.set_state(state)
        if self._other_states is not None:
            python_state, numpy_state = self._other_states
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def draw_key(seed: int, number: int) -> int:
    """Return the seed of the generators of a pass.

    Args:
        seed: The loader's seed.
        number: The number of the pass.
    """
    message = b"%d/%d" % (seed, number)
    return int.from_bytes(blake2b(message, digest_size=8, person=b"hetero.draw").digest(), "little")
